"""Runs the records' probes: calls with results computed by hand, to explain what random data cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.meta import TensorMeta
from npugrad.validation import make_call
from npugrad_server.acceptance.job import Job
from npugrad_server.worker.protocol import CallDone

if TYPE_CHECKING:
    import numpy.typing as npt

    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad.workloads import Filled
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog


def check_probes(rig: Rig, out: StepLog) -> None:
    """Runs every probe of the operators that the device can run."""
    for record in rig.operators:
        for probe in record.workloads.probes:
            filled, name = probe.make(), f"{record.name}: {probe.name}"
            ran = rig.run_job(_job(record, filled, rig.settings.product))
            if not isinstance(ran.answer, CallDone):
                out.check(name, False, "a result", ran.answer.message)
                continue
            for output, expected in filled.expected.items():
                # All numbers are sums of a few powers of two, so they are exact in float32.
                found = ran.outputs[output]
                out.check(name, bool(np.array_equal(found, expected)), _shown(expected), _shown(found))


def _job(record: OpRecord, filled: Filled, product: Product) -> Job:
    metas = {
        name: None if array is None else TensorMeta(array.dtype.name, array.shape)
        for name, array in filled.operands.items()
    }
    return Job(record, make_call(record, metas, filled.attrs, product=product), filled.operands)


def _shown(array: npt.NDArray[Any]) -> str:
    """Formats the numbers, of the last axis only the first if there are others; they are not a caller's."""
    numbers = array.squeeze()
    shown = numbers if numbers.ndim < 2 else numbers[..., 0]
    return " ".join(f"{number:g}" for number in shown.ravel().tolist())
