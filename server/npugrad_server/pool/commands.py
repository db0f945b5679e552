"""The scheduler's inputs other than calls, and its outputs: commands for the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from npugrad_server.backends.base import RestartPolicy

if TYPE_CHECKING:
    from npugrad_server.worker.protocol import AbandonCall, WorkspaceGranted, WorkspaceRefused


@dataclass(frozen=True)
class WorkerSpec:
    """A device as the scheduler sees it.

    Attributes:
        streams: Calls that may run on it at once.
        output_bytes: Size of its output arena.
        memory: Name of the host memory that it shares with other devices; key of the scheduler's budgets.
        heavy: Whether starting it keeps the host busy, so that not all such devices start at once.
    """

    streams: int
    output_bytes: int
    memory: str
    heavy: bool = False


@dataclass(frozen=True)
class Failure:
    """What a process reported about its device before it ended.

    Attributes:
        reason: Human-readable: the vendor's function, number and text, or what is missing.
        restart_policy: When a new process may take the device.
        call: The call that hit it; None if the device did not open.
        code: The vendor's number; None if there is none.
        retry: Whether that call may be tried once more.
        exempt: Whether this does not count against the device, because a time limit expired first.
        silent: Whether the process stopped answering, and reported nothing itself.
        wrong: Operator whose canary was wrong while the device was opened; empty for none.
        killed: Whether a signal that others may have sent ended the process, such as SIGKILL.
    """

    reason: str
    restart_policy: RestartPolicy = RestartPolicy.SOON
    call: int | None = None
    code: int | None = None
    retry: bool = True
    exempt: bool = False
    silent: bool = False
    wrong: str = ""
    killed: bool = False


@dataclass(frozen=True)
class SpawnWorker:
    """Start a process for a device, which is ready once every canary was right `canary_rounds` times.

    `ready` or `lost` follows, with the same incarnation.
    """

    worker: int
    incarnation: int
    canary_rounds: int = 1


@dataclass(frozen=True)
class KillWorker:
    """End a process; report `lost` once it has been waited for."""

    worker: int
    incarnation: int
    reason: str


@dataclass(frozen=True)
class StartCall:
    """Hand a call to a worker; the call's state names the region of that worker's arena for its outputs.

    `workspace_bytes` of the device's own memory are set aside for its workspace; None if the device has none.
    """

    call: int
    worker: int
    incarnation: int
    attempt: int
    queued_s: float
    workspace_bytes: int | None = None


@dataclass(frozen=True)
class TellWorker:
    """Send a process a message about a call that it runs."""

    worker: int
    incarnation: int
    message: AbandonCall | WorkspaceGranted | WorkspaceRefused


@dataclass(frozen=True)
class CompleteCall:
    """Give the worker's answer to the caller."""

    call: int


@dataclass(frozen=True)
class FailCall:
    """Give the caller an error: a row of the error table, and what happened.

    Also the vendor's number, if any, and the seconds after which the call may be tried again, if known.
    """

    call: int
    reason: str
    detail: str
    code: int | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True)
class CircuitChanged:
    """Note that calls of this call's tenant and signature are refused for a while, or no longer.

    `deaths` says how many workers were lost and how; empty if the circuit was closed. `whole` says whether it
    is about all calls of the tenant and operator.
    """

    call: int
    deaths: str
    whole: bool = False


@dataclass(frozen=True)
class RequeueCall:
    """Note that a call waits again because its worker died."""

    call: int
    worker: int


@dataclass(frozen=True)
class RedirectCall:
    """Note that a call waits for another device, because this one cannot take it now, for `reason`."""

    call: int
    worker: int
    reason: str


@dataclass(frozen=True)
class PostponeCall:
    """Note that a call waits again because its device had no room for its workspace."""

    call: int
    worker: int


@dataclass(frozen=True)
class MakeRoom:
    """Calls wait for room in this worker's output arena: drop results there that nobody takes."""

    worker: int


@dataclass(frozen=True)
class ReleaseCall:
    """Free the operands' memory: the ticket is closed and no worker reads them any more."""

    call: int


@dataclass(frozen=True)
class DeviceChanged:
    """Tell observers that a device changed its state, or its start reached another stage."""

    worker: int


@dataclass(frozen=True)
class StartCanary:
    """Have a process run a canary, by number; report the result to `canary`."""

    worker: int
    incarnation: int
    number: int


@dataclass(frozen=True)
class DeviceMismatch:
    """Tell observers that a device has computed wrongly: the operator and the figures."""

    worker: int
    operator: str
    detail: str


WorkerCommand: TypeAlias = (
    "SpawnWorker | KillWorker | DeviceChanged | DeviceMismatch | StartCanary | MakeRoom"
)
CallCommand: TypeAlias = (
    "StartCall | CompleteCall | FailCall | RequeueCall | RedirectCall | PostponeCall | ReleaseCall"
)
Command: TypeAlias = "WorkerCommand | CallCommand | CircuitChanged | TellWorker"
