"""The interface of a backend: opens a device, runs calls on it, closes it."""

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
"""Backend name that a CPU device reports where the slow NumPy reference computes."""


def _grant(_: int) -> None:
    """Grants any workspace."""


def _go_on() -> None:
    """Lets the call go on."""


def unheard(stage: str) -> None:
    """Ignores the progress of opening a device."""


@dataclass(eq=False)
class DeviceCall:
    """One call with its memory and its callbacks to the pool; a backend never reassigns its attributes.

    Attributes:
        meta: Metas of the operands as `inputs` has them, attributes and product.
        inputs: Operands by name, read-only; None for null. C-contiguous, unless the backend takes strided
            operands: then they have the strides they arrived with. Those that the record's `data_check` reads
            are checked, contiguous copies that nobody else can change.
        outputs: Wanted outputs by name, C-contiguous. They contain bytes of earlier calls: the backend writes
            every element and reads none.
        options: Options of the call.
        stream: Index of the worker's stream that runs it, from 0.
        give_up_s: `time.monotonic()` at which to give up the device if it still runs the call.
        deadline_s: `time.monotonic()` at which the result becomes useless; None for never.
        reserve_workspace: Call it with the bytes of workspace the operator asked for, before allocating them.
            Raises `CallPostponed` if the device has no room for them now, `DeviceOutOfMemory` if it never
            will.
        check_wanted: Call it before starting long work. Raises `CallAbandoned` if the caller has gone,
            `DeadlineExceeded` if the result would come too late.
        memo: The backend's cache for what follows from record, metas, attributes, and the arrays' shapes and
            strides: empty at first, and shared by all calls that agree in these, concurrent ones included.
        is_canary: Whether it is the service's own; a simulated device then skips its service time.
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
        backend: What ran the operator, if not the backend itself: ``"cpu-torch"`` or ``"cpu-reference"`` on a
            CPU device whose kernels do not compute the call.
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
    """The driver or the device needs time."""
    MENDED = "mended"
    """Something is missing or does not fit: waiting does not help, but somebody may fix it meanwhile."""
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
    """The device has no room for the call's workspace now; the pool retries the call, knowing what it needs.

    Attributes:
        workspace_bytes: Workspace that the operator asked for.
    """

    def __init__(self, workspace_bytes: int) -> None:
        """Makes it."""
        super().__init__(f"no room for {workspace_bytes} bytes of workspace now")
        self.workspace_bytes = workspace_bytes


class CallAbandoned(Exception):
    """Nobody waits for the call any more, and nothing was launched."""


class DeviceLost(Exception):
    """The device, or this process's view of it, cannot be trusted any more: the process must exit.

    Code that raises it keeps everything alive that the device may still touch. Code that catches it reports
    it and ends the process at once, without touching the device.

    Attributes:
        code: The vendor's error code.
        restart_policy: When a new process may take the device.
        retry: Whether the call that hit it may be tried once more, elsewhere.
        exempt: Whether it does not count against the device, because a time limit expired first.
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
        """Makes the error; the message has the vendor's function, number and text."""
        super().__init__(message)
        self.code, self.restart_policy, self.retry, self.exempt = code, restart_policy, retry, exempt


class Backend(ABC):
    """Drives one device, in a dedicated process.

    Attributes:
        records: Operators that it may be asked for, by name.
        name: ``"cpu"``, ``"cpu-reference"``, ``"npu"`` or ``"test"``, as results report it
            unless `Timings` names another.
        description: Human-readable description of the device; final once open.
        simulated: Whether results come from a simulation.
        one_mode: Whether calls of different deterministic modes must not overlap on the device; final once
            open.
        deterministic: Mode that it keeps for every call; None if each call chooses; final once open.
        no_determinism: Why none of its calls is deterministic; empty if they can be; final once open.
        strided: Whether `run` takes operands with the strides they arrived with.
        unavailable: Operators that the device cannot run, with the reason; final once open.
        deferred: Operators whose canaries wait until the device is ready: the reference computes them, or
            what only the first call loads; final once open.
        memory_bytes: The device's own memory for calls, once open; None if it works in host memory.
        computes: Whether it computes the operators' real results, which can be checked; final once open.
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
    deferred: frozenset[str] = frozenset()
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
            device: The device; its kind is the backend's.
            product: Product the server serves.
            streams: How many calls will run at once, each on its own thread.
            on_stage: Called before each part that may take long, with its description, such as ``"importing
                torch_npu"``: a process that reports nothing for too long is considered hung.

        Raises:
            DeviceUnusable: The device cannot be used; the message says why, for a person.
            DeviceLost: It failed while it was being opened.
        """

    @abstractmethod
    def run(self, record: OpRecord, call: DeviceCall) -> Timings:
        """Runs a call and writes every element of its outputs; up to `streams` threads call it at once.

        Raises:
            NpugradError: The device or its operator refuses or fails.
            MemoryError: The device does not have enough free memory for the call.
            CallPostponed: The pool has no room for its workspace now; everything was given back.
            CallAbandoned: The caller has gone.
            DeviceLost: The process must exit.
        """

    def workspace_bytes(self, record: OpRecord, meta: CallMeta) -> int | None:
        """Workspace that the operator would ask for; None when the device cannot tell.

        Raises:
            NpugradError: The operator refuses the call.
            DeviceLost: The process must exit.
        """
        return None

    def memory_now(self, *, give_back: bool) -> tuple[int, int] | None:
        """Free and total bytes of the device; None if it works in host memory.

        Args:
            give_back: Whether to release memory cached for later calls to the device first.

        Raises:
            NpugradError: The device cannot tell.
            DeviceLost: The process must exit.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Releases the device; no call may be running."""
