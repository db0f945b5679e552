"""Tests that every operator's reference has: run it, and hold it against an independent implementation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from tests.derived import SEEDS, Array, Operands, combined, drawn, ones, random_cases, told

from npugrad.coordinates import CoordinateRule
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.products import Product

Oracle = Callable[[Operands, Mapping[str, Any]], Mapping[str, Array]]


def reference_of(record: OpRecord) -> Callable[..., None]:
    """The reference behind checks, with the option that every one has: how much scratch memory it may use."""
    reference: Callable[..., None] = inspect.unwrap(record.reference)
    return reference


def run(
    record: OpRecord,
    call: CallMeta,
    inputs: Mapping[str, Array | None],
    dtype: str = "float64",
    **options: Any,
) -> dict[str, Array]:
    """Run the reference into outputs full of NaN, so that an element left alone shows."""
    metas = {name: meta for name, meta in record.infer(call).items() if meta is not None}
    outputs = {name: np.full(meta.shape, np.nan, dtype) for name, meta in metas.items()}
    reference_of(record)(inputs, call.attrs, outputs, **options)
    return outputs


def operand(inputs: Mapping[str, Array | None], name: str) -> Array:
    """An operand that is not null."""
    array = inputs[name]
    assert array is not None
    return array


def run_like(
    record: OpRecord,
    inputs: Mapping[str, Array | None],
    like: Mapping[str, str],
    attrs: Mapping[str, Any] | None = None,
    *,
    dtype: npt.DTypeLike = np.float64,
) -> dict[str, Array]:
    """Run the reference on operands of no call: each output is NaN before, and shaped like an operand."""
    outputs = {name: np.full(operand(inputs, source).shape, np.nan, dtype) for name, source in like.items()}
    record.reference(inputs, attrs or {}, outputs)
    return outputs


def assert_same_bits(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Both have the same bytes."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def assert_close(found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float = 1e-12) -> None:
    """Compare with an absolute tolerance of the tensor's own scale: sums cancel."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        atol = tolerance * (1 + np.abs(want[np.isfinite(want)]).max(initial=0))
        np.testing.assert_allclose(found[name], want, rtol=0, atol=atol, err_msg=name)


def assert_agrees(
    record: OpRecord, call: CallMeta, inputs: Operands, oracle: Oracle, tolerance: float = 1e-11
) -> None:
    """The wanted outputs of the reference are those of an independent implementation, in any shape.

    Coordinates are taken in float64, as mathematics has them; `test_coordinates.py` tries the other rules.
    """
    expected = oracle(inputs, call.attrs)  # first: it may put other statistics into the inputs
    found = run(
        record, call, inputs, **({"rule": CoordinateRule.FLOAT64} if record.references_by_rule else {})
    )
    assert expected.keys() == {param.name for param in record.outputs}
    assert_close(
        found, {name: expected[name].reshape(array.shape) for name, array in found.items()}, tolerance
    )


def against(record: OpRecord, oracle: Oracle, *, tolerance: float = 1e-11, count: int = 200) -> type[Any]:
    """A class of tests: samples of the record, its modes combined, and calls of random sizes.

    The oracle is an independent implementation of all outputs, from operands of any type and attributes; what
    it replaces in the operands, such as statistics of the forward pass, the reference is given too. The
    tolerance is relative to the largest element of an output, and the count is that of `make test-all`.
    """

    class Against:
        def test_samples(self) -> None:
            for sample in record.samples(Product.ATLAS_A2):
                if _has_results(record, sample.call):
                    inputs = record.make_inputs(sample.call, np.random.default_rng(11))
                    with told(sample.name):
                        assert_agrees(record, sample.call, inputs, oracle, tolerance)

        def test_modes_and_axes_of_one(self) -> None:
            for derived in (*combined(record, 3), *ones(record)):
                call = derived.call("float64")
                with told(derived.name):
                    assert_agrees(record, call, derived.operands(call), oracle, tolerance)

        @random_cases(count)
        @given(seed=SEEDS)
        def test_calls_of_any_size(self, seed: int) -> None:
            call, inputs = drawn(record, seed, ("float64",), most=1000, with_ties=False)
            assert_agrees(record, call, inputs, oracle, tolerance)

    return Against


def _has_results(record: OpRecord, call: CallMeta) -> bool:
    """Whether something is wanted, and no operand is empty."""
    is_empty = any(meta is not None and not meta.size for meta in call.inputs.values())
    return not is_empty and any(meta is not None for meta in record.infer(call).values())
