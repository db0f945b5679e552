"""The GroupNorm reference against torch float64, and its own kinks: shapes that count only, groups, null."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from tests.contract.references.against import against, assert_same_bits, run

from npugrad.ops.group_norm_backward import GROUP_NORM_BACKWARD as RECORD

torch = pytest.importorskip("torch")

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
NAMES = ("grad_input", "grad_gamma", "grad_beta")


def tensors(inputs: Any, attrs: Any) -> list[Any]:
    """Operands in float64; without gamma ones, because torch's null gives no gradients of it at all."""
    n, c, hxw, group = (attrs[name] for name in ("n", "c", "hxw", "group"))
    shapes = {"grad_out": (n, c, hxw), "input": (n, c, hxw), "mean": (n, group), "rstd": (n, group)}
    given = {**inputs, "gamma": np.ones(c) if inputs["gamma"] is None else inputs["gamma"]}
    return [
        torch.from_numpy(np.array(given[name], np.float64).reshape(shape))
        for name, shape in {**shapes, "gamma": (c,)}.items()
    ]


def by_native_op(inputs: Any, attrs: Any) -> Arrays:
    """Statistics as they are given, whatever they are."""
    sizes = (attrs[name] for name in ("n", "c", "hxw", "group"))
    grads = torch.ops.aten.native_group_norm_backward(*tensors(inputs, attrs), *sizes, [True, True, True])
    return {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


def by_autograd(inputs: Any, attrs: Any) -> Arrays:
    """Differentiate the definition, and put its statistics into `inputs`."""
    gradient, data, mean, _, gamma = tensors(inputs, attrs)
    leaves = data, gamma, beta = [t.requires_grad_() for t in (data, gamma, torch.zeros_like(gamma))]
    grouped = data.reshape(*mean.shape, -1)
    mean = grouped.mean(-1, keepdim=True)
    rstd = (((grouped - mean) ** 2).mean(-1, keepdim=True) + 1e-5) ** -0.5
    out = ((grouped - mean) * rstd).reshape(data.shape) * gamma[:, None] + beta[:, None]
    grads = torch.autograd.grad(out, leaves, gradient)
    inputs.update(mean=mean.detach().numpy(), rstd=rstd.detach().numpy())
    return {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


TestArbitraryStatistics = against(RECORD, by_native_op, count=200)
# With one element in a group the variance is 0 and rstd is about 316: cancellation costs more digits there.
TestStatisticsOfTheForwardPass = against(RECORD, by_autograd, tolerance=1e-9, count=150)


def made(seed: int = 0) -> tuple[Any, Arrays]:
    """Six channels in three groups; mean and rstd have nothing to do with the input."""
    call = RECORD.build(dtype="float64", n=2, c=6, hxw=5, group=3)
    rng = np.random.default_rng(seed)
    metas = {name: meta for name, meta in call.inputs.items() if meta is not None}
    return call, {name: np.asarray(rng.standard_normal(meta.shape)) for name, meta in metas.items()}


def test_shapes_need_only_the_right_counts_and_grad_beta_only_the_gradient() -> None:
    call, inputs = made()
    flat = run(RECORD, call, inputs)
    shapes = {"grad_out": (60,), "input": (2, 6, 5, 1), "mean": (2, 3, 1), "rstd": (1, 6), "gamma": (6, 1)}
    shaped = {name: inputs[name].reshape(shape) for name, shape in shapes.items()}
    outputs = {
        name: np.full(shapes.get(like, (6, 1)), np.nan)
        for name, like in zip(NAMES, ("input", "", ""), strict=True)
    }
    RECORD.reference(shaped, call.attrs, outputs)
    assert_same_bits(outputs, flat)
    del inputs["input"]
    alone = call.with_attrs(output_mask=(False, False, True))
    assert_same_bits(run(RECORD, alone, inputs), {"grad_beta": flat["grad_beta"]})


@pytest.mark.parametrize("scratch_bytes", [2**28, 200], ids=["whole", "split"])
@pytest.mark.parametrize("operand", ["grad_out", "input"])
def test_non_finite_data_stay_in_group_and_channel(operand: str, scratch_bytes: int) -> None:
    call, inputs = made()
    clean = run(RECORD, call, inputs, scratch_bytes=scratch_bytes)
    touched = np.zeros((2, 6, 5), bool)
    touched[1, 2:4] = True
    for bad in (np.nan, np.inf, -np.inf):
        inputs[operand][1, 2, 3] = bad  # channels 2 and 3 are group 1
        with np.errstate(all="raise"):
            grads = run(RECORD, call, inputs, scratch_bytes=scratch_bytes)
        np.testing.assert_array_equal(np.isfinite(grads["grad_input"]), ~touched)
        np.testing.assert_array_equal(grads["grad_input"][~touched], clean["grad_input"][~touched])
        finite = np.isfinite(grads["grad_gamma"])
        np.testing.assert_array_equal(finite, np.arange(6) != 2)
        np.testing.assert_array_equal(grads["grad_gamma"][finite], clean["grad_gamma"][finite])
        assert np.isfinite(grads["grad_beta"][2]) == (operand == "input")
