"""Sums of very many equal terms into one element, which float32 alone loses the digits of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.operators import MSDA
from tests.server.kernels.compare import Array, Inputs, computed, given_array, golden

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad_server.backends.cpu.kernels import Kernels

TERM = float(np.float32(0.1))
NORM = {"grad_out": TERM, "input": 1.0, "mean": 0.0, "rstd": 1.0}
SAMPLED = {"grad_output": TERM, "grid": 5.0}


def _points_2d(mode: int, count: int) -> dict[str, Any]:
    rows = {"n": 1, "c": 2, "h": 8, "w": 8, "oh": 1024, "ow": count // 1024}
    return {**rows, "padding_mode": 1, "interpolation_mode": mode}


def _points_3d(mode: int, count: int) -> dict[str, Any]:
    rows = {"n": 1, "c": 2, "d": 4, "h": 4, "w": 4, "od": 16, "oh": 64, "ow": count // 1024}
    return {**rows, "padding_mode": 1, "interpolation_mode": mode}


def _queries(size: int, count: int) -> dict[str, Any]:
    return {"bs": 1, "nh": 1, "ch": 8, "points": 4, "levels": ((size, size),), "nq": count // 4}


def _on_a_pixel(size: int) -> dict[str, float]:
    return {"grad_output": TERM, "attn_weight": 0.5, "location": 0.5 + 0.5 * (size % 2 == 0) / size}


def _elements(samples: int | None, count: int) -> dict[str, Any]:
    n = samples or count // 4
    return {"n": n, "c": 2, "group": 1, "hxw": count // n}


def _rows(count: int) -> dict[str, Any]:
    return {"leading": (count,), "normalized": (2,)}


@dataclass(frozen=True)
class Sum:
    """A result whose elements that are not 0 are sums of equal terms.

    Attributes:
        operator: Its operator.
        sizes: Sizes of a call with so many terms.
        values: What operands are filled with.
        result: Its name.
        term: Each term.
    """

    operator: str
    sizes: Callable[[int], dict[str, Any]]
    values: dict[str, float]
    result: str
    term: float = TERM


SUMS = {
    **{
        f"{dims} {mode}": Sum(f"grid_sampler_{dims}_backward", partial(points, number), SAMPLED, "input_grad")
        for dims, points in (("2d", _points_2d), ("3d", _points_3d))
        for number, mode in enumerate(("bilinear", "nearest"))
    },
    **{
        f"attention, {name}": Sum(
            MSDA.name, partial(_queries, size), _on_a_pixel(size), "grad_value", TERM / 2
        )
        for name, size in (("one key", 1), ("one key of many", 64))
    },
    **{
        f"group norm, {result}, {name}": Sum("group_norm_backward", partial(_elements, samples), NORM, result)
        for result in ("grad_gamma", "grad_beta")
        for name, samples in (("large maps", 4), ("many samples", None))
    },
    **{
        f"layer norm, {result}": Sum("layer_norm_backward", _rows, NORM, result)
        for result in ("grad_weight", "grad_bias")
    },
}


def _made(case: Sum, count: int) -> tuple[OpRecord, CallMeta, Inputs]:
    record = OPERATORS[case.operator]
    call = record.build(**case.sizes(count))
    inputs = record.make_inputs(call, np.random.default_rng(1))
    for operand, value in case.values.items():
        given_array(inputs, operand)[...] = value
    return record, call, inputs


def _assert_exact(case: Sum, count: int, found: Array, limit: float) -> None:
    sums = found[found != 0].astype(np.float64)
    assert sums.size == (8 if case.operator == MSDA.name else 2), "one for each channel"
    assert np.abs(sums / (case.term * count) - 1).max() <= limit, sums


@pytest.mark.parametrize("count", [2**10, 2**20, pytest.param(2**22, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", SUMS)
def test_many_equal_terms_keep_their_digits(kernels: Kernels, name: str, count: int) -> None:
    record, call, inputs = _made(SUMS[name], count)
    found = computed(kernels, record, call, inputs)[SUMS[name].result]
    # Points on a pixel are summed in float32 as long as there are few.
    _assert_exact(SUMS[name], count, found, 2e-6 if count > 2**10 else 1e-5)


@pytest.mark.parametrize("count", [2**10, pytest.param(2**20, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", SUMS)
def test_they_are_exact_in_the_reference_that_a_result_is_verified_against(name: str, count: int) -> None:
    record, call, inputs = _made(SUMS[name], count)
    _assert_exact(SUMS[name], count, golden(record, call, inputs)[SUMS[name].result], 1e-9)
