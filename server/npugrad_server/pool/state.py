"""The scheduler's state: its calls and its workers. Plain data, changed only by the scheduler's parts."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Protocol

from npugrad_server.backends.base import RestartPolicy
from npugrad_server.pool.circuit_breaker import Death
from npugrad_server.pool.regions import EMPTY, Region, RegionAllocator
from npugrad_server.pool.tenant import NOBODY, Tenant
from npugrad_server.pool.types import DeviceState

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from npugrad_server.pool.commands import Failure, WorkerSpec
    from npugrad_server.pool.run_times import WorkSize


class Signed(Protocol):
    """Anything that has the signature of a call."""

    @property
    def signature(self) -> Hashable:
        """Equal for calls that differ only in their contents; computed on demand."""
        ...


class CallStage(Enum):
    """The stage of a call."""

    QUEUED = "queued"
    RUNNING = "running"
    SETTLED = "settled"
    """No worker touches its memory any more, and the caller has its answer or wants none."""


@dataclass
class CallState:
    """One call as the scheduler sees it, from submit until its memory is given back.

    The submitter sets what the call is, which does not change; the scheduler tracks its progress.

    Attributes:
        id: Unique number.
        priority: Calls of higher priority leave their tenant's queue first.
        label: A tenant's labels take turns.
        deterministic: Mode of the device that the call asks for.
        deadline_s: Time from which its result is useless; None for no deadline.
        output_bytes: Bytes it takes in an output arena.
        memory_bytes: Bytes of host memory it takes outside the arenas.
        device_bytes: Bytes its tensors take on a device with memory of its own.
        workspace_key: What its workspace there depends on; None if unknown.
        operator: Name by which devices list it if they cannot run it; it means nothing else here.
        tenant: Whose call it is.
        work: What its run time is looked up by; None if it is not looked up.
        expected_s: Seconds it is expected to occupy a stream of a device; 0 if unknown.
        longest_run_s: Seconds that its run is unlikely to exceed; 0 if unknown.
        is_probe: Whether it was admitted to learn how long such calls take, whatever the estimate.
        plan: Has its signature; None for a call outside the circuit breaker.
        compared_millionths: What it keeps of the arenas until its results have been compared with the
            reference; 0 if they are not.
        is_kept: Whether it was started, and that counts as its tenant's.
        submitted_s: When its operands were complete.
        queued_s: Seconds of work that it counts for while it waits; None unless it has to.
        started_s: When it was last started.
        charged_s: Device seconds charged to its tenant at that start.
        stage: Its stage.
        orphaned: Whether nobody waits for it any more, though a worker still runs it.
        closed: Whether the caller is done with operands and results.
        attempts: How often it was started.
        overtaken: How many calls behind it started while it could not.
        kill_at: When its worker is ended if it still runs the call.
        region: Region of its outputs.
        arena: Allocator of that region, even after its worker died.
        held_bytes: Bytes of its worker's own memory that it holds.
        set_aside_bytes: The part of that for its workspace, before rounding; None if not counted.
        workspace_bytes: Workspace that a device reported it needs; None until one did.
        too_large: Whether it was told that no device has the workspace it needs.
        declined_by: Device and incarnation that could not take it at the time; None before one declined.
        deaths: How many of its tries ended with the death of their worker.
        spared: How many of its starts do not count as tries, because it did not end them.
        ran_isolated: Whether it was isolated when it was last started.
        worker_losses: How many workers of each device died while running it, not counting exempt ones.
        solo_losses: How many of those can only be the fault of this call or the device.
        last_reason: How the last of them ended.
        last_code: The vendor's number of a device failure under it; None without one.
        suspect: Whether a device failed under it, so that it is tried only once more.
        kind: Kind of the queue: operator and deterministic mode, by which its devices are chosen.
    """

    id: int
    priority: int = 0
    label: str = ""
    deterministic: bool = False
    deadline_s: float | None = None
    output_bytes: int = 0
    memory_bytes: int = 0
    device_bytes: int = 0
    workspace_key: Hashable = None
    operator: str = ""
    tenant: Tenant = NOBODY
    work: WorkSize | None = None
    expected_s: float = 0.0
    plan: Signed | None = None
    longest_run_s: float = 0.0
    compared_millionths: int = 0
    is_kept: bool = False
    is_probe: bool = False
    submitted_s: float = 0.0
    queued_s: float | None = None
    started_s: float = 0.0
    charged_s: float = 0.0
    stage: CallStage = CallStage.QUEUED
    orphaned: bool = False
    closed: bool = False
    attempts: int = 0
    overtaken: int = 0
    kill_at: float = math.inf
    region: Region = EMPTY
    arena: RegionAllocator | None = None
    held_bytes: int = 0
    set_aside_bytes: int | None = None
    workspace_bytes: int | None = None
    too_large: bool = False
    declined_by: tuple[int, int] | None = None
    deaths: int = 0
    spared: int = 0
    ran_isolated: bool = False
    worker_losses: dict[int, int] = field(default_factory=partial(defaultdict, int))
    solo_losses: dict[int, int] = field(default_factory=partial(defaultdict, int))
    last_reason: str = ""
    last_code: int | None = None
    suspect: bool = False
    kind: tuple[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        """Sets the kind."""
        self.kind = (self.operator, self.deterministic)

    @property
    def owner(self) -> tuple[str, str]:
        """Tenant and operator, which are suspect together."""
        return self.tenant.name, self.operator

    @property
    def tries(self) -> int:
        """Starts that count."""
        return self.attempts - self.spared

    def note_loss(self, worker: WorkerState, *, sole: bool) -> None:
        """Records that its worker died: which one, how, and whether its device failed under this very call.

        Args:
            worker: The worker.
            sole: Whether the worker had no other call.
        """
        self.deaths += 1
        named = None if worker.failure is None else worker.failure.call
        if not worker.exempt:
            self.worker_losses[worker.index] += 1
            self.solo_losses[worker.index] += named == self.id or (sole and named is None)
            self.last_reason = worker.reason
        if worker.failure is not None and named == self.id:
            self.suspect, self.last_code = True, worker.failure.code

    def free_region(self) -> None:
        """Gives the output region back."""
        if self.arena is not None:
            self.arena.free(self.region)
        self.arena, self.region = None, EMPTY


@dataclass
class Trust:
    """What is known about whether a device computes rightly.

    Attributes:
        canaries: Number of canaries of its current process.
        due_s: When the next round is due; while a canary runs, when it was sent.
        alarm: When to look at it again; None for never.
        running: The canary that runs; None for none.
        left: Canaries left in the round.
        suspected: Whether a canary was wrong and was not right since: it takes no calls.
        canary_was_wrong: Whether a canary of the current process was wrong.
        mismatches: When it computed wrongly.
        quarantines: How often it was quarantined, not counting mismatches in calls alone.
        final: Whether it stays in quarantine.
        reason: Why it was quarantined.
    """

    canaries: int = 0
    due_s: float | None = None
    alarm: float | None = None
    running: int | None = None
    left: int = 0
    suspected: bool = False
    canary_was_wrong: bool = False
    mismatches: list[float] = field(default_factory=list)
    quarantines: int = 0
    final: bool = False
    reason: str = ""


@dataclass
class WorkerState:
    """One device and the process that drives it.

    Attributes:
        index: Position in the pool.
        spec: Its streams and memory.
        state: Its state; a device whose process is being ended counts as restarting.
        incarnation: How many processes it has had.
        alive: Whether it has a process that was not waited for yet.
        outputs: Regions of the current process's output arena.
        running: Calls on it by number.
        one_mode: Whether calls of different deterministic modes must not overlap on it.
        deterministic: Mode that its last process uses for every call; None if each call chooses.
        no_determinism: Why none of its calls is deterministic; empty if they can be.
        memory_bytes: Bytes of its own memory that calls may use, as found by the last process that opened it;
            None before that, and for a device without its own memory.
        memory_used_bytes: Bytes of it that calls hold.
        losses: Processes lost in a row without a successful call.
        failures: Those of them that count against the device.
        failed_spawns: Processes in a row that could not be started.
        timeouts: Starts that took too long; each gives the next one more time.
        waits: Whether its next start waits for those of other devices.
        spawned_s: When the present process was started.
        stage: The stage of its start.
        opened: Whether the current process has opened the device.
        start_timed_out: Whether the current process is being ended because its start took too long.
        ending: Whether the current process is being ended.
        damaged: Whether the device is damaged, and not tried again.
        exempt: Whether the current process is being ended without counting against the device.
        alarm: When its start must have made progress, or when it is to be started again; None for neither.
        reason: Why it is not ready.
        ended_for: Why the current process is being ended; empty while it is not.
        ended_by: Call for whose overlong run the current process is being ended; None without one.
        death: How the current process ends, as far as is known.
        ended_s: When the last process ended, if it had opened the device; None once the next one has.
        failure: Device failure that the current process reported before it ended; None without one.
        last_start: Number of the last call start on it, to spread calls over idle devices.
        unavailable: Operators that the last process that opened it cannot run, with the reasons.
        exhausted: Whether it answered that it could not take a call, and has completed none since.
        trust: Whether it computes rightly.
    """

    index: int
    spec: WorkerSpec
    state: DeviceState = DeviceState.RESTARTING
    incarnation: int = 0
    alive: bool = False
    outputs: RegionAllocator = field(default_factory=lambda: RegionAllocator(0))
    running: dict[int, CallState] = field(default_factory=dict)
    one_mode: bool = False
    deterministic: bool | None = None
    no_determinism: str = ""
    memory_bytes: int | None = None
    memory_used_bytes: int = 0
    losses: int = 0
    failures: int = 0
    failed_spawns: int = 0
    timeouts: int = 0
    waits: bool = False
    spawned_s: float = 0.0
    stage: str = ""
    opened: bool = False
    start_timed_out: bool = False
    ending: bool = False
    damaged: bool = False
    exempt: bool = False
    alarm: float | None = None
    reason: str = "its first worker is starting"
    ended_for: str = ""
    ended_by: int | None = None
    death: Death = Death.DIED
    ended_s: float | None = None
    failure: Failure | None = None
    last_start: int = 0
    unavailable: Mapping[str, str] = field(default_factory=dict)
    exhausted: bool = False
    trust: Trust = field(default_factory=Trust)

    @property
    def has_stream(self) -> bool:
        """Whether it is ready and a stream is free."""
        return self.state is DeviceState.READY and len(self.running) < self.spec.streams

    @property
    def is_out(self) -> bool:
        """Whether calls do not wait for it."""
        return self.state in (DeviceState.DOWN, DeviceState.QUARANTINED)

    def culprit(self) -> CallState | None:
        """Returns the running call that caused the end of the process, as far as is known.

        That is a call that ran for too long, one under which the device reported a failure, or one that ran
        alone. A damaged device blames no call.
        """
        failure = self.failure
        if failure is not None and failure.restart_policy is RestartPolicy.NEVER:
            return None
        number = failure.call if self.ended_by is None and failure is not None else self.ended_by
        if number is None and len(self.running) == 1 and not self.exempt:
            (number,) = self.running
        return None if number is None else self.running.get(number)

    def end(self, now: float) -> None:
        """Notes when its process ended, if it had opened the device."""
        self.ended_s = (now if self.ended_s is None else self.ended_s) if self.opened else None

    def suspects(self) -> list[CallState]:
        """Returns the running calls that may have caused the end of the process."""
        culprit, failure = self.culprit(), self.failure
        if culprit is not None:
            return [culprit]
        is_damaged = failure is not None and failure.restart_policy is RestartPolicy.NEVER
        return [] if self.exempt or is_damaged else [*self.running.values()]

    def why_unavailable(self, operator: str) -> str:
        """Why it cannot run an operator; empty when it can, or may once it is ready again."""
        return self.unavailable.get(operator, "") if self.state is DeviceState.READY else ""

    def why_refuses(self, operator: str, deterministic: bool) -> str:
        """Why it runs no such call; empty when it does, or may once it is ready."""
        no_mode = self.no_determinism if deterministic and self.state is DeviceState.READY else ""
        return self.why_unavailable(operator) or no_mode

    def runs(self, operator: str, deterministic: bool) -> bool:
        """Whether it runs calls of an operator and mode, or may once it is ready."""
        return not self.is_out and not self.why_refuses(operator, deterministic)

    def may_run(self, call: CallState) -> bool:
        """Whether it runs calls such as this one, or may once it is ready."""
        return self.runs(call.operator, call.deterministic)

    def has_declined(self, call: CallState) -> bool:
        """Whether the current process could not take the call."""
        return call.declined_by == (self.index, self.incarnation)

    def admits(self, call: CallState) -> bool:
        """Whether the call may join those that run now, memory and isolation aside."""
        if not self.has_stream or self.trust.suspected:
            return False
        return not self.one_mode or all(
            other.deterministic == call.deterministic for other in self.running.values()
        )

    def could_hold(self, nbytes: int) -> bool:
        """Whether it has this much memory of its own when idle; unknown counts as yes."""
        return self.memory_bytes is None or nbytes <= self.memory_bytes

    def has_free(self, nbytes: int) -> bool:
        """Whether this much of its own memory is free now; unknown counts as yes."""
        return self.memory_bytes is None or nbytes + self.memory_used_bytes <= self.memory_bytes

    def is_current(self, incarnation: int) -> bool:
        """Whether an event of this incarnation is about the current process."""
        return self.alive and incarnation == self.incarnation
