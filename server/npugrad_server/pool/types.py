"""What the pool takes and gives: settings, a validated call, its outcome, states and figures.

Free of gRPC, settings libraries and protobuf, so that the pool can be run and tested without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

from npugrad_server.pool.tenant import NOBODY, Tenant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.call import CallOptions, ExecutionInfo
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_server.pool.admission import Demand


START_LIMIT_FACTOR = 3
"""How many times `worker_start_timeout_s` the first start of a worker may take in all."""


WORKER_MODULE = "npugrad_server.worker"
"""What a worker process runs."""


@dataclass(frozen=True)
class PoolSettings:
    """What a pool is opened with.

    Attributes:
        devices: Concrete devices such as ``"cpu:0"`` or ``"test:0?ms=20"``; lists and ``"auto"`` are resolved
            by `npugrad_server.devices.resolve`.
        product: Product the calls were validated for.
        input_arena_bytes: Memory for the operands of all admitted calls.
        output_arena_bytes: Memory for results, for each device.
        prefault_bytes: How much of each arena is backed by memory at the start.
        max_queue_depth: Admitted calls that have not started, but for uploads.
        streams_per_device: Calls that run at once on one device.
        hang_grace_s: Seconds a launched call may outlive its deadline before its worker is ended.
        worker_start_timeout_s: Seconds that a worker's start may stand still, from one stage to the next.
        respawn_backoff_s: Delay before a worker that failed once is started again; it doubles each time.
        respawn_backoff_max_s: Upper limit of that delay; a device that goes on failing waits longer.
        max_respawns: Losses in a row that count against a device before it is marked down.
        circuit_deaths: Workers that die within 60 s under calls of one tenant and signature, after which such
            calls are refused; 0 for never.
        max_attempts: How often a call is started in all, when its workers die under it.
        device_memory_bytes: Host memory for what workers make of operands (strided ones are made contiguous),
            for all together. None takes half of the machine's or the container's limit. What a device has of
            its own it says itself.
        run_limit_s: Seconds a call may run, whatever its deadline, before its worker is ended.
        heartbeat_timeout_s: Seconds a ready worker may be silent, though asked, before it is ended.
        canary_interval_s: Seconds between two rounds of a device's canaries; 0 for none once it is ready.
        print_fd: Descriptor that workers print to, standard error by default.
        worker_module: Module that a worker process runs.
    """

    devices: tuple[str, ...]
    product: Product
    input_arena_bytes: int
    output_arena_bytes: int
    prefault_bytes: int
    max_queue_depth: int
    streams_per_device: int
    hang_grace_s: float
    worker_start_timeout_s: float
    respawn_backoff_s: float
    respawn_backoff_max_s: float
    max_respawns: int
    circuit_deaths: int = 2
    max_attempts: int = 3
    device_memory_bytes: int | None = None
    run_limit_s: float = 540.0
    heartbeat_timeout_s: float = 30.0
    canary_interval_s: float = 60.0
    verify_sample: float = 0.0
    print_fd: int = 2
    worker_module: str = WORKER_MODULE

    @property
    def start_limit_s(self) -> float:
        """Seconds that the first start of a worker may take in all, however it gets on."""
        return START_LIMIT_FACTOR * self.worker_start_timeout_s


@dataclass(frozen=True, eq=False)
class CallPlan:
    """What follows from a legal request's signature, whatever its contents: made once, used by many calls.

    Calls share a plan where they have the same object; two plans that look alike are two. Nothing that was
    measured is in it: workspace, memory and the state of devices are asked anew for each call.

    Attributes:
        record: Record of the operator.
        call: Metas and attributes.
        outputs: Inferred outputs by name, None for masked-out ones.
        options: Options of the call; label and priority, which differ from call to call, at their defaults.
        is_kept: Whether later calls may meet it again.
        unused: Operands whose content is not kept: no wanted result depends on it. They are contiguous, and
            zeros wherever the operator looks at them.
        demands: What the call needs, once it was counted, by whether devices have memory of their own.
    """

    record: OpRecord
    call: CallMeta
    outputs: Mapping[str, TensorMeta | None]
    options: CallOptions
    is_kept: bool
    unused: frozenset[str] = frozenset()
    demands: dict[bool, Demand] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def signature(self) -> bytes:
        """Digest of what it was made of: that of two plans which look alike is the same."""
        outputs = [name for name, meta in self.outputs.items() if meta is not None]
        call = self.call
        parts = (self.record.name, call.product, call.inputs, call.attrs, outputs, self.options)
        return blake2b(repr(parts).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class PlannedCall:
    """A call that the validator passed.

    Attributes:
        plan: What of it other calls may share.
        options: Options of the call: the plan's, with the label and the priority of this one.
        request_id: Identifier of the request in the log.
        deadline_s: `time.monotonic()` from which on the result is of no use; None for never.
        tenant: Whose call it is.
    """

    plan: CallPlan
    options: CallOptions
    request_id: str
    deadline_s: float | None
    tenant: Tenant = field(default=NOBODY, kw_only=True)

    @classmethod
    def alone(
        cls,
        record: OpRecord,
        call: CallMeta,
        outputs: Mapping[str, TensorMeta | None],
        options: CallOptions,
        request_id: str = "",
        deadline_s: float | None = None,
    ) -> PlannedCall:
        """A call with a plan that no other call has; arguments as the attributes of both."""
        shared = replace(options, label="", priority=0)
        return cls(CallPlan(record, call, outputs, shared, is_kept=False), options, request_id, deadline_s)


@dataclass(frozen=True)
class Outcome:
    """The result of a call.

    Attributes:
        contents: Read-only bytes of each wanted output by name, row-major, until the ticket is closed.
        info: What produced them, and how long it took.
    """

    contents: Mapping[str, memoryview]
    info: ExecutionInfo


class DeviceState(str, Enum):
    """State of a device; compares equal to its name, such as ``"ready"``."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DOWN = "down"
    """Calls do not wait for it; unless it is damaged, it is tried again."""
    QUARANTINED = "quarantined"
    """It has computed wrongly: nothing that it answers counts; see `pool.quarantine`."""

    def __str__(self) -> str:
        """The name."""
        return str(self.value)


@dataclass(frozen=True)
class DeviceStatus:
    """One device of the pool.

    Attributes:
        name: Such as ``"cpu:0"``.
        backend: Backend that drives it, such as ``"cpu-reference"``; empty before it was first ready.
        description: What the device is, for a person.
        simulated: Whether its results come from a simulation.
        state: Where it stands.
        restarts: How often its worker was restarted.
        reason: Why it is not ready, or what its start is at; empty when it is.
        pid: Process of its worker; None while there is none.
        memory_bytes: What calls may have of its own memory; None for a device without, or not ready yet.
        memory_used_bytes: What running calls have of it, or have set aside.
        next_try_s: Seconds until a device that is down is tried again; None for others, and for one that is
            not tried any more.
        unavailable: Operators that it cannot run.
    """

    name: str
    backend: str
    description: str
    simulated: bool
    state: DeviceState
    restarts: int
    reason: str
    pid: int | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int = 0
    next_try_s: float | None = None
    unavailable: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PoolStats:
    """Figures of the pool at one moment.

    Attributes:
        queue_depth: Calls that wait for a device.
        running: Calls that run on a device, those that nobody waits for any more included.
        accepted_calls: Calls admitted since the start.
        finished_calls: Calls with an answer, good or bad, since the start.
        input_arena_used_bytes: Operand memory in use.
        output_arena_used_bytes: Result memory in use, over all devices.
        uploads: Admitted calls whose operands are still being written.
        input_arena_bytes: Operand memory there is.
        output_arena_bytes: Result memory there is, over all devices.
        open_circuits: Signatures of a tenant whose calls are refused, because workers died under them.
        tenants: Calls that have not started, and bytes in flight, by what metrics call tenants.
        queued_s: Seconds of a device's stream that the calls which wait are expected to take.
        longest_wait_s: How long the call that waits the longest has waited so far; 0.0 where none waits.
    """

    queue_depth: int
    running: int
    accepted_calls: int
    finished_calls: int
    input_arena_used_bytes: int
    output_arena_used_bytes: int
    uploads: int
    input_arena_bytes: int
    output_arena_bytes: int
    open_circuits: int = 0
    tenants: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    queued_s: float = 0.0
    longest_wait_s: float = 0.0


class PoolObserver:
    """What the pool tells whoever counts; subclass it and override what is wanted, the rest does nothing.

    Every method is called on the pool's event loop and must return at once.
    """

    def call_accepted(self, planned: PlannedCall) -> None:
        """A call was admitted."""

    def call_started(self, planned: PlannedCall, device: str, attempt: int, queued_s: float) -> None:
        """A call was handed to a device: its `attempt`-th start, `queued_s` after its operands were there."""

    def call_finished(
        self, planned: PlannedCall, reason: str, seconds: float, info: ExecutionInfo | None
    ) -> None:
        """A call has its answer.

        Args:
            planned: The call.
            reason: ``"OK"`` or the row of the error table.
            seconds: Seconds since its operands were there.
            info: What produced the result; None for an error.
        """

    def call_requeued(self, planned: PlannedCall, device: str) -> None:
        """The worker of a device died under a call, which waits for another try."""

    def call_redirected(self, planned: PlannedCall, device: str, reason: str) -> None:
        """A device could not take a call now, which waits for another one; `reason` is that of its answer."""

    def workspace_asked(self, device: str, answer: str) -> None:
        """A call needed more workspace than was set aside for it.

        Args:
            device: Where it runs.
            answer: ``"granted"``; ``"postponed"``: no room now; ``"refused"``: no device has so much.
        """

    def call_postponed(self, planned: PlannedCall, device: str) -> None:
        """A call waits again, because its device had no room for its workspace."""

    def worker_lost(self, device: str, reason: str) -> None:
        """A worker process ended; `reason` says how, for a person."""

    def circuit_opened(self, planned: PlannedCall) -> None:
        """Calls of a tenant and signature, that of this call, are refused for a while."""

    def device_changed(self, status: DeviceStatus) -> None:
        """A device went into another state."""

    def canaries_run(self, device: str, result: str, count: int) -> None:
        """A device has run so many canaries: ``"ok"``, ``"mismatch"`` or ``"error"``."""

    def results_compared(self, device: str, kind: str, result: str) -> None:
        """Results of a call were compared with the reference.

        Args:
            device: Where it ran.
            kind: ``"verify"``: its caller waits for it; ``"sample"``: the server does it for itself.
            result: ``"ok"``, ``"mismatch"``; ``"unfinished"``: not in time, or there was an error;
                ``"skipped"``: no verifier had time for the sample, or it was too large.
        """

    def device_mismatched(self, device: str, operator: str) -> None:
        """A device has computed wrongly."""
