"""The LayerNorm kernel: sizes at the bounds of its blocks and chunks, mixed types, overflow of float32."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from tests.derived import told
from tests.operators import LAYER_NORM as RECORD
from tests.server.kernels.compare import (
    DTYPES,
    Inputs,
    assert_not_finite_alike,
    assert_right,
    computed,
    given_array,
    golden,
    result_at,
)

from npugrad.meta import CallMeta
from npugrad_server.backends.cpu.kernels import Kernels

# Rows around those at once (2 or 4) and a block (32) of them; columns around vectors (4 to 16), a block
# of theirs (512 to 2048) and a chunk (16384).
ROWS = (1, 3, 5, 31, 33, 70)
COLUMNS = (1, 3, 15, 17, 33, 511, 2049)
CHUNKS = ((1, 16384), (2, 16385), (33, 16384 + 7), (3, 40_000))


def _made(**sizes: Any) -> tuple[CallMeta, Inputs]:
    call = RECORD.build(**sizes)
    return call, RECORD.make_inputs(call, np.random.default_rng(4))


def _check(kernels: Kernels, **sizes: Any) -> None:
    call, inputs = _made(**sizes)
    with told(sizes):
        assert_right(RECORD, call, inputs, computed(kernels, RECORD, call, inputs))


def test_sizes_at_the_bounds(kernels: Kernels) -> None:
    for rows, columns in itertools.product(ROWS, COLUMNS):
        _check(kernels, leading=(rows,), normalized=(columns,))


def test_long_rows_go_by_chunks(kernels: Kernels) -> None:
    masks = ((True, True, True), (True, False, False), (False, True, True))
    for (rows, columns), mask in itertools.product(CHUNKS, masks):
        _check(kernels, leading=(rows,), normalized=(columns,), output_mask=mask)


def test_types_may_be_mixed(kernels: Kernels) -> None:
    for dtype, mixed, weight in itertools.product(DTYPES, (True, False), (True, False)):
        sizes: dict[str, Any] = {"leading": (9, 5), "normalized": (7, 6)}
        _check(kernels, dtype=dtype, is_mixed=mixed, with_weight=weight, **sizes)


def test_large_results_are_whole_wherever_they_begin(kernels: Kernels) -> None:
    """From 16 MiB they bypass the cache in whole lines; before the first may be more than a vector."""
    call, inputs = _made(leading=(5500,), normalized=(768,))
    found = computed(kernels, RECORD, call, inputs)
    assert_right(RECORD, call, inputs, found)
    name = RECORD.outputs[0].name
    meta = RECORD.infer(call)[name]
    assert meta is not None
    for offset_bytes in (4, 16, 28, 32, 48, 60, 0):
        with result_at(meta, offset_bytes) as result:
            kernels.run(RECORD, inputs, call.attrs, {**found, name: result})
        assert result.tobytes() == found[name].tobytes(), offset_bytes


def test_where_float32_overflows_float64_decides(kernels: Kernels) -> None:
    for operand, value in itertools.product(
        ("grad_out", "input", "weight", "rstd"), (1e38, 3e38, np.inf, np.nan)
    ):
        call, inputs = _made(leading=(37,), normalized=(40,))
        given_array(inputs, operand).reshape(-1)[::7] = value
        with np.errstate(all="ignore"):
            expected = {n: a.astype(np.float32) for n, a in golden(RECORD, call, inputs).items()}
        with told((operand, value)):
            assert_not_finite_alike(computed(kernels, RECORD, call, inputs), expected)


def test_columns_of_opposite_infinities_are_no_numbers_and_others_stay(kernels: Kernels) -> None:
    call, inputs = _made(leading=(64,), normalized=(20,))
    clean = computed(kernels, RECORD, call, inputs)
    grad_out = given_array(inputs, "grad_out")
    grad_out[3, 5], grad_out[60, 5] = np.inf, -np.inf
    found = computed(kernels, RECORD, call, inputs)
    assert np.isnan(found["grad_bias"]).nonzero()[0].tolist() == [5]
    others = np.arange(20) != 5
    assert found["grad_bias"][others].tobytes() == clean["grad_bias"][others].tobytes()
