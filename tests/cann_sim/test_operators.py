"""The operators of the simulator against the float64 references: two derivations of the same documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.tolerance import compare
from tests.cann_sim.operators import as_it_is, compute, make_arrays, transposed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    import numpy.typing as npt

    from npugrad.spec import CallMeta, OpSpec
    from tests.cann_sim.operators import Relayout
    from tests.cann_sim.runtime import Runtime

pytestmark = pytest.mark.npu_sim

SOC = {
    Product.ATLAS_TRAINING: "Ascend910A",
    Product.ATLAS_A2: "Ascend910B2",
    Product.ATLAS_A3: "Ascend910_9391",
}


def every_sample() -> Iterator[Any]:
    for name, spec in OPERATORS.items():
        for product in spec.products:
            for sample in spec.samples(product):
                yield pytest.param(spec, product, sample.call, id=f"{name}-{product}-{sample.name}")


def check(
    runtime: Runtime, spec: OpSpec, call: CallMeta, arrays: dict[str, npt.NDArray[Any] | None], relayout: Relayout = as_it_is
) -> None:
    """Compares every wanted output with the reference; a call that writes nothing must leave the zeros."""
    found = compute(runtime, spec, call, arrays, relayout)
    golden = {name: np.zeros(output.shape) for name, output in found.items()}
    spec.reference(arrays, call.attrs, golden)
    for name, output in found.items():
        comparison = compare(golden[name], output, spec.extra_tolerance(arrays, call.attrs, name))
        assert comparison.ok, f"{name}: {comparison}"


@pytest.mark.parametrize(("spec", "product", "call"), list(every_sample()))
def test_every_sample_of_every_record(runtime: Runtime, spec: OpSpec, product: Product, call: CallMeta) -> None:
    runtime.set_plan(f"soc={SOC[product]}")
    check(runtime, spec, call, make_arrays(spec, call))


@pytest.mark.parametrize("name", OPERATORS)
def test_outputs_are_written_through_their_strides(runtime: Runtime, name: str) -> None:
    spec = get_operator(name)
    call = spec.build()
    check(runtime, spec, call, make_arrays(spec, call), transposed)
