"""What goes into the scheduler beside calls, and what comes out of it: commands for the driver."""

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
        memory: Name of the host memory it shares with other devices; the budgets of the scheduler have it as
            key.
        heavy: Whether starting it keeps the host busy, so that not all such devices start at once.
    """

    streams: int
    output_bytes: int
    memory: str
    heavy: bool = False


@dataclass(frozen=True)
class Failure:
    """What a process said of its device before it ended.

    Attributes:
        reason: For a person: function, number and text of the vendor, or what is missing.
        restart_policy: When a new process may take the device.
        call: The call that met it; None when the device did not open.
        code: The vendor's number; None without one.
        retry: Whether that call may be tried once more.
        exempt: Whether this does not count against the device.
        wrong: Operator whose canary was wrong while the device was opened; empty for none.
    """

    reason: str
    restart_policy: RestartPolicy = RestartPolicy.SOON
    call: int | None = None
    code: int | None = None
    retry: bool = True
    exempt: bool = False
    wrong: str = ""


@dataclass(frozen=True)
class SpawnWorker:
    """Start a process for a device, which is ready once every canary was right so many times.

    `ready` or `lost` follows, with the same incarnation.
    """

    worker: int
    incarnation: int
    canary_rounds: int = 1


@dataclass(frozen=True)
class KillWorker:
    """End a process; tell `lost` once it was waited for."""

    worker: int
    incarnation: int
    reason: str


@dataclass(frozen=True)
class StartCall:
    """Hand a call to a worker; its state says which region of that worker's arena its outputs go into.

    `workspace_bytes` of the device's own memory are set aside for its workspace; None where it has none.
    """

    call: int
    worker: int
    incarnation: int
    attempt: int
    queued_s: float
    workspace_bytes: int | None = None


@dataclass(frozen=True)
class TellWorker:
    """Say something to a process about a call that it runs."""

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

    Beside them the vendor's number, if any, and the seconds after which the call may be tried again.
    """

    call: int
    reason: str
    detail: str
    code: int | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True)
class CircuitChanged:
    """Note that calls of the tenant and signature of this call are refused for a while, or no longer.

    `deaths` of workers made it so; 0 when it was closed.
    """

    call: int
    deaths: int


@dataclass(frozen=True)
class RequeueCall:
    """Note that a call waits again because the worker died under it."""

    call: int
    worker: int


@dataclass(frozen=True)
class RedirectCall:
    """Note that a call waits for another device, because this one cannot take it now: with its reason."""

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
    """Calls wait for room in the output arena of this worker: results that nobody takes are to leave it."""

    worker: int


@dataclass(frozen=True)
class ReleaseCall:
    """Give the operands' memory back: the ticket is closed and no worker reads them any more."""

    call: int


@dataclass(frozen=True)
class DeviceChanged:
    """Tell whoever watches that a device is in another state, or its start at another stage."""

    worker: int


@dataclass(frozen=True)
class StartCanary:
    """Have a process run a canary, by number; tell `canary` what it found."""

    worker: int
    incarnation: int
    number: int


@dataclass(frozen=True)
class DeviceMismatch:
    """Tell whoever watches that a device has computed wrongly: which operator, and the figures."""

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
