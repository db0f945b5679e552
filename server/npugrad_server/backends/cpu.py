"""The CPU backend: runs the float64 NumPy reference of the operator's record."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from npugrad_server.backends.base import Timings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.products import Product
    from npugrad.spec import CallMeta, OpSpec
    from npugrad_server.backends.base import DeviceCall
    from npugrad_server.devices import DeviceName


class CpuBackend:
    """Any operator with a reference, on the host's processors; deterministic for every call."""

    name = "cpu-reference"
    simulated = False
    one_mode = False
    strided = False
    memory_bytes: int | None = None

    def __init__(self) -> None:
        """Makes it; there is nothing to take."""
        self.description = "host CPU, NumPy reference in float64"
        self.unavailable: Mapping[str, str] = {}

    def open(self, device: DeviceName, product: Product, streams: int) -> None:
        """Notes how many threads NumPy's linear algebra has; a CPU device stands for every product."""
        threads = os.environ.get("OMP_NUM_THREADS", "all")
        self.description += f", {threads} threads for linear algebra"

    def run(self, spec: OpSpec, call: DeviceCall) -> Timings:
        """Computes in float64 and rounds once; operands and results stay where they are.

        Raises:
            CallAbandoned: The caller had gone before it began.
            DeadlineExceeded: The deadline had passed before it began.
        """
        call.check_wanted()
        start = time.perf_counter()
        spec.reference(call.inputs, call.meta.attrs, call.outputs)
        return Timings(run_s=time.perf_counter() - start)

    def workspace_bytes(self, spec: OpSpec, meta: CallMeta) -> int | None:
        """None: the reference works in blocks of its own."""

    def memory_now(self, *, give_back: bool) -> tuple[int, int] | None:
        """None: it works in the host's memory."""

    def close(self) -> None:
        """Nothing to give back."""
