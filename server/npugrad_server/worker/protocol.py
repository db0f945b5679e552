"""What the pool and a worker say to each other: small messages, one a packet (see `packets`).

    pool                      worker
    OpenDevice         ->
                       <-     DeviceOpening, at each stage of it
                       <-     DeviceReady, or OpenFailed and the end
    RunCall, RunAgain  ->
                       <-     CallUnknown, when it lacks the plan of a RunAgain: the call comes again, whole
                       <-     NeedWorkspace, when its workspace is not set aside yet
    WorkspaceGranted, or WorkspaceRefused  ->
    AbandonCall        ->     at any time; there is still an answer
                       <-     CallDone, CallFailed, CallDeferred, or DeviceFailed and the end
    AskWorkspace       ->
                       <-     WorkspaceFound, CallFailed, or DeviceFailed and the end
    AskMemory          ->
                       <-     MemoryFound, CallFailed, or DeviceFailed and the end
    RunCanary          ->
                       <-     CanaryRun, or DeviceFailed and the end
    ForgetPlan         ->     at any time when no call of the plan is on its way
    Ping               ->     at any time
                       <-     Pong, whatever runs

Tensors are not in the messages; they lie in the arenas, where the messages say.
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
        hang_grace_s: Seconds past its deadline after which the pool ends the worker that still runs a call.
        run_limit_s: Seconds a call may run, whatever its deadline.
        canary_rounds: How often every canary has to be right before the device is ready.
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
    """Opening the device has come to another stage, which shows that the process lives.

    Attributes:
        stage: What it does now, for a person: ``"importing torch_npu"``.
    """

    stage: str


@dataclass(frozen=True)
class DeviceReady:
    """The device is open, and its canaries are right; attributes are those of `backends.base.Backend`.

    Attributes:
        canaries: How many canaries it has: one for each operator; 0 where it computes nothing.
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

    The attributes beside these are those of `npugrad_server.backends.base.DeviceLost`.

    Attributes:
        call: Number of the call that met it.
        message: Function, number and text of the vendor.
    """

    call: int
    message: str
    code: int
    restart_policy: str
    retry: bool
    exempt: bool


@dataclass(frozen=True)
class RunCall:
    """Run a call, which is brought whole.

    Attributes:
        call: Its number, for the answer.
        operator: Name of the operator.
        meta: Operands' metas as they lie in the arena, attributes, product.
        outputs: Metas of all outputs, None for those not wanted.
        options: Options of the call.
        input_offsets: First byte of each operand in the operands' arena; one that is not null and has none is
            not used: it is zeros, and contiguous.
        output_offsets: First byte of each wanted output, in the results' arena.
        deadline_s: `time.monotonic()`, which all processes of a host share, from which on the result is of
            no use; None for never.
        workspace_bytes: Device memory that is set aside for its workspace; None where nobody counts it.
        plan: Number under which the worker keeps what later calls share with it; no other plan of the process
            has or had it. None when there is nothing to keep.
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
    """No later call has this plan.

    Attributes:
        plan: Its number.
    """

    plan: int


@dataclass(frozen=True)
class CallUnknown:
    """The worker has no plan of the number that a `RunAgain` named; nothing of the call was done.

    Attributes:
        call: Number of the call.
    """

    call: int


@dataclass(frozen=True)
class Ping:
    """Say that you listen."""


@dataclass(frozen=True)
class Pong:
    """The process listens."""


@dataclass(frozen=True)
class AbandonCall:
    """Nobody waits for a call any more: it need not be run, but it is answered all the same.

    Attributes:
        call: Its number.
    """

    call: int


@dataclass(frozen=True)
class NeedWorkspace:
    """A call in hand asked its operator: it needs more workspace than is set aside for it.

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
        final: Whether no device has so much, however idle; otherwise the call is to come again.
        most_bytes: Workspace that the roomiest device could have beside the call's tensors.
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
    """Ask how the device's memory stands; calls that run at the time count as memory in use.

    Attributes:
        call: A number, for the answer.
        give_back: Whether memory that is only kept for later calls is given back to the device first.
        operator: What an error calls the question.
    """

    call: int
    give_back: bool
    operator: str = "memory"


@dataclass(frozen=True)
class MemoryFound:
    """How the device's memory stands.

    Attributes:
        call: Number of the question.
        free_bytes: Bytes that nothing uses; None when the device works in the host's memory.
        total_bytes: Bytes of the device; None likewise.
    """

    call: int
    free_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True)
class CallDone:
    """The results lie in the arena; the attributes are those of `npugrad_server.backends.base.Timings`.

    The backend is always named. The worker took up the call at `begun_s` of `time.monotonic`, which is one
    clock for all processes of a machine, and spent `verify_s` on the comparison with the reference, of which
    `verification` tells what there is to tell, and `verified` how far each output is from it: by name,
    the other attributes of `npugrad.call.VerifiedOutput` in their order.
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
        trace: For the log: where it happened; empty for an error that was expected.
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
"""What the pool says."""
CallAnswer: TypeAlias = "CallDone | CallFailed | CallDeferred"
"""What a worker says when it is done with a call."""
QueryAnswer: TypeAlias = "WorkspaceFound | MemoryFound | CanaryRun"
"""What a worker finds out when it is asked."""
Opening: TypeAlias = "DeviceOpening | DeviceReady | OpenFailed"
"""What a worker says of opening its device."""
WorkerReport: TypeAlias = (
    "Opening | DeviceFailed | QueryAnswer | CallUnknown | NeedWorkspace | Pong | CallAnswer"
)
"""What a worker says."""
Message: TypeAlias = "Order | WorkerReport"
