"""The GroupNorm reference against torch float64, the official example, and other layouts and budgets."""

from __future__ import annotations

import tracemalloc
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from npugrad.references.group_norm_backward import reference

torch = pytest.importorskip("torch")

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
NAMES = ("grad_input", "grad_gamma", "grad_beta")


class Case(NamedTuple):
    inputs: dict[str, npt.NDArray[Any] | None]
    attrs: dict[str, Any]

    def run(self, names: tuple[str, ...] = NAMES, dtype: str = "float64", **options: int) -> Arrays:
        """Run the reference into outputs full of NaN, so that an element left alone shows."""
        data, gamma = self.inputs["input"], self.inputs["gamma"]
        assert data is not None
        channels = (self.attrs["c"],) if gamma is None else gamma.shape
        shapes = {"grad_input": data.shape, "grad_gamma": channels, "grad_beta": channels}
        outputs: Arrays = {name: np.full(shapes[name], np.nan, dtype) for name in names}
        reference(self.inputs, self.attrs, outputs, **options)
        return outputs


def make_case(
    n: int, c: int, hxw: int, group: int, seed: int = 0, has_gamma: bool = True, dtype: str = "float64"
) -> Case:
    """Draw operands; mean and rstd have nothing to do with the input."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> npt.NDArray[Any]:
        return np.asarray(rng.standard_normal(shape)).astype(dtype)

    inputs: dict[str, npt.NDArray[Any] | None] = {
        "grad_out": draw(n, c, hxw),
        "input": draw(n, c, hxw),
        "mean": draw(n, group),
        "rstd": np.abs(draw(n, group)) + np.asarray(0.1, dtype),
        "gamma": draw(c) if has_gamma else None,
    }
    return Case(inputs, {"n": n, "c": c, "hxw": hxw, "group": group, "output_mask": (True, True, True)})


def random_sizes(count: int) -> list[Any]:
    """Draw sizes from 1, M = 1 and null gamma included, each with a readable id."""
    rng = np.random.default_rng(20)
    cases = []
    for seed in range(count):
        n, group, per_group, hxw = (int(size) for size in rng.choice([1, 1, 2, 3, 5, 8], 4))
        has_gamma = bool(rng.random() < 0.75)
        name = f"n{n}-c{group * per_group}-l{hxw}-g{group}-{'gamma' if has_gamma else 'null'}-{seed}"
        cases.append(pytest.param(n, group * per_group, hxw, group, seed, has_gamma, id=name))
    return cases


def assert_close(actual: Arrays, expected: Arrays, tolerance: float = 1e-11) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        scale = 1 + np.abs(want).max(initial=0)
        np.testing.assert_allclose(actual[name], want, rtol=0, atol=tolerance * scale, err_msg=name)


def assert_same_bits(actual: Arrays, expected: Arrays) -> None:
    assert {name: array.tobytes() for name, array in actual.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


@pytest.mark.parametrize(("n", "c", "hxw", "group", "seed", "has_gamma"), random_sizes(200))
def test_matches_native_op_with_arbitrary_statistics(
    n: int, c: int, hxw: int, group: int, seed: int, has_gamma: bool
) -> None:
    case = make_case(n, c, hxw, group, seed, has_gamma)
    names = ("grad_out", "input", "mean", "rstd", "gamma")
    operands = [torch.from_numpy(array) for array in map(case.inputs.get, names) if array is not None]
    if not has_gamma:  # torch's own null gives no gradients of gamma and beta at all
        operands.append(torch.ones(c, dtype=torch.float64))
    grads = torch.ops.aten.native_group_norm_backward(*operands, n, c, hxw, group, [True, True, True])
    assert_close(case.run(), {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)})


@pytest.mark.parametrize(("n", "c", "hxw", "group", "seed", "has_gamma"), random_sizes(150))
def test_matches_autograd_of_the_definition(
    n: int, c: int, hxw: int, group: int, seed: int, has_gamma: bool
) -> None:
    case = make_case(n, c, hxw, group, seed, has_gamma)
    data = torch.from_numpy(case.inputs["input"]).requires_grad_()
    gamma = torch.from_numpy(case.inputs["gamma"]) if has_gamma else torch.ones(c, dtype=torch.float64)
    gamma.requires_grad_()
    beta = torch.zeros(c, dtype=torch.float64, requires_grad=True)
    grouped = data.reshape(n, group, -1)
    mean = grouped.mean(-1, keepdim=True)
    rstd = (((grouped - mean) ** 2).mean(-1, keepdim=True) + 1e-5) ** -0.5
    normalized = ((grouped - mean) * rstd).reshape(n, c, hxw)
    out = normalized * gamma[:, None] + beta[:, None]
    grads = torch.autograd.grad(out, [data, gamma, beta], torch.from_numpy(case.inputs["grad_out"]))
    case.inputs.update(mean=mean.detach().numpy(), rstd=rstd.detach().numpy())
    # With M = 1 the variance is 0 and rstd is about 316: cancellation costs more digits there.
    expected = {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}
    assert_close(case.run(), expected, 1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_official_example(dtype: str) -> None:
    ramp = np.arange(1, 25).reshape(2, 3, 4)
    case = Case(
        {
            "grad_out": ramp.astype(dtype),
            "input": ramp.astype(dtype),
            "mean": np.array([6.5, 18.5]).astype(dtype),
            "rstd": np.full(2, 0.2896827),
            "gamma": np.ones(3).astype(dtype),
        },
        {"n": 2, "c": 3, "hxw": 4, "group": 1, "output_mask": (True, True, True)},
    )
    grads = case.run()
    np.testing.assert_allclose(grads["grad_gamma"], [-75.896867, 2.896827, 155.849293], atol=5e-7)
    np.testing.assert_array_equal(grads["grad_beta"], [68, 100, 132])
    sample = np.linspace(-3.27e-7, 3.27e-7, 12)
    np.testing.assert_allclose(grads["grad_input"].reshape(2, 12), [sample, sample], atol=2e-9)


def test_reads_only_what_the_wanted_outputs_need() -> None:
    case = make_case(2, 6, 5, 3)
    full = case.run(("grad_beta",))
    del case.inputs["input"]
    grads = {"grad_beta": np.full(6, np.nan)}
    reference(case.inputs, case.attrs, grads)
    assert_same_bits(grads, full)


def test_shapes_need_only_the_right_counts() -> None:
    case = make_case(2, 3, 4, 1)
    flat = case.run()
    shapes = {"grad_out": (24,), "input": (2, 3, 2, 2), "mean": (2, 1, 1), "rstd": (1, 2), "gamma": (3, 1)}
    shaped = Case({name: case.inputs[name].reshape(shape) for name, shape in shapes.items()}, case.attrs)  # type: ignore[union-attr]
    grads = shaped.run()
    assert [grads[name].shape for name in NAMES] == [(2, 3, 2, 2), (3, 1), (3, 1)]
    assert_same_bits(grads, flat)


@pytest.mark.parametrize("has_gamma", [True, False], ids=["gamma", "null"])
@pytest.mark.parametrize(("n", "c", "hxw", "group"), [(0, 6, 4, 3), (2, 6, 0, 3), (2, 0, 4, 3)], ids=str)
def test_empty_data_give_zeros(n: int, c: int, hxw: int, group: int, has_gamma: bool) -> None:
    grads = make_case(n, c, hxw, group, has_gamma=has_gamma).run()
    assert [grads[name].shape for name in NAMES] == [(n, c, hxw), (c,), (c,)]
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("scratch_bytes", [2**28, 200], ids=["whole", "split"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", ["grad_out", "input"])
def test_non_finite_data_stay_in_group_and_channel(operand: str, bad: float, scratch_bytes: int) -> None:
    case = make_case(2, 6, 5, 3)
    clean = case.run(scratch_bytes=scratch_bytes)
    data = case.inputs[operand]
    assert data is not None
    data[1, 2, 3] = bad  # channels 2 and 3 are group 1
    with np.errstate(all="raise"):
        grads = case.run(scratch_bytes=scratch_bytes)
    touched = np.zeros((2, 6, 5), bool)
    touched[1, 2:4] = True
    np.testing.assert_array_equal(np.isfinite(grads["grad_input"]), ~touched)
    np.testing.assert_array_equal(grads["grad_input"][~touched], clean["grad_input"][~touched])
    finite = np.isfinite(grads["grad_gamma"])
    np.testing.assert_array_equal(finite, np.arange(6) != 2)
    np.testing.assert_array_equal(grads["grad_gamma"][finite], clean["grad_gamma"][finite])
    assert np.isfinite(grads["grad_beta"][2]) == (operand == "input")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_overflow_becomes_infinity_without_a_warning(dtype: str) -> None:
    case = make_case(1, 2, 3, 1)
    case.inputs["grad_out"] = np.full((1, 2, 3), 1e39)
    grads = case.run(dtype=dtype)
    np.testing.assert_array_equal(grads["grad_beta"].astype(np.float64), [np.inf, np.inf])


def test_expanded_gradient_is_never_blown_up() -> None:
    n, c, hxw, group = 4, 8, 40_000, 2
    case = make_case(n, c, hxw, group, dtype="float32")
    case.inputs["grad_out"] = np.broadcast_to(np.ones((), ml_dtypes.bfloat16), (n, c, hxw))
    tracemalloc.start()
    try:
        reference(case.inputs, case.attrs, {"grad_beta": (grad_beta := np.empty(c))}, scratch_bytes=2**18)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= 2**18
    np.testing.assert_array_equal(grad_beta, np.full(c, n * hxw))
