"""The scheduler's world with admission control, tenants and circuits: what `make prove-model-check` drives.

An event is a name and a number from which all its choices follow; one that cannot happen now does nothing.
So any part of a history is a history too, and one that fails can be made shorter.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.server.pool.admission_world import DeadlineWorld, QuotaWorld
from tests.server.pool.blame_world import FATAL, BlameWorld
from tests.server.pool.scheduler_world import (
    ARENA,
    ATTEMPTS,
    DEVICE,
    MEMORY,
    OPERATORS,
    Call,
    Plan,
    Planned,
    SchedulerWorld,
    has_gap,
)

from npugrad import Product
from npugrad.call import CallOptions
from npugrad.errors import NpugradError
from npugrad_server.backends.base import RestartPolicy
from npugrad_server.pool.admission import AdmissionControl, Demand, RegionLayout
from npugrad_server.pool.call_lifecycle import EXHAUSTION_REASONS, SUSPECT_ATTEMPTS
from npugrad_server.pool.circuit_breaker import OPEN_S, Death
from npugrad_server.pool.commands import (
    Command,
    FailCall,
    Failure,
    PostponeCall,
    RedirectCall,
    ReleaseCall,
    RequeueCall,
    StartCall,
)
from npugrad_server.pool.device_memory import workspace_footprint
from npugrad_server.pool.regions import aligned
from npugrad_server.pool.state import CallState, WorkerState
from npugrad_server.pool.tenant import Tenant
from npugrad_server.pool.types import DeviceState, PoolSettings

Event = tuple[str, int]

INPUTS, PLACES = 1024, 8
"""Bytes of operands, and calls that may wait, uploads included."""
QUOTA_PLACES, QUOTA_BYTES = 3, 512
"""Quotas of the tenants "small" and "even"."""
MOST_NEEDS = 9
"""Blocks of workspace that a call asks for at most."""
RUN_LIMIT_S = 540.0
WEIGHTS = {
    "arrive": 22,
    "uploaded": 22,
    "answer": 24,
    "ready": 9,
    "pass_time": 14,
    "close": 12,
    "ask": 4,
    "come_back": 4,
    "die": 3,
    "complain": 2,
    "cancel": 2,
    "hang_up": 1,
    "get_on": 1,
    "not_start": 1,
    "stale": 2,
    "reload": 1,
}
"""How often each event comes."""
PROMISES = [name for name in dir(SchedulerWorld) if name.startswith("promise_")]


class PoolWorld(BlameWorld, QuotaWorld, DeadlineWorld):
    """One pool and all around it.

    Attributes:
        uploads: Calls that were let in and did not arrive yet, with what they will be.
        answers: How many calls were answered, by reason.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.uploads: dict[int, Call] = {}
        self.lanes: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        self.weights = {"small": 0.5, "even": 1.0, "large": 4.0}
        self._plot(rng, list(self.weights))
        self.answers: Counter[str] = Counter()
        self.not_retried: set[int] = set()
        self.stale_events: list[tuple[int, int, int]] = []
        self.count = 0
        workers, streams = rng.randint(1, 4), rng.randint(1, 3)
        own = rng.random() < 0.5
        settings = PoolSettings(
            ("cpu:0",) * workers, Product.ATLAS_A2, INPUTS, ARENA, 0, PLACES, streams, 5.0, 20.0, 1.0, 8.0, 4
        )
        if rng.random() < 0.2:
            settings = replace(settings, circuit_deaths=0)
        self.opens_at = settings.circuit_deaths
        self.admission = AdmissionControl(settings, MEMORY, own_memory=own)
        self.open(settings, one_mode=rng.random() < 0.3, own=own, heavy=rng.random() < 0.3)

    # ----------------------------------------------------------------------------------------------- history

    def apply(self, event: Event) -> str:
        """Has an event happen and checks all promises; returns what happened, empty for nothing."""
        name, seed = event
        told = str(getattr(self, f"on_{name}")(random.Random(seed)) or "")
        if told:
            for promise in PROMISES:
                getattr(self, promise)()
            self._check_operands()
            self._check_work_conserved()
        return told

    def finish(self) -> None:
        """Calms down: every call is answered once, and every byte and place is free again."""
        for number in list(self.uploads):
            self._hang_up(number)
        self.teardown()
        assert self.admission.operands.used_bytes == 0, "bytes of operands are held by nobody"
        assert not self.regions
        assert not self.admission.quotas.uses, "a tenant holds what nobody has"
        assert not any(self.lanes.values())

    # ------------------------------------------------------------------------------------------------ events

    def on_arrive(self, rng: random.Random) -> str:
        number, call, planned = self._announced(rng)
        expected, reason = self._refusal(planned), ""
        kind = planned.plan.record.name, planned.options.deterministic
        try:
            most = self.scheduler.eligibility[kind].most_bytes
            if expected in ("NO_DEVICE", "OPERATOR_UNSUPPORTED", "DETERMINISM_UNSUPPORTED"):
                reason = expected  # the pool looks before it asks admission control, and so do we
            elif self.scheduler.circuits.refusal(call.request.owner, planned.plan, self.now) is not None:
                expected = reason = "CIRCUIT_OPEN"
                self._justify_circuit(number, call)
            else:
                waiting = len(self.uploads) + self.scheduler.queue_depth
                arguments: Any = (planned, waiting, self.scheduler.forecast, self.now, most)
                before = self.dropped
                _, self.regions[number], found = self.admission.reserve(*arguments, drop=self._drop)
                self._enter(number, planned)
                self._check_let_in(planned, found)
                request = call.request
                request.expected_s, request.longest_run_s = found.expected_s, found.longest_run_s
                request.is_probe = found.is_probe
                if self.dropped > before and expected == "QUEUE_FULL":
                    expected = ""
        except NpugradError as error:
            reason = error.reason
        if reason == "WOULD_MISS_DEADLINE" and expected in ("", "QUEUE_FULL", "QUOTA_EXCEEDED"):
            expected = self._check_late(planned)
        assert reason == expected, f"refused with {reason!r}; expected {expected!r}"
        if reason:
            self.answers[reason] += 1
            return f"call {number} is refused: {reason}"
        self.uploads[number] = call
        region = self.regions[number]
        return f"call {number} is let in: {call.told()}, operands {region.offset}+{region.nbytes}"

    def on_uploaded(self, rng: random.Random) -> str:
        if not self.uploads:
            return ""
        number = rng.choice(list(self.uploads))
        call = self.calls[number] = self.uploads.pop(number)
        self._lane(call).append(number)
        self.obey(self.scheduler.submit(call.request, self.now))
        self.obey(self.scheduler.tick(self.now))  # its deadline may have passed in the upload
        if call.starts:
            return f"call {number} is all there"
        self.waited.add(number)
        return f"call {number} waits"

    def on_hang_up(self, rng: random.Random) -> str:
        if not self.uploads:
            return ""
        number = rng.choice(list(self.uploads))
        self._hang_up(number)
        return f"the caller of {number} is gone in its upload"

    def _hang_up(self, number: int) -> None:
        del self.uploads[number]
        self._leave(number)

    def on_ready(self, rng: random.Random) -> str:
        worker = self._pick(rng, [w for w, p in self.processes.items() if not p.open])
        if worker is None:
            return ""
        unavailable = frozenset(o for o in OPERATORS[1:] if rng.random() < 0.15)
        mode = rng.choice([None, None, None, False, True])
        memory = DEVICE if rng.random() < 0.8 else rng.randint(0, 8) * 512
        self._ready(worker, memory, unavailable, mode)
        return f"device {worker} is ready: mode {mode}, without {sorted(unavailable)}, {memory} bytes"

    def on_ask(self, rng: random.Random) -> str:
        number = self._pick(rng, [n for n, c in self.calls.items() if c.running])
        if number is None:
            return ""
        self._ask(number)
        return f"call {number} needs {self.calls[number].workspace} bytes of workspace"

    def on_come_back(self, rng: random.Random) -> str:
        """A call that was refused its workspace is given back, or fails."""
        number = self._pick(rng, [n for n, c in self.calls.items() if c.running and c.refusal])
        if number is None:
            return ""
        self._come_back(number)
        return f"call {number} is given back"

    def on_answer(self, rng: random.Random) -> str:
        number = self._pick(rng, self._answerable())
        if number is None:
            return ""
        reason = rng.choice(["", "", "", "", "", "INTERNAL", *sorted(EXHAUSTION_REASONS)])
        start = self.calls[number].starts[-1]
        self._answer(number, reason)
        self._remember(start)
        return f"call {number} is answered by {start.worker}: {reason or 'results'}"

    def on_get_on(self, rng: random.Random) -> str:
        worker = self._pick(rng, [w for w, p in self.processes.items() if not p.open])
        if worker is None:
            return ""
        self.obey(self.scheduler.progress(worker, self.processes[worker].incarnation, "next", self.now))
        return f"device {worker} gets on"

    def on_not_start(self, rng: random.Random) -> str:
        """The host has nothing left for a process."""
        worker = self._pick(rng, [w for w, p in self.processes.items() if not p.open])
        if worker is None:
            return ""
        process = self.processes.pop(worker)
        self.obey(self.scheduler.lost(worker, process.incarnation, "EMFILE", self.now, host=True))
        return f"device {worker} has no process"

    def on_die(self, rng: random.Random) -> str:
        ending = [w for w, p in self.processes.items() if p.told_to_end]
        deadly = {w: c for w in self.processes for c in map(self._crime, self._on(w)) if c in FATAL[:2]}
        if ending or (deadly and rng.random() < 0.8):
            chosen = [rng.choice(ending or list(deadly))]
        else:
            chosen = rng.sample(sorted(self.processes), min(len(self.processes), rng.choice([1, 1, 2, 4])))
            deadly = {}
        told = []
        for worker in chosen:
            if not (ending or deadly or self._may_be_killed(worker)):
                continue
            told.append(f"{worker} under {[call.request.id for call in self._on(worker)]}")
            for call in self._on(worker):
                self._remember(call.starts[-1])
            self.cause = deadly.get(worker, "")
            self._die(worker, Death.DIED if self.cause == "crash" else Death.KILLED)
            self.cause = ""
        return f"devices lose their processes: {', '.join(told)}" if told else ""

    def on_complain(self, rng: random.Random) -> str:
        """A process says that its device failed, under one of its calls or while it was being opened."""
        worker = self._pick(rng, [w for w, p in self.processes.items() if not p.told_to_end])
        if worker is None:
            return ""
        process = self.processes[worker]
        running = [call.request.id for call in self._on(worker)] if process.open else []
        number = self._pick(rng, running)
        policy = rng.choice([*RestartPolicy, RestartPolicy.SOON, RestartPolicy.SOON])
        if policy is RestartPolicy.NEVER and rng.random() < 0.8:
            policy = RestartPolicy.SOON  # damaged devices do not come back, and without any nothing happens
        retry, exempt = rng.random() < 0.7, rng.random() < 0.3
        failure = Failure("words", policy, number, None if number is None else 507015, retry, exempt)
        if number is not None:
            self.calls[number].suspect = True
            self.guilty.add(self.calls[number].request.owner)
            if not retry:
                self.not_retried.add(number)
        self.damaged |= {worker} if policy is RestartPolicy.NEVER else set()
        process.named = number
        self.obey(self.scheduler.failing(worker, process.incarnation, failure, self.now))
        assert not process.open or process.told_to_end, "a device that failed stays in the pool"
        process.told_to_end = True
        return f"device {worker} fails under {number}: {policy.name}, retry {retry}, exempt {exempt}"

    def on_cancel(self, rng: random.Random) -> str:
        number = self._pick(rng, list(self.calls))
        if number is None:
            return ""
        call = self.calls[number]
        call.cancelled |= not call.answers
        self._leave_lane(call)
        self.obey(self.scheduler.cancel(number, self.now))
        return f"the caller of {number} cancels"

    def on_close(self, rng: random.Random) -> str:
        """A caller is done with a call; most likely one that it has the answer of."""
        done = [n for n, c in self.calls.items() if (c.answers or c.cancelled) and not c.closed]
        if not done or rng.random() < 0.05:
            done = [n for n, c in self.calls.items() if not c.closed]
        number = self._pick(rng, done)
        if number is None:
            return ""
        self._close(number)
        return f"the caller of {number} is done with it"

    def on_pass_time(self, rng: random.Random) -> str:
        """Time passes, now and then much of it."""
        seconds = 600.0 if rng.random() < 0.01 else rng.choice([0.0, 0.001, 0.1, 1.0, 5.0]) * rng.random() * 2
        self.pass_time(seconds)
        return f"{seconds:.4f} s pass: {self.now:.4f}"

    def on_stale(self, rng: random.Random) -> str:
        """A process says what is no news: of a call that it does not have any more."""
        if not self.stale_events:
            return ""
        worker, incarnation, number = rng.choice(self.stale_events)
        call = self.calls.get(number)
        if call is not None and call.running and call.starts[-1].incarnation == incarnation:
            return ""  # it may have it again
        good = rng.random() < 0.5
        scheduler = self.scheduler
        for commands in (
            scheduler.answered(
                worker, incarnation, number, good, self.now, reason="" if good else "INTERNAL"
            ),
            scheduler.need_workspace(worker, incarnation, number, 64),
            scheduler.deferred(worker, incarnation, number, 64, self.now),
        ):
            assert commands == [], "an event about nothing has consequences"
        return f"device {worker} answers {number} late"

    def on_reload(self, rng: random.Random) -> str:
        """Tenants get other weights."""
        name = rng.choice(list(self.weights))
        self.weights[name] = rng.choice([0.1, 0.5, 1.0, 4.0, 50.0])
        return f"tenant {name} weighs {self.weights[name]:g}"

    # --------------------------------------------------------------------------------------------- what comes

    @staticmethod
    def _pick(rng: random.Random, among: Sequence[int]) -> int | None:
        return rng.choice(among) if among else None

    def _remember(self, start: StartCall) -> None:
        self.stale_events.append((start.worker, start.incarnation, start.call))
        del self.stale_events[:-16]

    def _announced(self, rng: random.Random) -> tuple[int, Call, Planned]:
        self.count += 1
        number, needs = self.count, rng.randint(0, MOST_NEEDS)
        name = rng.choice(list(self.weights))
        places = QUOTA_PLACES if name == "small" else None
        nbytes = QUOTA_BYTES if name == "even" else None
        tenant = Tenant(name, self.weights[name], max_queue_depth=places, max_inflight_bytes=nbytes)
        operator, deterministic = rng.choice(OPERATORS), rng.random() < 0.3
        due = None if rng.random() < 0.5 else self.now + 30 * rng.random() ** 2
        outputs = rng.choice([0, 1, 64, 100, 128, 256])
        memory, blocks = rng.choice([0, 0, 30, 100]), rng.choice([0, 1, 2, 5, 9])
        inputs = 4096 if rng.random() < 0.01 else rng.choice([0, 64, 100, 256, 700])
        work = self._work(rng, operator)
        demand = Demand(
            RegionLayout({}, aligned(inputs)), RegionLayout({}, outputs), memory, 0, 512 * blocks, None, work
        )
        plan = Plan(SimpleNamespace(name=operator), self._signature(rng, name, operator), {self.own: demand})
        planned = Planned(plan, CallOptions(deterministic), tenant, due)
        request = CallState(
            number,
            rng.randint(-1, 1),
            rng.choice("abc"),
            deterministic,
            due,
            outputs,
            memory,
            512 * blocks,
            needs // 2,  # two needs share a key, so that what was learned is right, too much and too little
            operator,
            tenant,
            work,
            plan=plan,
        )
        return number, Call(request, needs=needs), planned

    # ------------------------------------------------------------------------------------- what must happen

    def _refusal(self, planned: Planned) -> str:
        """Why a call must be refused now, from what the world knows; empty if it must be let in."""
        workers = self.scheduler.workers
        if all(worker.state is DeviceState.DOWN for worker in workers):
            return "NO_DEVICE"
        coming = [worker for worker in workers if not worker.damaged]
        lacking = [self._lacks(worker, planned.plan.record.name) for worker in coming]
        if all(lacking):
            return "OPERATOR_UNSUPPORTED"
        wanted = planned.options.deterministic
        modes = [w.state is DeviceState.READY and self.processes[w.index].mode is False for w in coming]
        if wanted and all(a or b for a, b in zip(lacking, modes, strict=True)):
            return "DETERMINISM_UNSUPPORTED"
        demand = planned.plan.demands[self.own]
        refuses = [a or (wanted and b) for a, b in zip(lacking, modes, strict=True)]
        most = self._roomiest([w for w, refused in zip(coming, refuses, strict=True) if not refused])
        if demand.inputs.nbytes > INPUTS or (most is not None and demand.device_bytes > most):
            return "CALL_TOO_LARGE"
        tenant, needed = planned.tenant, demand.inflight_bytes
        if tenant.max_inflight_bytes is not None and needed > tenant.max_inflight_bytes:
            return "CALL_TOO_LARGE"
        if self._held(tenant.name, places=True) >= (tenant.max_queue_depth or INPUTS) or (
            self._held(tenant.name, places=False) + needed > (tenant.max_inflight_bytes or 1 << 20)
        ):
            return "QUOTA_EXCEEDED"
        waiting = len(self.uploads) + sum(self._waits(call) for call in self.calls.values())
        if waiting >= PLACES or not has_gap(self.regions.values(), INPUTS, demand.inputs.nbytes):
            return "QUEUE_FULL"
        return ""

    def _lacks(self, worker: WorkerState, operator: str) -> bool:
        return worker.state is DeviceState.READY and operator in self.processes[worker.index].unavailable

    @staticmethod
    def _roomiest(workers: Iterable[WorkerState]) -> int | None:
        found = [worker.memory_bytes for worker in workers]
        return None if None in found else max((m for m in found if m is not None), default=0)

    @staticmethod
    def _waits(call: Call) -> bool:
        return not (call.running or call.answers or call.cancelled)

    def obey(self, commands: Sequence[Command]) -> None:
        """Carries commands out, and holds each against the state it was given in."""
        for command in self._checked(commands):
            if isinstance(command, FailCall):
                self._justify(command)
            super().obey([command])
            self._follow(command)

    def _follow(self, command: Command) -> None:
        if isinstance(command, StartCall):
            call = self.calls[command.call]
            lane = self._lane(call)
            assert lane[0] == command.call, f"{command.call} passes {lane[0]} of its label and kind"
            del lane[0]
            self._counts_no_more(command.call)
            self._check_start(command)
        elif isinstance(command, (RequeueCall, RedirectCall, PostponeCall)):
            self._lane(self.calls[command.call]).insert(0, command.call)
        elif isinstance(command, FailCall):
            self._leave_lane(self.calls[command.call])
            self.answers[command.reason] += 1
        elif isinstance(command, ReleaseCall):
            self._leave(command.call)
            call = self.calls[command.call]
            assert call.answers + call.cancelled == 1, "an end without an answer, or with two"
            if not self._is_over:
                del self.calls[command.call]

    _is_over = False

    def teardown(self) -> None:
        """See `SchedulerWorld`; from now on calls are remembered until the end."""
        self._is_over = True
        super().teardown()

    def _lane(self, call: Call) -> list[int]:
        request = call.request
        return self.lanes[request.tenant.name, request.priority, request.label, request.kind]

    def _leave_lane(self, call: Call) -> None:
        lane = self._lane(call)
        if call.request.id in lane:
            lane.remove(call.request.id)

    def _close(self, number: int) -> None:
        self._leave_lane(self.calls[number])
        super()._close(number)

    def _justify(self, command: FailCall) -> None:
        """An error must follow from how the world is."""
        call, reason = self.calls[command.call], command.reason
        deadline = call.request.deadline_s
        able = [w for w in self.scheduler.workers if w.state is not DeviceState.DOWN]
        able = [
            w for w in able if not (w.state is DeviceState.READY and self.processes[w.index].refuses(call))
        ]
        if reason == "DEADLINE_EXCEEDED":
            is_over = deadline is not None and deadline <= self.now
            ran_s = self.now - call.request.started_s if call.starts else 0.0
            assert is_over or ran_s >= RUN_LIMIT_S or command.call in self.not_retried, reason
        elif reason == "NO_DEVICE":
            assert not any(worker.could_hold(call.request.device_bytes) for worker in able), reason
        elif reason == "CALL_TOO_LARGE":
            most = self._roomiest(able)
            assert most is not None
            assert call.request.device_bytes > most, reason
        elif reason == "WORKER_LOST":
            suspected = call.suspect and call.deaths >= SUSPECT_ATTEMPTS
            if not (call.tries >= ATTEMPTS or suspected):
                self._justify_circuit(command.call, call)
            assert call.deaths, reason
        elif reason == "WOULD_MISS_DEADLINE":
            self._check_given_up(command)
        elif reason == "CIRCUIT_OPEN":
            self._justify_circuit(command.call, call)
        else:
            assert reason in ("OPERATOR_UNSUPPORTED", "DETERMINISM_UNSUPPORTED", "QUEUE_FULL"), reason
            assert reason != "QUEUE_FULL" or self._waits(call), reason

    def _justify_circuit(self, number: int, call: Call) -> None:
        """A circuit is open only for so long, or while a trial is on its way."""
        assert self.opens_at, "a circuit is open though none may"
        assert call.request.owner in self.guilty, "an innocent's circuit is open"
        others = [c for n, c in self.calls.items() if n != number and c.request.owner == call.request.owner]
        is_tried = any(c.running or self._waits(c) for c in others)
        last = max((died.told_s for died in self._against(call.request.owner)), default=-OPEN_S)
        assert is_tried or last + OPEN_S > self.now, "a circuit is open for too long"

    # --------------------------------------------------------------------------------------------- promises

    def _check_operands(self) -> None:
        inside = self.uploads.keys() | self.calls.keys()
        assert self.regions.keys() == inside, "operands of nobody, or a call without"
        held = sum(region.nbytes for region in self.regions.values())
        assert held == self.admission.operands.used_bytes
        end = 0
        for offset, nbytes in sorted((r.offset, r.nbytes) for r in self.regions.values() if r.nbytes):
            assert offset >= end, "operands overlap"
            end = offset + nbytes
        assert end <= INPUTS
        self._check_quotas()

    def _check_work_conserved(self) -> None:
        """No call waits that the next device could take, unless one is kept for another call."""
        scheduler = self.scheduler
        placement = scheduler._placement
        if not scheduler.queue_depth or placement.reservation._current() is not None:
            return
        idle = [
            worker
            for worker in scheduler.workers
            if worker.state is DeviceState.READY and not self._on(worker.index)
        ]
        free = MEMORY - sum(c.request.memory_bytes for c in self.calls.values() if c.running)
        for request in scheduler.queue.in_turn(placement.is_confined) if idle else ():
            call = self.calls[request.id]
            is_apart = scheduler._isolation.isolates(request)
            if call.declined is not None or is_apart or request.memory_bytes > free:
                continue
            choices = self._choices(call)
            for worker in idle:
                is_for_it = worker in choices and not self._is_slow(worker, call)
                assert not is_for_it or not self._has_room(worker, call), (
                    f"{request.id} waits for nothing: {worker.index} is idle"
                )

    def _has_room(self, worker: WorkerState, call: Call) -> bool:
        """Whether an idle device has room for a call for sure."""
        memory = self.processes[worker.index].memory
        if memory is not None and (
            call.request.device_bytes + workspace_footprint(512 * MOST_NEEDS) > memory
        ):
            return False
        live = [
            other.request.region
            for other in self.calls.values()
            if other.region_live
            and (other.starts[-1].worker, other.starts[-1].incarnation) == (worker.index, worker.incarnation)
        ]
        return has_gap(live, ARENA, call.request.output_bytes)
