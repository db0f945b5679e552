"""The LayerNorm reference against torch float64, and its types."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.contract.references.against import against, assert_same_bits, run
from tests.derived import FLOATS, told
from tests.operators import LAYER_NORM as RECORD

torch = pytest.importorskip("torch")

Arrays = dict[str, npt.NDArray[Any]]
NAMES = ("grad_input", "grad_weight", "grad_bias")


def tensors(inputs: Any, attrs: Any) -> list[Any]:
    """Operands in float64 but for bias, with statistics of the rank of input, and ones for no weight."""
    shape = attrs["normalized_shape"]
    rows = (*inputs["input"].shape[: -len(shape)], *(1,) * len(shape))
    given = {**inputs, "weight": np.ones(shape) if inputs["weight"] is None else inputs["weight"]}
    found = [np.array(given[name], np.float64) for name in ("grad_out", "input", "mean", "rstd", "weight")]
    found[2:4] = [array.reshape(rows) for array in found[2:4]]
    return [torch.from_numpy(array) for array in found]


def by_native_op(inputs: Any, attrs: Any) -> Arrays:
    """Statistics as they are given, whatever they are."""
    gradient, data, mean, rstd, weight = tensors(inputs, attrs)
    native = torch.ops.aten.native_layer_norm_backward
    grads = native(gradient, data, list(weight.shape), mean, rstd, weight, weight, [True] * 3)
    return {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


def by_autograd(inputs: Any, attrs: Any) -> Arrays:
    """Differentiate torch's forward pass, and put its statistics into `inputs`."""
    gradient, data, _, _, weight = tensors(inputs, attrs)
    leaves = data, weight, bias = [t.requires_grad_() for t in (data, weight, torch.zeros_like(weight))]
    out = torch.nn.functional.layer_norm(data, weight.shape, weight, bias, 1e-3)
    grads = torch.autograd.grad(out, leaves, gradient)
    axes = tuple(range(data.dim() - weight.dim(), data.dim()))
    variance, mean = torch.var_mean(data.detach(), axes, correction=0, keepdim=True)
    inputs.update(mean=mean.numpy(), rstd=(variance + 1e-3).rsqrt().numpy())
    return {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


TestArbitraryStatistics = against(RECORD, by_native_op, count=250)
TestStatisticsOfTheForwardPass = against(RECORD, by_autograd, tolerance=1e-9, count=200)


def test_types_are_those_of_each_operand() -> None:
    """And change no bit but those they round."""
    call = RECORD.build(dtype="float64", leading=(3, 2), normalized=(5,))
    made = RECORD.make_inputs(call, np.random.default_rng(3))
    for data, statistics, scale in itertools.product(FLOATS, repeat=3):
        types = {"grad_out": data, "input": data, "mean": statistics, "rstd": statistics}
        inputs = {n: None if a is None else a.astype(types.get(n, scale)) for n, a in made.items()}
        exact = {n: None if a is None else a.astype(np.float64) for n, a in inputs.items()}
        with told((data, statistics, scale)):
            assert_same_bits(run(RECORD, call, inputs), run(RECORD, call, exact))


@pytest.mark.parametrize(
    ("operand", "rows", "columns"),
    [
        ("grad_out", [2], ("grad_weight", "grad_bias")),
        ("input", [2], ("grad_weight",)),
        ("weight", [0, 1, 2], ()),
        ("bias", [], ()),
    ],
)
def test_what_is_not_finite_stays_in_its_row_and_column(
    operand: str, rows: list[int], columns: tuple[str, ...]
) -> None:
    call = RECORD.build(dtype="float64", leading=(3,), normalized=(5,))
    clean = run(RECORD, call, RECORD.make_inputs(call, np.random.default_rng(0)))
    for bad in (np.nan, np.inf, -np.inf):
        inputs: Any = RECORD.make_inputs(call, np.random.default_rng(0))
        inputs[operand].reshape(-1, 5)[-1, 2] = bad
        found = run(RECORD, call, inputs)
        assert np.flatnonzero(~np.isfinite(found["grad_input"]).all(1)).tolist() == rows
        for name in ("grad_weight", "grad_bias"):
            assert np.flatnonzero(~np.isfinite(found[name])).tolist() == ([2] if name in columns else [])
        for name, array in found.items():
            finite = np.isfinite(array)
            np.testing.assert_array_equal(array[finite], clean[name][finite])
