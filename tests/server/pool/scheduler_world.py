"""The scheduler in a world that does anything at any time, with the promises kept in a model."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from npugrad_server.pool.admission import Demand
from npugrad_server.pool.call_lifecycle import EXHAUSTION_REASONS, SUSPECT_ATTEMPTS
from npugrad_server.pool.circuit_breaker import OPEN_S, Death
from npugrad_server.pool.commands import (
    CircuitChanged,
    Command,
    CompleteCall,
    FailCall,
    Failure,
    KillWorker,
    PostponeCall,
    RedirectCall,
    ReleaseCall,
    RequeueCall,
    SpawnWorker,
    StartCall,
    TellWorker,
    WorkerSpec,
)
from npugrad_server.pool.device_memory import workspace_footprint
from npugrad_server.pool.regions import ALIGNMENT, Region, aligned
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.state import CallState, WorkerState
from npugrad_server.pool.tenant import Tenant
from npugrad_server.pool.types import DeviceState, PoolSettings
from npugrad_server.pool.worker_lifecycle import SLOWEST_S, STARTS_AT_ONCE, TURN_S
from npugrad_server.worker.protocol import AbandonCall, WorkspaceGranted, WorkspaceRefused

ARENA, MEMORY, ATTEMPTS = 256, 100, 3
DEVICE = 8 * 512
"""Memory that a device with its own has at most."""
UNSUPPORTED = ("OPERATOR_UNSUPPORTED", "DETERMINISM_UNSUPPORTED")
OPERATORS = ("", "p", "q")


@dataclass(frozen=True)
class Plan:
    """All that the pool looks at of a plan: what it needs is counted already."""

    record: Any
    signature: bytes
    demands: dict[bool, Demand]


@dataclass(frozen=True)
class Planned:
    """All that admission control looks at of a planned call."""

    plan: Plan
    options: Any
    tenant: Tenant
    deadline_s: float | None
    request_id: str = ""


@dataclass
class Call:
    """What the world knows of a call."""

    request: CallState
    starts: list[StartCall] = field(default_factory=list)
    running: bool = False
    answers: int = 0
    cancelled: bool = False
    closed: bool = False
    released: int = 0
    region_live: bool = False
    suspect: bool = False
    deaths: int = 0
    declined: tuple[int, int] | None = None
    redirected: int = 0
    needs: int = 0
    """Workspace its first phase asks for, in blocks."""
    granted: int = 0
    """Workspace the scheduler knows of while it runs, in bytes."""
    refusal: WorkspaceRefused | None = None
    abandoned: bool = False
    postponed: int = 0
    died: list[Any] = field(default_factory=list)
    """Deaths of workers that it may have caused: `blame_world.Died`."""

    @property
    def tries(self) -> int:
        """Starts that were not taken back, nor ended from outside or together with others."""
        spared: int = sum(died.together or died.death is Death.KILLED for died in self.died)
        return len(self.starts) - self.postponed - spared

    @property
    def workspace(self) -> int:
        """Bytes that its first phase asks for."""
        return self.needs * 512 - 32 if self.needs else 0

    @property
    def device_bytes(self) -> int:
        return self.request.device_bytes + workspace_footprint(self.granted)

    def told(self) -> str:
        """What it is, in words."""
        request = self.request
        due = "never" if request.deadline_s is None else f"{request.deadline_s:.3f}"
        return (
            f"tenant {request.tenant.name}, priority {request.priority}, label {request.label}, "
            f"operator {request.operator!r}, deterministic {request.deterministic}, due {due}, "
            f"outputs {request.output_bytes}, host {request.memory_bytes}, device {request.device_bytes}"
        )


@dataclass
class Process:
    """What the world knows of a worker's process."""

    incarnation: int
    started: float = 0.0
    open: bool = False
    opened: bool = False
    """Whether it was open before it was told to end."""
    told_to_end: bool = False
    named: int | None = None
    """Call under which it said that its device failed."""
    memory: int | None = None
    unavailable: frozenset[str] = frozenset()
    mode: bool | None = None

    def refuses(self, call: Call) -> bool:
        return call.request.operator in self.unavailable or (
            call.request.deterministic and self.mode is False
        )


def has_gap(regions: Iterable[Region], size: int, nbytes: int) -> bool:
    """Whether so many bytes fit between regions."""
    wanted, end = aligned(nbytes), 0
    taken: list[tuple[int, int]] = []
    for region in regions:
        if region.nbytes:
            insort(taken, (region.offset, region.nbytes))
    for offset, length in [*taken, (size // ALIGNMENT * ALIGNMENT, 0)]:
        if offset - end >= wanted:
            return True
        end = offset + length
    return not wanted


class SchedulerWorld:
    """One scheduler, with what calls, devices and processes do; what begins with "promise" is checked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: dict[int, Call] = {}
        self.processes: dict[int, Process] = {}
        self.damaged: set[int] = set()
        self.countable: Counter[int] = Counter()
        """Losses that may count against each device: those of idle processes, or under a single call."""
        self.ended = 0.0
        """When the last process ended that was lost."""
        self.opened: dict[Hashable, float] = {}
        """When circuits opened that did not close again."""
        self.streams = 0
        self.one_mode = self.own = self.heavy = False
        self.scheduler: Scheduler

    # ------------------------------------------------------------------------------------------ the driver

    def obey(self, commands: Sequence[Command]) -> None:  # noqa: PLR0915 -- one branch for each command
        for command in commands:
            if isinstance(command, StartCall):
                self._started(command)
            elif isinstance(command, (CompleteCall, FailCall)):
                call = self.calls[command.call]
                call.answers += 1
                assert not call.cancelled, "an answer nobody asked for"
                assert not isinstance(command, CompleteCall) or call.starts
                refused = isinstance(command, FailCall) and command.reason == "CIRCUIT_OPEN"
                assert not refused or any(key in self.opened for key in self._circuits(call))
                if isinstance(command, FailCall) and command.reason in UNSUPPORTED:
                    assert self._choices(call) == [], "some device may have it"
                    modes = command.reason == "DETERMINISM_UNSUPPORTED"
                    assert call.request.deterministic or not modes
            elif isinstance(command, ReleaseCall):
                call = self.calls[command.call]
                call.released += 1
                call.region_live = False
                assert call.closed, "memory taken from a caller that still uses it"
                assert not call.running, "memory taken from under a worker"
            elif isinstance(command, SpawnWorker):
                assert command.worker not in self.processes, "two processes for one device"
                self.processes[command.worker] = Process(command.incarnation, self.now)
                starting = [p for p in self.processes.values() if not p.open and not p.told_to_end]
                recent = [p for p in starting if p.started + TURN_S > self.now]
                assert not self.heavy or len(recent) <= STARTS_AT_ONCE
            elif isinstance(command, KillWorker):
                assert self.processes[command.worker].incarnation == command.incarnation
                self.processes[command.worker].told_to_end = True
            elif isinstance(command, RequeueCall):
                call = self.calls[command.call]
                assert call.tries < ATTEMPTS
                assert not call.suspect or call.deaths < SUSPECT_ATTEMPTS
            elif isinstance(command, RedirectCall):
                call = self.calls[command.call]
                call.redirected += 1
                assert command.reason in EXHAUSTION_REASONS
                assert call.tries < ATTEMPTS
                assert not call.suspect
            elif isinstance(command, CircuitChanged):
                key = self._circuits(self.calls[command.call])[command.whole]
                self.opened.update({key: self.ended}) if command.deaths else self.opened.pop(key)
            elif isinstance(command, PostponeCall):
                self.calls[command.call].postponed += 1
            elif isinstance(command, TellWorker):
                self._told(command)

    def _told(self, command: TellWorker) -> None:
        message, process = command.message, self.processes[command.worker]
        call = self.calls[message.call]
        assert process.incarnation == command.incarnation
        assert call.running
        assert call.starts[-1].worker == command.worker
        if isinstance(message, AbandonCall):
            assert call.answers or call.cancelled, "given up while somebody waits"
            assert not call.abandoned, "told twice"
            call.abandoned = True
            return
        if isinstance(message, WorkspaceGranted):
            call.granted = call.workspace
            return
        call.refusal = message
        if message.final:
            needed = call.request.device_bytes + workspace_footprint(call.workspace)
            choices = [*self._choices(call), self.scheduler.workers[command.worker]]
            assert not any(worker.could_hold(needed) for worker in choices), "some device has room"

    def _choices(self, call: Call) -> list[WorkerState]:
        """Where a call may go: not where its operator or mode lacks, nor back while it can go elsewhere."""
        able = [
            worker
            for worker in self.scheduler.workers
            if worker.state is not DeviceState.DOWN
            and not (worker.state is DeviceState.READY and self.processes[worker.index].refuses(call))
        ]
        suiting = [worker for worker in able if worker.deterministic in (None, call.request.deterministic)]
        some_suit = any(worker.state is DeviceState.READY for worker in suiting) and any(
            worker.could_hold(call.request.device_bytes) for worker in suiting
        )
        return self._others(call, able) or (suiting if some_suit else able)

    @staticmethod
    def _others(call: Call, able: Sequence[WorkerState]) -> list[WorkerState]:
        """Devices that are ready, and not the one that could not take the call."""
        return [
            worker
            for worker in able
            if call.declined not in (None, (worker.index, worker.incarnation))
            and worker.state is DeviceState.READY
            and worker.could_hold(call.request.device_bytes)
        ]

    def _started(self, start: StartCall) -> None:
        call, process = self.calls[start.call], self.processes[start.worker]
        assert process.open, "started on a device that is not open"
        assert not process.told_to_end, "started on a process that is being ended"
        assert process.incarnation == start.incarnation
        assert not call.running
        assert not call.answers
        assert not call.cancelled
        for key in self._circuits(call):
            assert self.opened.get(key, -OPEN_S) + OPEN_S <= self.now, "its circuit is open"
        assert call.request.deadline_s is None or call.request.deadline_s > self.now
        call.starts.append(start)
        call.refusal = None
        assert start.attempt == len(call.starts) - call.postponed
        assert call.tries <= ATTEMPTS
        assert (start.workspace_bytes is None) == (process.memory is None)
        call.granted = start.workspace_bytes or 0
        assert not process.refuses(call), "started where its operator or its mode lacks"
        if call.declined is None and process.mode and not call.request.deterministic:
            chosen = [worker.index for worker in self._choices(call)]
            assert start.worker in chosen, (
                "in a mode that it did not ask for, though there was another device"
            )
        if (start.worker, start.incarnation) == call.declined:
            ready = [worker.index for worker in self._choices(call)]
            assert start.worker in ready, "back where it was declined, though there was another device"
        beside = [c for c in self._on(start.worker) if c is not call]
        if self.one_mode and process.mode is None:
            assert all(c.request.deterministic == call.request.deterministic for c in beside)
        self._check_region(call, start)
        call.running = call.region_live = True

    def _check_region(self, call: Call, start: StartCall) -> None:
        region = call.request.region
        assert region.nbytes >= call.request.output_bytes
        assert region.offset + region.nbytes <= ARENA
        for other in self.calls.values():
            if not other.region_live or other is call:
                continue
            last = other.starts[-1]
            if (last.worker, last.incarnation) == (start.worker, start.incarnation):
                theirs = other.request.region
                apart = region.offset + region.nbytes, theirs.offset + theirs.nbytes
                assert apart[0] <= theirs.offset or apart[1] <= region.offset, "regions overlap"

    @staticmethod
    def _circuits(call: Call) -> tuple[Hashable, Hashable]:
        """Keys of what may refuse a call: that of its signature, and that of its operator."""
        request = call.request
        return (*request.owner, request.plan and request.plan.signature), (*request.owner, None)

    def _on(self, worker: int) -> list[Call]:
        return [c for c in self.calls.values() if c.running and c.starts[-1].worker == worker]

    # --------------------------------------------------------------------------------------------- the world

    def open(self, settings: PoolSettings, *, one_mode: bool, own: bool, heavy: bool) -> None:
        self.streams, self.one_mode, self.own, self.heavy = settings.streams_per_device, one_mode, own, heavy
        specs = [WorkerSpec(self.streams, ARENA, "host", heavy) for _ in settings.devices]
        self.scheduler = Scheduler(settings, specs, {"host": MEMORY})
        self.obey(self.scheduler.start(self.now))

    def _ready(
        self,
        worker: int,
        memory: int = DEVICE,
        unavailable: frozenset[str] = frozenset(),
        mode: bool | None = None,
    ) -> None:
        process = self.processes[worker]
        process.open = True
        if not process.told_to_end:
            process.unavailable, process.mode, process.opened = unavailable, mode, True
        reasons = dict.fromkeys(unavailable, "its first try failed")
        # A device may have less than the last time: somebody else may use it.
        process.memory = memory if self.own else None
        self.obey(
            self.scheduler.ready(
                worker,
                process.incarnation,
                self.now,
                one_mode=self.one_mode and mode is None,
                memory_bytes=process.memory,
                unavailable=reasons,
                deterministic=mode,
                no_determinism="it reads the option once" if mode is False else "",
            )
        )

    def _ask(self, number: int) -> None:
        call = self.calls[number]
        start = call.starts[-1]
        if start.workspace_bytes is None or call.workspace <= call.granted:
            return
        call.refusal = None
        command = self.scheduler.need_workspace(start.worker, start.incarnation, number, call.workspace)
        self.obey(command)
        assert (call.refusal is None) == (call.granted == call.workspace), "a question without an answer"

    def _come_back(self, number: int) -> None:
        call = self.calls[number]
        if call.refusal is None or call.refusal.final:
            self._answer(number, "DEVICE_OUT_OF_MEMORY")
            return
        start, before = call.starts[-1], len(call.starts)
        call.running = call.region_live = False
        known = max(call.workspace, start.workspace_bytes or 0)
        self.obey(self.scheduler.deferred(start.worker, start.incarnation, number, call.workspace, self.now))
        needed = call.request.device_bytes + workspace_footprint(known)
        if any(worker.could_hold(needed) for worker in self._choices(call)):
            for again in call.starts[before:]:
                assert (again.workspace_bytes or 0) >= call.workspace, "placed where it has no room"

    def _answerable(self) -> list[int]:
        """Calls that run, but for one that a process has named as what its device failed under."""
        named = {process.named for process in self.processes.values()}
        return [number for number, call in self.calls.items() if call.running and number not in named]

    def _answer(self, number: int, reason: str = "") -> None:
        call = self.calls[number]
        start = call.starts[-1]
        goes_on = self._goes_elsewhere(call, reason)
        call.running = False
        call.region_live = call.region_live and not goes_on
        told = call.workspace if not reason else None
        before = call.redirected
        self.obey(
            self.scheduler.answered(
                start.worker,
                start.incarnation,
                number,
                not reason,
                self.now,
                seconds=None if reason else self._seconds(call),
                workspace_bytes=told,
                reason=reason,
            )
        )
        assert call.redirected - before == goes_on
        worker = self.scheduler.workers[start.worker]
        final = call.refusal is not None and call.refusal.final
        if not reason or (reason in EXHAUSTION_REASONS and not final):
            assert worker.exhausted == bool(reason)

    def _seconds(self, call: Call) -> float | None:
        """What a worker says that it spent on a call."""
        return None

    def _goes_elsewhere(self, call: Call, reason: str) -> bool:
        """Whether only the device stands in the way of a call and another is ready; notes the device."""
        final = call.refusal is not None and call.refusal.final
        wanted = not call.answers and not call.cancelled and not call.suspect and call.tries < ATTEMPTS
        if reason not in EXHAUSTION_REASONS or final or not wanted or call.declined is not None:
            return False
        start = call.starts[-1]
        call.declined = (start.worker, start.incarnation)
        others = self._others(call, [w for w in self.scheduler.workers if self._has(w, call)])
        return bool(others)

    def _has(self, worker: WorkerState, call: Call) -> bool:
        process = self.processes.get(worker.index)
        return process is not None and not process.refuses(call)

    def _die(self, worker: int, death: Death = Death.KILLED) -> None:
        process, calls = self.processes[worker], self._on(worker)
        if not process.told_to_end:
            failure = Failure("it ended", killed=death is Death.KILLED)
            self.obey(self.scheduler.failing(worker, process.incarnation, failure, self.now))
            if process.opened:
                self._blame(self.scheduler.workers[worker], death)
        elif process.opened:
            self._blame(self.scheduler.workers[worker], self.scheduler.workers[worker].death)
        del self.processes[worker]
        for call in calls:
            call.running = call.region_live = False
            call.deaths += 1
        self.countable[worker] += len(calls) < 2 or process.named is not None
        self.obey(self.scheduler.lost(worker, process.incarnation, "signal 9", self.now))

    def _blame(self, worker: WorkerState, death: Death) -> None:
        """A process that had opened its device has ended; the scheduler is about to learn of it."""

    def _close(self, number: int) -> None:
        call = self.calls[number]
        call.cancelled |= not call.answers
        call.closed = True
        self.obey(self.scheduler.close(number, self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.scheduler.tick(self.now))

    # -------------------------------------------------------------------------------------------- promises

    def promise_streams_and_memory_are_never_exceeded(self) -> None:
        for worker in self.processes:
            assert len(self._on(worker)) <= self.streams
        assert sum(c.request.memory_bytes for c in self.calls.values() if c.running) <= MEMORY

    def promise_a_devices_own_memory_is_what_its_calls_hold_and_never_more_than_it_has(self) -> None:
        for worker, process in self.processes.items():
            if process.memory is not None:
                held = sum(call.device_bytes for call in self._on(worker))
                assert held == self.scheduler.workers[worker].memory_used_bytes <= process.memory

    def promise_a_worker_knows_which_of_its_calls_nobody_waits_for(self) -> None:
        for call in self.calls.values():
            # One that is being ended, such as for a call that ran too long, need not be told.
            if call.running and not self.processes[call.starts[-1].worker].told_to_end:
                assert call.abandoned == bool(call.answers or call.cancelled)

    def promise_a_device_is_given_up_for_damage_only_and_otherwise_tried_before_long(self) -> None:
        for worker in self.scheduler.workers:
            assert not worker.damaged or worker.index in self.damaged
            assert worker.alive == (worker.index in self.processes)
            if not worker.damaged and not worker.alive:
                assert worker.alarm is not None, "nobody tries it again"
                assert worker.alarm <= self.now + SLOWEST_S

    def promise_no_device_answers_for_what_may_be_the_fault_of_a_call_or_of_the_host(self) -> None:
        for worker in self.scheduler.workers:
            assert worker.failures <= self.countable[worker.index]

    def promise_the_queue_counts_what_waits_and_what_runs(self) -> None:
        queue = self.scheduler.queue
        assert queue.count == sum(1 for _ in queue)
        assert queue.running == self.scheduler.running
        waiting = [c for c in self.calls.values() if not (c.running or c.answers or c.cancelled)]
        assert sorted(call.id for call in queue) == sorted(call.request.id for call in waiting)

    def promise_nobody_is_answered_or_released_twice(self) -> None:
        for call in self.calls.values():
            assert call.answers <= 1
            assert call.released <= 1

    def promise_an_overdue_alarm_is_never_left_behind(self) -> None:
        alarm = self.scheduler.next_alarm()
        assert alarm is None or alarm >= self.now or self.scheduler.tick(self.now) == []

    def promise_what_is_kept_of_the_devices_is_so(self) -> None:
        eligibility, workers = self.scheduler.eligibility, self.scheduler.workers
        for kind, found in eligibility.items():
            assert found == eligibility.fresh(*kind)
        assert self.scheduler.all_down == all(worker.state is DeviceState.DOWN for worker in workers)
        assert self.scheduler.running == sum(len(worker.running) for worker in workers)

    def teardown(self) -> None:
        """Whatever happened: once it calms down, every call gets its answer and its memory goes back."""
        for _ in range(10 * len(self.calls) + 100):
            if all((c.answers or c.cancelled) and not c.running for c in self.calls.values()):
                break
            self._calm_down()
        waiting = [n for n, c in self.calls.items() if not c.answers and not c.cancelled]
        assert not waiting, f"lost calls: {waiting}"
        for number, call in self.calls.items():
            self._close(number)
            assert call.released == 1
        assert self.scheduler.output_used_bytes == 0
        assert self.scheduler.queue_depth == self.scheduler.running == 0
        assert [w.memory_used_bytes for w in self.scheduler.workers] == [0] * len(self.scheduler.workers)
        assert Counter(w.outputs.used_bytes for w in self.scheduler.workers) == {
            0: len(self.scheduler.workers)
        }
        self._recover()

    def _recover(self) -> None:
        """Once nothing goes wrong any more, every device that is not damaged is back before long."""
        end = self.now + SLOWEST_S
        while not all(
            worker.damaged or worker.state is DeviceState.READY for worker in self.scheduler.workers
        ):
            self._calm_down()
            if all(process.open for process in self.processes.values()):
                self.now = max(self.now, self.scheduler.next_alarm() or self.now)
            assert self.now <= end, "a device does not come back"
            self.obey(self.scheduler.tick(self.now))

    def _calm_down(self) -> None:
        """Processes end, open and answer as they should; callers read their results and close."""
        for worker, process in list(self.processes.items()):
            if process.told_to_end:
                self._die(worker)
            elif not process.open:
                self._ready(worker)
        for number, call in list(self.calls.items()):
            if call.running:
                self._ask(number)
                if call.refusal is None:
                    self._answer(number)
                else:
                    self._come_back(number)
            if (call.answers or call.cancelled) and not call.closed:
                self._close(number)
        is_coming = any(w.state is DeviceState.RESTARTING for w in self.scheduler.workers)
        if is_coming or self.scheduler._isolation.again_s is not None:
            self.now = max(self.now, self.scheduler.next_alarm() or self.now)
        self.obey(self.scheduler.tick(self.now))
