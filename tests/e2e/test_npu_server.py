"""Calls over gRPC on simulated NPUs: every operator, type, mode, mask and layout. All results are SIMULATED."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npugrad.layout import view
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.tolerance import compare
from tests.calls import Sample, call_execute, call_unary, fill

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from tests.fix_npu import NpuServer

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]


def every_sample() -> Iterator[Any]:
    for name, spec in OPERATORS.items():
        for sample in spec.samples(Product.ATLAS_A2):
            yield pytest.param(name, sample.name, id=f"{name}-{sample.name}")


def check(sample: Sample, contents: dict[str, bytes]) -> None:
    """Every wanted output is within tolerance of the float64 reference."""
    metas = sample.outputs
    assert contents.keys() == metas.keys()
    golden = {name: np.zeros(meta.shape) for name, meta in metas.items()}
    sample.spec.reference(sample.arrays, sample.call.attrs, golden)
    for name, meta in metas.items():
        got = view(meta, contents[name])
        extra = sample.spec.extra_tolerance(sample.arrays, sample.call.attrs, name)
        comparison = compare(golden[name], got, extra)
        assert comparison.ok, f"{name}: {comparison}"


@pytest.mark.parametrize(("operator", "name"), list(every_sample()))
def test_every_sample_of_every_record(npu_server: NpuServer, operator: str, name: str) -> None:
    spec = get_operator(operator)
    sample = fill(spec, next(s.call for s in spec.samples(Product.ATLAS_A2) if s.name == name))
    with npu_server.process.channel() as channel:
        reply = call_execute(channel, sample.frames())
    check(sample, reply.contents)
    info = reply.result.info
    assert (info.backend, info.simulated, info.device[:4]) == ("npu", True, "npu:")
