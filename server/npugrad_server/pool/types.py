"""What goes into the pool and comes out: settings, a validated call, its outcome, states and figures.

Free of gRPC, settings libraries and protobuf, so that the pool can be run and tested without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

from npugrad.releases import CannRelease
from npugrad_server.pool.tenant import NOBODY, Tenant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.call import CallOptions, ExecutionInfo
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_server.pool.admission import Demand


START_LIMIT_FACTOR = 3
"""A worker's first start may take this many times `worker_start_timeout_s` in all."""


WORKER_MODULE = "npugrad_server.worker"
"""The module that a worker process runs."""


@dataclass(frozen=True)
class PoolSettings:
    """The settings of a pool.

    Attributes:
        devices: Concrete devices such as ``"cpu:0"`` or ``"test:0?ms=20"``; lists and ``"auto"`` are resolved
            by `npugrad_server.devices.resolve`.
        product: Product the calls were validated for.
        input_arena_bytes: Memory for the operands of all admitted calls.
        output_arena_bytes: Memory for results, for each device.
        prefault_bytes: How much of each arena is backed by memory at the start.
        max_queue_depth: Limit on admitted calls that have not started, not counting uploads.
        streams_per_device: Calls that run at once on one device.
        hang_grace_s: Seconds a launched call may outlive its deadline before its worker is ended.
        worker_start_timeout_s: Seconds that a worker's start may take from one stage to the next.
        respawn_backoff_s: Delay before a worker that failed once is started again; it doubles each time.
        respawn_backoff_max_s: Upper limit of that delay; a device that keeps failing waits longer.
        max_respawns: Consecutive losses that may count against a device before it is marked down.
        circuit_deaths: Worker deaths under isolated calls of one tenant and signature after which such calls
            are refused (`circuit_breaker`); 0 for never.
        max_attempts: How often a call is started in all if its workers die under it; those that were killed
            from outside, or died together, do not count.
        device_memory_bytes: Host memory for what all workers together make of operands (strided ones are made
            contiguous); None for half of the machine's or the container's limit. Devices report their
            own memory.
        run_limit_s: Seconds a call may run, whatever its deadline, before its worker is ended.
        heartbeat_timeout_s: Seconds a ready worker may leave pings unanswered before it is ended.
        canary_interval_s: Seconds between two rounds of a device's canaries; 0 for none once it is ready.
        print_fd: Descriptor that workers print to, standard error by default.
        worker_module: Module that a worker process runs.
        cann: Release of CANN by whose pages calls are checked; empty for the records' own.
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
    cann: str = ""

    @property
    def release(self) -> CannRelease | None:
        """The release of `cann`; None for the records' own pages."""
        return CannRelease.parse(self.cann) if self.cann else None

    @property
    def start_limit_s(self) -> float:
        """Seconds that the first start of a worker may take in all, whatever its progress."""
        return START_LIMIT_FACTOR * self.worker_start_timeout_s


@dataclass(frozen=True, eq=False)
class CallPlan:
    """What follows from a legal request's signature, whatever its contents: made once, used by many calls.

    Plans are compared by identity: two that look alike are different plans. They contain nothing that was
    measured: workspace, memory and the state of devices are queried anew for each call.

    Attributes:
        record: Record of the operator.
        call: Metas and attributes.
        outputs: Inferred outputs by name, None for masked-out ones.
        options: Options of the call; label and priority, which differ from call to call, at their defaults.
        is_kept: Whether later calls may reuse it.
        unused: Operands whose content is not kept because no wanted result depends on it. The operator sees
            them as contiguous zeros.
        demands: What the call needs, as far as counted, by whether devices have memory of their own.
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
        """Digest of what it was made from; the same for two plans that look alike."""
        outputs = [name for name, meta in self.outputs.items() if meta is not None]
        call = self.call
        parts = (self.record.name, call.product, call.inputs, call.attrs, outputs, self.options)
        return blake2b(repr(parts).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class PlannedCall:
    """A call that the validator passed.

    Attributes:
        plan: The part that other calls may share.
        options: The plan's options, with this call's label and priority.
        request_id: Identifier of the request in the log.
        deadline_s: `time.monotonic()` from which the result is useless; None for no deadline.
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
        """Makes a call that shares its plan with no other; arguments as the attributes of both classes."""
        shared = replace(options, label="", priority=0)
        return cls(CallPlan(record, call, outputs, shared, is_kept=False), options, request_id, deadline_s)


@dataclass(frozen=True)
class Outcome:
    """The result of a call.

    Attributes:
        contents: Read-only bytes of each wanted output by name, row-major; valid until the ticket is closed.
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
    """It has computed wrongly: its answers are ignored; see `pool.quarantine`."""

    def __str__(self) -> str:
        """The name."""
        return str(self.value)


@dataclass(frozen=True)
class DeviceStatus:
    """One device of the pool.

    Attributes:
        name: Such as ``"cpu:0"``.
        backend: Backend that drives it, such as ``"cpu-reference"``; empty before it was first ready.
        description: Readable description of the device.
        simulated: Whether its results come from a simulation.
        state: Its state.
        restarts: How often its worker was restarted.
        reason: Why it is not ready, or the stage of its start; empty when it is ready.
        pid: Process of its worker; None while there is none.
        memory_bytes: Bytes of its own memory that calls may use; None for a device without, or not ready yet.
        memory_used_bytes: Bytes of it that running calls use or have set aside.
        next_try_s: Seconds until a device that is down is tried again; None for others, and for one that is
            not tried again.
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
        running: Calls that run on a device, orphaned ones included.
        accepted_calls: Calls admitted since the start.
        finished_calls: Calls with an answer, good or bad, since the start.
        input_arena_used_bytes: Operand memory in use.
        output_arena_used_bytes: Result memory in use, over all devices.
        uploads: Admitted calls whose operands are still being written.
        input_arena_bytes: Total operand memory.
        output_arena_bytes: Total result memory, over all devices.
        open_circuits: Signatures or operators of a tenant whose calls are refused because workers died.
        tenants: Calls that have not started, and bytes in flight, by the tenant's name in metrics.
        queued_s: Seconds of a device's stream that the waiting calls are expected to take.
        longest_wait_s: How long the longest-waiting call has waited so far; 0.0 if none waits.
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
    """Receives the pool's events; subclass it and override the methods you need. By default they do nothing.

    Every method is called on the pool's event loop and must return at once.
    """

    def call_accepted(self, planned: PlannedCall) -> None:
        """A call was admitted."""

    def call_started(self, planned: PlannedCall, device: str, attempt: int, queued_s: float) -> None:
        """A call was handed to a device: its `attempt`-th start, `queued_s` after its operands arrived."""

    def call_finished(
        self, planned: PlannedCall, reason: str, seconds: float, info: ExecutionInfo | None
    ) -> None:
        """A call has its answer.

        Args:
            planned: The call.
            reason: ``"OK"`` or the row of the error table.
            seconds: Seconds since its operands arrived.
            info: What produced the result; None for an error.
        """

    def call_requeued(self, planned: PlannedCall, device: str) -> None:
        """The worker of a device died under a call, which now waits for another try."""

    def call_redirected(self, planned: PlannedCall, device: str, reason: str) -> None:
        """A device could not take a call, which now waits for another device; `reason` says why."""

    def workspace_asked(self, device: str, answer: str) -> None:
        """A call needed more workspace than was set aside for it.

        Args:
            device: Where it runs.
            answer: ``"granted"``; ``"postponed"``: no room now; ``"refused"``: no device has that much.
        """

    def call_postponed(self, planned: PlannedCall, device: str) -> None:
        """A call waits again because its device had no room for its workspace."""

    def worker_lost(self, device: str, reason: str) -> None:
        """A worker process ended; `reason` says in words how."""

    def circuit_opened(self, planned: PlannedCall) -> None:
        """Calls with the tenant and signature, or operator, of this call are refused for a while."""

    def device_changed(self, status: DeviceStatus) -> None:
        """A device changed its state."""

    def canaries_run(self, device: str, result: str, count: int) -> None:
        """A device has run `count` canaries with this result: ``"ok"``, ``"mismatch"`` or ``"error"``."""

    def results_compared(self, device: str, kind: str, result: str) -> None:
        """Results of a call were compared with the reference.

        Args:
            device: Where it ran.
            kind: ``"verify"``: its caller waits for it; ``"sample"``: the server's own check.
            result: ``"ok"``, ``"mismatch"``; ``"tolerance"``: the CPU path differs from the reference, too;
                ``"unfinished"``: not in time, or there was an error; ``"skipped"``: no verifier was free for
                the sample, or it was too large.
        """

    def device_mismatched(self, device: str, operator: str) -> None:
        """A device has computed wrongly."""
