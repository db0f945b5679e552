"""The protocol of a backend: open a device, run calls on it, close it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from npugrad.call import CallOptions
    from npugrad.products import Product
    from npugrad.spec import CallMeta, OpSpec
    from npugrad_server.devices import DeviceName


@dataclass(frozen=True)
class DeviceCall:
    """One call with its memory.

    Attributes:
        meta: Contiguous metas of the operands, attributes and product.
        inputs: Operands by name, C-contiguous and not to be written; None for null.
        outputs: Wanted outputs by name, C-contiguous, with bytes of earlier calls in them: every element is
            to be written, and none of them read.
        options: Options of the call.
        stream: Which of the worker's streams runs it, from 0.
    """

    meta: CallMeta
    inputs: Mapping[str, npt.NDArray[Any] | None]
    outputs: Mapping[str, npt.NDArray[Any]]
    options: CallOptions
    stream: int


@dataclass(frozen=True)
class Timings:
    """Where the time of a call went.

    Attributes:
        copy_in_s: Seconds spent making operands contiguous and copying them to the device.
        run_s: Seconds the operator ran.
        copy_out_s: Seconds spent copying results from the device.
        workspace_bytes: Workspace the operator asked for.
    """

    copy_in_s: float = 0.0
    run_s: float = 0.0
    copy_out_s: float = 0.0
    workspace_bytes: int = 0


class Backend(Protocol):
    """Drives one device, in a process of its own.

    Attributes:
        name: ``"cpu"``, ``"cpu-reference"``, ``"npu"`` or ``"test"``, as results report it.
        description: What the device is, for a person; final once open.
        simulated: Whether results come from a simulation.
        one_mode: Whether calls of different deterministic modes must not overlap on the device.
    """

    name: str
    description: str
    simulated: bool
    one_mode: bool

    def open(self, device: DeviceName, product: Product, streams: int) -> None:
        """Takes the device.

        Args:
            device: Which one; its kind is the backend's.
            product: Product the server serves.
            streams: How many calls will run at once, each on a thread of its own.

        Raises:
            Exception: The device cannot be used; the message says why, for a person.
        """

    def run(self, spec: OpSpec, call: DeviceCall) -> Timings:
        """Runs a call and writes every element of its outputs; up to `streams` threads call it at once.

        Raises:
            NpugradError: What the device or its operator says no with.
            MemoryError: The device has no memory for the call now.
        """
        ...

    def close(self) -> None:
        """Gives the device back; no call runs."""
