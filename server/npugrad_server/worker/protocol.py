"""Messages between the pool and a worker: small, one per packet (see `packets`).

    pool                      worker
    OpenDevice         ->
                       <-     DeviceOpening, at each stage of it
                       <-     DeviceReady, or OpenFailed and the end
    RunCall, RunAgain  ->
                       <-     CallUnknown, if it lacks a RunAgain's plan: the pool sends the call again, whole
                       <-     NeedWorkspace, if its workspace is not set aside yet
    WorkspaceGranted, or WorkspaceRefused  ->
    AbandonCall        ->     at any time; there is still an answer
                       <-     CallDone, CallFailed, CallDeferred, or DeviceFailed and the end
    AskWorkspace       ->
                       <-     WorkspaceFound, CallFailed, or DeviceFailed and the end
    AskMemory          ->
                       <-     MemoryFound, CallFailed, or DeviceFailed and the end
    RunCanary          ->
                       <-     CanaryRun, or DeviceFailed and the end
    ForgetPlan         ->     at any time when no call of the plan is in flight
    Ping               ->     at any time
                       <-     Pong, whatever runs

Tensors are not in the messages; they lie in the arenas, at offsets that the messages give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from npugrad_server.backends.base import RestartPolicy
from npugrad_server.worker.canary_messages import CanaryRun, RunCanary
from npugrad_server.worker.run_again import RunAgain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npugrad.call import CallOptions
    from npugrad.meta import CallMeta, TensorMeta


@dataclass(frozen=True)
class OpenDevice:
    """Take the device.

    Attributes:
        device: Name with options.
        product: Product the server serves.
        streams: Calls that will run at once.
        input_fd: Inherited descriptor of the operands' arena, read-only.
        input_bytes: Its size.
        output_fd: Inherited descriptor of the results' arena.
        output_bytes: Its size.
        prefault_bytes: How much of each arena to map at once.
        hang_grace_s: Seconds after a call's deadline at which the pool ends a worker that still runs it.
        run_limit_s: Seconds a call may run, whatever its deadline.
        canary_rounds: How many times every canary must be right before the device is ready.
    """

    device: str
    product: str
    streams: int
    input_fd: int
    input_bytes: int
    output_fd: int
    output_bytes: int
    prefault_bytes: int
    hang_grace_s: float = 10.0
    run_limit_s: float = 540.0
    canary_rounds: int = 1


@dataclass(frozen=True)
class DeviceOpening:
    """Opening the device has reached another stage, which shows that the process is alive.

    Attributes:
        stage: What it does now, human-readable: ``"importing torch_npu"``.
    """

    stage: str


@dataclass(frozen=True)
class DeviceReady:
    """The device is open, and its canaries are right; attributes are those of `backends.base.Backend`.

    Attributes:
        canaries: How many canaries it has: one for each operator; 0 if it computes nothing.
        compared: How many of them were compared; the others are in the first round.
    """

    backend: str
    description: str
    simulated: bool
    one_mode: bool
    unavailable: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int | None = None
    deterministic: bool | None = None
    no_determinism: str = ""
    canaries: int = 0
    compared: int = 0


@dataclass(frozen=True)
class OpenFailed:
    """The device cannot be used; the process ends.

    Attributes:
        message: Why, for a person.
        restart_policy: When another try makes sense: a `RestartPolicy`.
        wrong: Name of the operator whose canary was wrong; empty where the device did not open.
    """

    message: str
    restart_policy: str = RestartPolicy.SOON.value
    wrong: str = ""


@dataclass(frozen=True)
class DeviceFailed:
    """The device cannot be trusted any more, or not by this process, which ends at once.

    The other attributes are those of `npugrad_server.backends.base.DeviceLost`.

    Attributes:
        call: Number of the call that hit it.
        message: The vendor's function, number and text.
    """

    call: int
    message: str
    code: int
    restart_policy: str
    retry: bool
    exempt: bool


@dataclass(frozen=True)
class RunCall:
    """Run a call, which is sent whole.

    Attributes:
        call: Its number, for the answer.
        operator: Name of the operator.
        meta: Operands' metas as they lie in the arena, attributes, product.
        outputs: Metas of all outputs, None for those not wanted.
        options: Options of the call.
        input_offsets: First byte of each operand in the operands' arena. One that is not null but has no
            offset is not used: it is zeros, and contiguous.
        output_offsets: First byte of each wanted output, in the results' arena.
        deadline_s: `time.monotonic()`, which all processes of a host share, at which the result becomes
            useless; None for never.
        workspace_bytes: Device memory set aside for its workspace; None if it is not counted.
        plan: Number under which the worker keeps what later calls share with it; no other plan of the process
            has or had it. None if there is nothing to keep.
    """

    call: int
    operator: str
    meta: CallMeta
    outputs: Mapping[str, TensorMeta | None]
    options: CallOptions
    input_offsets: Mapping[str, int]
    output_offsets: Mapping[str, int]
    deadline_s: float | None = None
    workspace_bytes: int | None = None
    plan: int | None = None


@dataclass(frozen=True)
class ForgetPlan:
    """No later call uses this plan.

    Attributes:
        plan: Its number.
    """

    plan: int


@dataclass(frozen=True)
class CallUnknown:
    """The worker has no plan with the number that a `RunAgain` named; the call was not started.

    Attributes:
        call: Number of the call.
    """

    call: int


@dataclass(frozen=True)
class Ping:
    """Say that you are listening."""


@dataclass(frozen=True)
class Pong:
    """The process is listening."""


@dataclass(frozen=True)
class AbandonCall:
    """Nobody waits for a call any more: it need not be run, but must still be answered.

    Attributes:
        call: Its number.
    """

    call: int


@dataclass(frozen=True)
class NeedWorkspace:
    """The operator of a running call needs more workspace than is set aside for it.

    Attributes:
        call: Number of the call.
        workspace_bytes: All the workspace it needs.
    """

    call: int
    workspace_bytes: int


@dataclass(frozen=True)
class WorkspaceGranted:
    """The workspace that a call needs is set aside.

    Attributes:
        call: Number of the call.
    """

    call: int


@dataclass(frozen=True)
class WorkspaceRefused:
    """There is no room for the workspace that a call needs.

    Attributes:
        call: Number of the call.
        final: Whether no device has that much, even when idle; otherwise the call will be sent again.
        most_bytes: Most workspace that any device could have in addition to the call's tensors.
    """

    call: int
    final: bool
    most_bytes: int = 0


@dataclass(frozen=True)
class AskWorkspace:
    """Ask the operator's first phase what a call would need; there are no operands.

    Attributes:
        call: Its number, for the answer.
        operator: Name of the operator.
        meta: Operands' metas, attributes, product.
    """

    call: int
    operator: str
    meta: CallMeta


@dataclass(frozen=True)
class WorkspaceFound:
    """What the first phase said.

    Attributes:
        call: Number of the call.
        workspace_bytes: Workspace it asks for; None when the device cannot tell.
    """

    call: int
    workspace_bytes: int | None


@dataclass(frozen=True)
class AskMemory:
    """Ask for the device's free and total memory; calls that run at the time count as memory in use.

    Attributes:
        call: A number, for the answer.
        give_back: Whether to release memory cached for later calls to the device first.
        operator: Name of the query in errors.
    """

    call: int
    give_back: bool
    operator: str = "memory"


@dataclass(frozen=True)
class MemoryFound:
    """The device's free and total memory.

    Attributes:
        call: Number of the query.
        free_bytes: Bytes that nothing uses; None if the device works in host memory.
        total_bytes: Bytes of the device; None likewise.
    """

    call: int
    free_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True)
class CallDone:
    """The results lie in the arena; the attributes are those of `npugrad_server.backends.base.Timings`.

    The backend is always named. The worker started the call at `begun_s` of `time.monotonic`, one clock for
    all processes of a machine, and spent `verify_s` on comparing it with the reference. `verification` is the
    explanation of a right result, if it needs one; `verified` is how far each output is from the reference:
    by name, the other attributes of `npugrad.call.VerifiedOutput` in their order.
    """

    call: int
    copy_in_s: float
    run_s: float
    copy_out_s: float
    workspace_bytes: int
    backend: str
    begun_s: float = field(default=0.0, compare=False)
    verify_s: float = 0.0
    verification: str = ""
    verified: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class CallFailed:
    """There is no result; the worker goes on.

    Attributes:
        call: Number of the call.
        reason: Row of the error table.
        message: For the caller.
        metadata: What else the caller is told: code, operand, constraint.
        trace: For the log: where it happened; empty for an expected error.
    """

    call: int
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    trace: str = ""


@dataclass(frozen=True)
class CallDeferred:
    """A call was given back untouched, because its workspace was refused for now.

    Attributes:
        call: Number of the call.
        workspace_bytes: Workspace it needs.
    """

    call: int
    workspace_bytes: int


Order: TypeAlias = (
    OpenDevice
    | RunCall
    | RunAgain
    | ForgetPlan
    | AskWorkspace
    | AskMemory
    | RunCanary
    | AbandonCall
    | WorkspaceGranted
    | WorkspaceRefused
    | Ping
)
"""What the pool sends."""
CallAnswer: TypeAlias = "CallDone | CallFailed | CallDeferred"
"""What a worker sends when it is done with a call."""
QueryAnswer: TypeAlias = "WorkspaceFound | MemoryFound | CanaryRun"
"""What a worker answers to a query."""
Opening: TypeAlias = "DeviceOpening | DeviceReady | OpenFailed"
"""What a worker sends about opening its device."""
WorkerReport: TypeAlias = (
    "Opening | DeviceFailed | QueryAnswer | CallUnknown | NeedWorkspace | Pong | CallAnswer"
)
"""What a worker sends."""
Message: TypeAlias = "Order | WorkerReport"
