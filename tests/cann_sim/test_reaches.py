"""What the records say that each operand reaches, against the kernels of the simulator: SIMULATED."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.cann_sim.operators import compute
from tests.cann_sim.runtime import Runtime
from tests.reaches import every_sample, masked, prove

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord

pytestmark = pytest.mark.npu_sim


# One of those whose smallest legal call is not small.
LARGE = [one for one in every_sample() if one.id == "fused_floyd_attention_grad-bfloat16-bool_mask"]


@pytest.mark.parametrize(("record", "call"), [*every_sample(with_large=False), *LARGE])
def test_every_small_sample_under_every_mask(runtime: Runtime, record: OpRecord, call: CallMeta) -> None:
    def simulated(
        record: OpRecord, call: CallMeta, arrays: Mapping[str, npt.NDArray[Any] | None]
    ) -> dict[str, npt.NDArray[Any]]:
        if record.accepts_unchecked(call):
            return {}
        if record.data_check is not None and record.data_check(arrays) is not None:
            return {param.name: np.empty(0) for param in record.outputs}  # refused before the launch
        return compute(runtime, record, call, arrays)

    runtime.set_plan("sums=ordered")  # else no two launches have the same bits
    for one in masked(record, call):
        prove(record, one, simulated)
