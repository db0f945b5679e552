"""The Floyd attention reference against torch autograd and the formulas in einsum; masks, the example."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.contract.references.against import against, assert_close, assert_same_bits, operand, run_like
from tests.derived import Derived

from npugrad.ops.fused_floyd_attention_grad import FUSED_FLOYD_ATTENTION_GRAD as RECORD

Array = npt.NDArray[Any]
Inputs = dict[str, Array | None]

OUTPUTS = {"dq": "query", "dk1": "key1", "dv1": "value1", "dk2": "key2", "dv2": "value2"}
FLT_MAX = float(np.finfo(np.float32).max)


def run(inputs: Inputs, scale: float = 0.25, dtype: npt.DTypeLike = np.float64) -> dict[str, Array]:
    return run_like(RECORD, inputs, OUTPUTS, {"scale_value": scale}, dtype=dtype)


def make(masked: float | None = None, seed: int = 0, **sizes: int) -> Inputs:
    """Draw a call of no forward pass at all; `masked` is the share of masked keys, or None for no mask."""
    derived = Derived(RECORD, {**MEDIUM, **sizes, "with_mask": masked is not None}, "medium")
    inputs = in_float64(derived.unrelated(derived.call("float64"), seed))
    if masked is not None:
        mask = operand(inputs, "atten_mask")
        mask[...] = np.random.default_rng(seed).random(mask.shape) < masked
    return inputs


def by_einsum(inputs: Inputs, scale: float) -> dict[str, Array]:
    """Write the documented formulas down whole."""
    q, k1, v1, k2, v2, dy = (
        operand(inputs, name) for name in ("query", "key1", "value1", "key2", "value2", "dy")
    )
    s = scale * (np.einsum("bhnmd,bhnkd->bhnmk", q, k1) + np.einsum("bhnmd,bhkmd->bhnmk", q, k2))
    if inputs["atten_mask"] is not None:
        s = np.where(inputs["atten_mask"], -FLT_MAX, s)
    p = np.exp(s - operand(inputs, "softmax_max")[..., :1]) / operand(inputs, "softmax_sum")[..., :1]
    dp = np.einsum("bhnmd,bhnkd->bhnmk", dy, v1) + np.einsum("bhnmd,bhkmd->bhnmk", dy, v2)
    ds = p * (dp - np.sum(dy * operand(inputs, "attention_in"), axis=-1, keepdims=True))
    return {
        "dq": scale * (np.einsum("bhnmk,bhnkd->bhnmd", ds, k1) + np.einsum("bhnmk,bhkmd->bhnmd", ds, k2)),
        "dk1": scale * np.einsum("bhnmk,bhnmd->bhnkd", ds, q),
        "dv1": np.einsum("bhnmk,bhnmd->bhnkd", p, dy),
        "dk2": scale * np.einsum("bhnmk,bhnmd->bhkmd", ds, q),
        "dv2": np.einsum("bhnmk,bhnmd->bhkmd", p, dy),
    }


def by_autograd(inputs: Inputs, scale: float, *, passing: bool) -> dict[str, Array]:
    """Differentiate the forward pass, and put its statistics and output into `inputs`.

    Masked scores are replaced by a constant, as torch's masked_fill does, or, passing, by their value only:
    then the gradient passes the mask.
    """
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(operand(inputs, source), requires_grad=True) for source in OUTPUTS.values()]
    q, k1, v1, k2, v2 = leaves
    s = scale * (torch.einsum("bhnmd,bhnkd->bhnmk", q, k1) + torch.einsum("bhnmd,bhkmd->bhnmk", q, k2))
    if inputs["atten_mask"] is not None:
        mask = torch.tensor(inputs["atten_mask"])
        filled = s.masked_fill(mask, -FLT_MAX)
        s = s + (filled - s).detach() if passing else filled
    maximum = s.amax(-1, keepdim=True).detach()
    exponentials = torch.exp(s - maximum)
    total = exponentials.sum(-1, keepdim=True)
    p = exponentials / total
    y = torch.einsum("bhnmk,bhnkd->bhnmd", p, v1) + torch.einsum("bhnmk,bhkmd->bhnmd", p, v2)
    inputs["softmax_max"] = maximum.expand(*maximum.shape[:-1], 8).numpy()
    inputs["softmax_sum"] = total.detach().expand(*total.shape[:-1], 8).numpy()
    inputs["attention_in"] = y.detach().numpy()
    grads = torch.autograd.grad(y, leaves, torch.tensor(operand(inputs, "dy")))
    return {name: grad.numpy() for name, grad in zip(OUTPUTS, grads, strict=True)}


# Square sizes hide swapped axes, so none here is square.
MEDIUM = {"b": 2, "h": 2, "n": 12, "m": 16, "k": 20, "d": 24}


def as_given(inputs: Inputs, attrs: Any) -> dict[str, Array]:
    with np.errstate(all="ignore"):
        return by_einsum(in_float64(inputs), attrs["scale_value"])


def of_the_forward_pass(inputs: Inputs, attrs: Any) -> dict[str, Array]:
    """With few keys and many masked, many rows are masked whole; the gradient passes all the same."""
    exact = in_float64(inputs)
    expected = by_autograd(exact, attrs["scale_value"], passing=True)
    inputs.update(exact)
    return expected


def in_float64(inputs: Inputs) -> Inputs:
    """Operands in float64, a mask in bools."""
    return {
        name: None if array is None else array.astype(bool if name == "atten_mask" else np.float64)
        for name, array in inputs.items()
    }


# P renormalised, or delta from a recomputed output, would show: operands are drawn one by one.
TestFormula = against(RECORD, as_given, count=400)
TestAgainstTorch = pytest.mark.torch(against(RECORD, of_the_forward_pass, count=60))


@pytest.mark.torch
def test_masked_fill_differs_in_the_score_gradients_of_rows_masked_whole_alone() -> None:
    for seed in range(10):
        inputs = make(masked=0.5, seed=seed)
        operand(inputs, "atten_mask")[..., seed] = False
        expected = by_autograd(inputs, 0.25, passing=False)
        assert_close(run(inputs), expected)
    inputs = make(masked=0.5)
    operand(inputs, "atten_mask")[:, :, 3] = True
    stopped = by_autograd(inputs, 0.25, passing=False)
    passed = by_autograd(inputs, 0.25, passing=True)
    found = run(inputs)
    assert_close(found, passed)
    for name in ("dv1", "dv2"):
        np.testing.assert_allclose(found[name], stopped[name], rtol=1e-11, atol=1e-11)
    for name in ("dq", "dk1", "dk2"):
        assert np.max(np.abs(found[name] - stopped[name])) > 0.01, name


def test_only_the_first_of_each_eight_statistics_counts() -> None:
    inputs = make()
    expected = run(inputs)
    for name in ("softmax_max", "softmax_sum"):
        operand(inputs, name)[..., 1:] = math.nan
    assert_same_bits(run(inputs), expected)


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e-30], ids=str)
def test_masked_scores_are_replaced_after_scaling(scale: float) -> None:
    inputs = make(masked=0.5)
    operand(inputs, "atten_mask")[..., 0] = False
    operand(inputs, "atten_mask")[..., 1] = True
    found = run(inputs, scale)
    assert_close(found, by_einsum(inputs, scale))
    assert not np.any(found["dv1"][:, :, :, 1])
    assert np.any(found["dv1"][:, :, :, 0])


def test_a_row_masked_whole_is_uniform() -> None:
    inputs = make(b=1, h=1, n=2, m=3, k=4, d=8)
    inputs["atten_mask"] = np.ones((1, 1, 2, 1, 4), np.uint8)
    inputs["softmax_max"] = np.full((1, 1, 2, 3, 8), -FLT_MAX, np.float32)
    inputs["softmax_sum"] = np.full((1, 1, 2, 3, 8), 4, np.float32)
    found = run(inputs)
    expected = np.broadcast_to(operand(inputs, "dy").sum(axis=3, keepdims=True) / 4, (1, 1, 2, 4, 8))
    np.testing.assert_allclose(found["dv1"], expected, rtol=1e-12, atol=1e-12)
    assert np.all(np.abs(found["dq"]) > 0)


def test_any_byte_but_zero_masks() -> None:
    inputs = make(masked=0.4)
    expected = run(inputs)
    for one in (1, 2, 255):
        as_bytes = operand(inputs, "atten_mask").astype(np.uint8) * np.uint8(one)
        assert_same_bits(run({**inputs, "atten_mask": as_bytes}), expected)


class TestOfficialExample:
    """All ones, maximum and sum 3, scale 1 / sqrt(128): no forward pass, and beyond float16."""

    @staticmethod
    def example(number: int, size: int, dtype: npt.DTypeLike = np.float64) -> dict[str, Array]:
        """The example's corner of 16 x size x size scores, to save time."""
        filled = RECORD.workloads.examples[number].make()
        cut = {"key1": (16, size), "value1": (16, size), "key2": (size, size), "value2": (size, size)}
        inputs: Inputs = {}
        for name, array in filled.operands.items():
            assert array is not None
            one, other = cut.get(name, (16, size))
            inputs[name] = array[:, :, :one, : 1 if name == "atten_mask" else other]
        inputs["atten_mask"] = operand(inputs, "atten_mask")[..., :size]
        return run(inputs, filled.attrs["scale_value"], dtype)

    def test_intended(self) -> None:
        found = self.example(1, 64, np.float32)
        # All are sums of 256 equal terms; here over 16 for dk2 and dv2, and over 64 for the others.
        whole = {"dq": 6.45e11, "dk1": 3.23e11, "dv1": 2.85e10, "dk2": 3.23e11, "dv2": 2.85e10}
        for name, total in whole.items():
            value = total * (16 if name.endswith("2") else 64) / 256
            assert found[name].min() == found[name].max()
            assert found[name].max() == pytest.approx(value, rel=5e-3), name

    def test_literal_overflows_float16_at_odd_positions_only(self) -> None:
        for name, array in self.example(0, 16, np.float16).items():
            assert np.all(np.isposinf(array[..., 1::2])), name
            assert not np.any(array[..., ::2]), name

    def test_literal_scores(self) -> None:
        found = self.example(0, 16)
        # 16 rows of dy = 1.875 times P = exp(39.77 - 3) / 3 = 3.1e15.
        assert found["dv1"][..., 1::2].max() == pytest.approx(16 * 1.875 * 3.1e15, rel=0.01)
        assert found["dk1"][..., 1::2].max() == pytest.approx(16 * 1.875 * 7e17 * 128**-0.5, rel=0.02)


@pytest.mark.parametrize("name", ["query", "key1", "value2", "dy", "softmax_max", "softmax_sum"])
def test_what_is_not_finite_is_computed_without_a_warning(name: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        inputs = make(masked=0.3)
        operand(inputs, name)[0, 1, 2, 3] = value
        with np.errstate(all="ignore"):
            expected = by_einsum(inputs, 0.25)
        found = run(inputs)
        assert_close(found, expected)
        assert np.isfinite(found["dq"][1]).all()


def test_a_masked_score_is_replaced_even_if_nan() -> None:
    inputs = make(masked=0.0)
    operand(inputs, "atten_mask")[..., 4] = True
    operand(inputs, "key1")[:, :, :, 4, 0] = math.nan
    found = run(inputs)
    assert not np.any(found["dv1"][:, :, :, 4])
    assert np.isfinite(found["dv2"]).all()


def test_a_score_far_above_the_maximum_is_infinite() -> None:
    inputs = make()
    operand(inputs, "softmax_max")[...] = -1e4
    inputs["dy"] = np.abs(operand(inputs, "dy"))
    assert np.isposinf(run(inputs)["dv1"]).all()
