"""Sums of very many equal terms into one element, which float32 alone loses the digits of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.server.kernels.compare import Array, computed, given_array, golden

from npugrad.ops import OPERATORS
from npugrad.tolerance import compare
from npugrad_server.backends.cpu.kernels import Kernels

TERM = np.float32(0.1)
LARGEST_ERROR = 2e-6
COUNTS = (
    *(2**10, 2**20),
    *(
        pytest.param(2**power, marks=mark)
        for power, mark in ((22, pytest.mark.deep), (25, pytest.mark.large))
    ),
)
POINTS = {"n": 1, "c": 2, "padding_mode": 1}
ATTENTION = {"bs": 1, "nh": 1, "ch": 8, "points": 4}

Sized = Callable[[int], dict[str, Any]]


def _points_2d(count: int) -> dict[str, Any]:
    return {**POINTS, "h": 8, "w": 8, "oh": 1024, "ow": count // 1024}


def _points_3d(count: int) -> dict[str, Any]:
    return {
        "n": 1,
        "c": 2,
        "d": 4,
        "h": 4,
        "w": 4,
        "od": 16,
        "oh": 64,
        "ow": count // 1024,
        "padding_mode": 1,
    }


# Operator, sizes of a call with so many terms, fixed values of its operands, result, factor of its terms.
SUMS: dict[str, tuple[str, Sized, dict[str, float], str, float]] = {
    **{
        f"{dims} {mode}": (
            f"grid_sampler_{dims}_backward",
            lambda count, sized=sized, number=number: {**sized(count), "interpolation_mode": number},
            {"grad_output": TERM, "grid": 5.0},
            "input_grad",
            1.0,
        )
        for dims, sized in (("2d", _points_2d), ("3d", _points_3d))
        for number, mode in enumerate(("bilinear", "nearest"))
    },
    **{
        f"attention, {name}": (
            "multi_scale_deformable_attention_grad",
            lambda count, size=size: {**ATTENTION, "levels": ((size, size),), "nq": count // 4},
            {"grad_output": TERM, "attn_weight": 0.5, "location": 0.5 + 0.5 * (size % 2 == 0) / size},
            "grad_value",
            0.5,
        )
        for name, size in (("one key", 1), ("one key of many", 64))
    },
    **{
        f"group norm, {result}, {name}": (
            "group_norm_backward",
            sized,
            {"grad_out": TERM, "input": 1.0, "mean": 0.0, "rstd": 1.0},
            result,
            1.0,
        )
        for result in ("grad_gamma", "grad_beta")
        for name, sized in (
            ("large maps", lambda count: {"n": 4, "c": 2, "group": 1, "hxw": count // 4}),
            ("many samples", lambda count: {"n": count // 4, "c": 2, "group": 1, "hxw": 4}),
        )
    },
    **{
        f"layer norm, {result}": (
            "layer_norm_backward",
            lambda count: {"leading": (count,), "normalized": (2,)},
            {"grad_out": TERM, "input": 1.0, "mean": 0.0, "rstd": 1.0},
            result,
            1.0,
        )
        for result in ("grad_weight", "grad_bias")
    },
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", SUMS)
def test_many_equal_terms_keep_their_digits(kernels: Kernels, name: str, count: int) -> None:
    """The kernel, and the reference that it is verified against."""
    operator, sized, values, result, factor = SUMS[name]
    record = OPERATORS[operator]
    call = record.build(**sized(count))
    inputs = record.make_inputs(call, np.random.default_rng(1))
    for operand, value in values.items():
        given_array(inputs, operand)[...] = value
    expected = float(TERM) * factor * count

    def assert_exact(found: Array, limit: float) -> None:
        sums = found[found != 0].astype(np.float64)
        assert sums.size == found.shape[-1 if result == "grad_value" else found.ndim > 1]
        assert np.abs(sums / expected - 1).max() <= limit, (sums, expected)

    reference = golden(record, call, inputs)[result]
    assert_exact(reference, 1e-9)
    found = computed(kernels, record, call, inputs)[result]
    assert_exact(found, LARGEST_ERROR)
    assert compare(reference, found, record.extra_tolerance(inputs, call.attrs, result)).ok
    assert not found[reference == 0].any()
