"""What the records say that each operand reaches, against every compiled kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import pytest
from tests.reaches import every_sample, masked, prove
from tests.server.kernels.compare import computed
from tests.server.kernels.test_at_once import LONG

from npugrad.dtypes import DType
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad_server.backends.cpu.kernels import Kernels

LARGER = [pytest.param(derived.record, derived.call(), id=str(derived)) for derived in LONG]
"""Of more than one block and task."""


@pytest.mark.parametrize(("record", "call"), [*every_sample(), *LARGER])
def test_every_sample_under_every_mask(kernels: Kernels, record: OpRecord, call: CallMeta) -> None:
    if record.name not in kernels.operators:
        pytest.skip(f"{record.name} has no kernel")
    if any(meta is not None and meta.dtype is DType.FLOAT64 for meta in call.inputs.values()):
        pytest.skip("float64 is computed by the reference")

    def compute(
        record: OpRecord, call: CallMeta, arrays: Mapping[str, npt.NDArray[Any] | None]
    ) -> dict[str, npt.NDArray[Any]]:
        if record.accepts_unchecked(call):
            return {}
        packed = {
            name: array if array is None or kernels.takes_strides(record, name) else array.copy()
            for name, array in arrays.items()
        }
        return computed(kernels, record, call, packed)

    for one in masked(record, call):
        prove(record, one, compute)
