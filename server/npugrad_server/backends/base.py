"""What a backend is: open a device, run calls on it, close it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from npugrad.call import CallOptions
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_server.devices import DeviceName

REFERENCE = "cpu-reference"
"""What a CPU device names as its backend where the slow NumPy reference computes."""


def _grant(_: int) -> None:
    """Any workspace."""


def _go_on() -> None:
    """Somebody waits."""


def unheard(stage: str) -> None:
    """Nobody listens to what opening a device is at."""


@dataclass(eq=False)
class DeviceCall:
    """One call with its memory, and how its backend, which changes nothing of it, asks the pool.

    Attributes:
        meta: Metas of the operands as `inputs` has them, attributes and product.
        inputs: Operands by name, not to be written; None for null. C-contiguous, unless the backend takes
            strided ones: then they have the strides they arrived with.
        outputs: Wanted outputs by name, C-contiguous, with bytes of earlier calls in them: every element is
            to be written, and none of them read.
        options: Options of the call.
        stream: Which of the worker's streams runs it, from 0.
        give_up_s: `time.monotonic()` at which the device is to be given up if it still runs the call.
        deadline_s: `time.monotonic()` from which on the result is of no use; None for never.
        reserve_workspace: To be called with the bytes of workspace the operator asked for, before they are
            taken. Raises `CallPostponed` when the device has no room for them now, `DeviceOutOfMemory` when
            it never will.
        check_wanted: To be called before work is started that takes long. Raises `CallAbandoned` when the
            caller has gone, and `DeadlineExceeded` when the result would come too late.
        memo: For the backend, to keep what follows from record, metas, attributes, and shapes and strides of
            the arrays: empty at first, and the same for calls in which none of these differ. Threads that run
            such calls at once share it.
        is_canary: Whether it is one of the service's own, which takes none of the times that a simulated
            device is asked to take.
    """

    meta: CallMeta
    inputs: Mapping[str, npt.NDArray[Any] | None]
    outputs: Mapping[str, npt.NDArray[Any]]
    options: CallOptions
    stream: int
    give_up_s: float = float("inf")
    deadline_s: float | None = None
    reserve_workspace: Callable[[int], None] = _grant
    check_wanted: Callable[[], None] = _go_on
    memo: dict[Any, Any] = field(default_factory=dict)
    is_canary: bool = False


@dataclass(frozen=True)
class Timings:
    """Where the time of a call went.

    Attributes:
        copy_in_s: Seconds spent making operands contiguous and copying them to the device.
        run_s: Seconds the operator ran.
        copy_out_s: Seconds spent copying results from the device.
        workspace_bytes: Workspace the operator asked for.
        backend: What ran the operator, where it is not the backend itself: ``"cpu-reference"`` on a CPU
            device whose kernels do not compute the call.
    """

    copy_in_s: float = 0.0
    run_s: float = 0.0
    copy_out_s: float = 0.0
    workspace_bytes: int = 0
    backend: str = ""


class RestartPolicy(str, Enum):
    """Whether and when a new process may take the device; compares equal to its name, such as ``"soon"``."""

    SOON = "soon"
    SLOWLY = "slowly"
    """Driver or device need time."""
    MENDED = "mended"
    """Something is missing or does not fit: no wait brings it, but somebody may mend it meanwhile."""
    NEVER = "never"
    """The device is damaged."""

    def __str__(self) -> str:
        """The name."""
        return str(self.value)


class DeviceUnusable(RuntimeError):
    """The device cannot be opened.

    Attributes:
        restart_policy: When another try makes sense.
    """

    def __init__(self, message: str, restart_policy: RestartPolicy = RestartPolicy.MENDED) -> None:
        """Makes the error; the message says what is missing and what was tried."""
        super().__init__(message)
        self.restart_policy = restart_policy


class CallPostponed(Exception):
    """The device has no room for the call's workspace now; the call is to come again, knowing what it needs.

    Attributes:
        workspace_bytes: Workspace that the operator asked for.
    """

    def __init__(self, workspace_bytes: int) -> None:
        """Makes it."""
        super().__init__(f"no room for {workspace_bytes} bytes of workspace now")
        self.workspace_bytes = workspace_bytes


class CallAbandoned(Exception):
    """Nobody waits for the call any more, and nothing of it was launched."""


class DeviceLost(Exception):
    """The device, or what this process knows of it, cannot be trusted any more: the process has to go.

    Whoever raises it keeps everything alive that the device may still touch. Whoever catches it reports and
    ends the process at once, without touching anything of the device.

    Attributes:
        code: The vendor's number.
        restart_policy: When a new process may take the device.
        retry: Whether the call that met it may be tried once more, elsewhere.
        exempt: Whether the device is not to be held to account: somebody's patience ended first.
    """

    def __init__(
        self,
        message: str,
        code: int,
        *,
        restart_policy: RestartPolicy = RestartPolicy.SOON,
        retry: bool = True,
        exempt: bool = False,
    ) -> None:
        """Makes the error; the message has function, number and text of the vendor."""
        super().__init__(message)
        self.code, self.restart_policy, self.retry, self.exempt = code, restart_policy, retry, exempt


class Backend(ABC):
    """Drives one device, in a process of its own.

    Attributes:
        records: Operators that it may be asked for, by name.
        name: ``"cpu"``, ``"cpu-reference"``, ``"npu"`` or ``"test"``, as results report it
            unless `Timings` names another.
        description: What the device is, for a person; final once open.
        simulated: Whether results come from a simulation.
        one_mode: Whether calls of different deterministic modes must not overlap on the device; final once
            open.
        deterministic: Mode that it keeps for every call; None where each call chooses; final once open.
        no_determinism: Why none of its calls is deterministic; empty where they can be; final once open.
        strided: Whether `run` takes operands with the strides they arrived with.
        unavailable: Operators that the device cannot run, with the reason; final once open.
        memory_bytes: Memory of the device's own for calls, once open; None when it works in the host's.
        computes: Whether its results are those of the operators, so that they can be checked; final once
            open.
        is_limited: Whether it refuses calls that its product refuses.
    """

    records: Mapping[str, OpRecord]
    name: str
    description: str
    simulated: bool = False
    one_mode: bool = False
    deterministic: bool | None = None
    no_determinism: str = ""
    strided: bool = False
    unavailable: Mapping[str, str] = MappingProxyType({})
    memory_bytes: int | None = None
    computes: bool = True
    is_limited: bool = False

    @abstractmethod
    def open(
        self,
        device: DeviceName,
        product: Product,
        streams: int,
        on_stage: Callable[[str], None] = unheard,
    ) -> None:
        """Takes the device.

        Args:
            device: Which one; its kind is the backend's.
            product: Product the server serves.
            streams: How many calls will run at once, each on a thread of its own.
            on_stage: To be called before each part that may take long, with what it is, such as ``"importing
                torch_npu"``: the process is taken for hung when it says nothing for too long.

        Raises:
            DeviceUnusable: The device cannot be used; the message says why, for a person.
            DeviceLost: It failed while it was being opened.
        """

    @abstractmethod
    def run(self, record: OpRecord, call: DeviceCall) -> Timings:
        """Runs a call and writes every element of its outputs; up to `streams` threads call it at once.

        Raises:
            NpugradError: What the device or its operator says no with.
            MemoryError: The device has no memory for the call now.
            CallPostponed: The pool has no room for its workspace now; everything was given back.
            CallAbandoned: The caller has gone.
            DeviceLost: The process has to go.
        """

    def workspace_bytes(self, record: OpRecord, meta: CallMeta) -> int | None:
        """Workspace that the operator would ask for; None when the device cannot tell.

        Raises:
            NpugradError: The operator refuses the call.
            DeviceLost: The process has to go.
        """
        return None

    def memory_now(self, *, give_back: bool) -> tuple[int, int] | None:
        """Free and total bytes of the device; None when it works in the host's memory.

        Args:
            give_back: Whether memory that is only kept for later calls is given back to the device first.

        Raises:
            NpugradError: The device does not tell.
            DeviceLost: The process has to go.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Gives the device back; no call runs."""
