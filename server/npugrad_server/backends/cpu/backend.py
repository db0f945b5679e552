"""The backend of CPU devices: for each call a kernel, else PyTorch, else the record's NumPy reference."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import OPERATORS
from npugrad.coordinates import CoordinateRule
from npugrad_server.backends.base import REFERENCE, Backend, Timings, unheard
from npugrad_server.backends.cpu.kernels import Kernels, KernelsUnavailable, KernelUnsupported
from npugrad_server.backends.cpu.torch import Torch
from npugrad_server.machine import cpu_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_server.backends.base import DeviceCall
    from npugrad_server.backends.cpu.calls import Arrays, Block
    from npugrad_server.devices import DeviceName

TORCH = "cpu-torch"
"""Backend name of calls that PyTorch's operators compute."""
THREADS = "OMP_NUM_THREADS"
"""Environment variable: how many threads compute; the pool sets it, NumPy's libraries read it."""


def thread_count() -> int:
    """Number of threads that compute: the environment's, else one per processor."""
    given = os.environ.get(THREADS, "").strip()
    return max(1, int(given)) if given.isdigit() else cpu_count()


class CpuBackend(Backend):
    """Runs any operator with a reference on the host's processors; every call is deterministic."""

    strided = True

    def __init__(self, records: Mapping[str, OpRecord] = OPERATORS) -> None:
        """Makes it; `open` loads the kernels."""
        self.records = records
        self.name = REFERENCE
        self.description = "host CPU"
        self._kernels: Kernels | None = None
        self._torch: Torch | None = None
        self._float64_coordinates = False

    def open(
        self,
        device: DeviceName,
        product: Product,
        streams: int,
        on_stage: Callable[[str], None] = unheard,
    ) -> None:
        """Loads the kernels, or notes why there are none; a CPU device stands for every product."""
        threads = thread_count()
        self._torch = torch = Torch(threads)
        self._float64_coordinates = device.float64_coordinates
        coordinates = ", coordinates in float64" if self._float64_coordinates else ""
        try:
            self._kernels = kernels = Kernels(threads, float64_coordinates=self._float64_coordinates)
        except KernelsUnavailable as error:
            self.deferred = frozenset(self.records)
            self.description = (
                f"host CPU, NumPy reference in float64, {threads} threads for linear algebra{coordinates}; "
                f"no compiled kernels: {error}{self._others(torch, [])}"
            )
            return
        self.name = "cpu"
        self.description = f"host CPU, compiled kernels ({kernels.variant}), {kernels.threads} threads"
        self.deferred = frozenset(self.records) - frozenset(kernels.operators)
        others = [name for name in self.records if name in self.deferred]
        self.description += f"{coordinates}{self._others(torch, others)}"

    def _others(self, torch: Torch, names: list[str]) -> str:
        """What computes operators that have no kernel, of which some are named; in words."""
        bound = [name for name in sorted(self.deferred) if torch.has(self.records[name])]
        others = [name for name in names if not (torch.is_found and name in bound)]
        said = [f"PyTorch for {', '.join(bound)}"] * bool(torch.is_found and bound)
        said += [f"NumPy reference in float64 for {', '.join(others)}"] * bool(others)
        said += [f"no PyTorch: {torch.trouble}"] * bool(torch.trouble and bound)
        return "".join(f"; {each}" for each in said)

    def run(self, record: OpRecord, call: DeviceCall) -> Timings:
        """Computes directly on the call's arrays; operands that must be contiguous are copied first.

        Raises:
            CallAbandoned: The caller has gone.
            DeadlineExceeded: The result would come too late.
            MemoryError: There is no scratch memory for the call now.
        """
        call.check_wanted()
        start = time.perf_counter()
        if self._kernels is not None and record.name in self._kernels.operators:
            inputs, copied = self._packed(self._kernels, record, call.inputs)
            packed = time.perf_counter()
            # Kept apart by what was copied: a copy may have other strides than the operand.
            spare: list[Block] = call.memo.setdefault(("blocks", *copied), [])
            try:
                self._kernels.run(
                    record, inputs, call.meta.attrs, call.outputs, call.check_wanted, spare=spare
                )
                return Timings(copy_in_s=packed - start, run_s=time.perf_counter() - packed)
            except KernelUnsupported:
                pass  # nothing was written; the others take more
        inputs = {
            name: None if array is None else np.require(array, requirements=("C", "A"))
            for name, array in call.inputs.items()
        }
        packed = time.perf_counter()
        if self._torch is not None and self._torch.run(record, inputs, call):
            return Timings(packed - start, time.perf_counter() - packed, backend=TORCH)
        reference = record.reference
        if self._float64_coordinates:
            reference = record.references_by_rule.get(CoordinateRule.FLOAT64, reference)
        reference(inputs, call.meta.attrs, call.outputs)
        return Timings(packed - start, time.perf_counter() - packed, backend=REFERENCE)

    @staticmethod
    def _packed(
        kernels: Kernels, record: OpRecord, inputs: Mapping[str, npt.NDArray[Any] | None]
    ) -> tuple[Arrays, tuple[str, ...]]:
        """The operands as the kernel takes them, and the names of those that are copies."""
        copies: dict[str, npt.NDArray[Any]] = {}
        for name, array in inputs.items():
            if array is None or (array.flags.aligned and array.flags.c_contiguous):
                continue
            if not array.flags.aligned or not kernels.takes_strides(record, name):
                copies[name] = array.copy()
        return ({**inputs, **copies}, tuple(copies)) if copies else (inputs, ())

    def close(self) -> None:
        """Ends the threads; no call may be running."""
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None
