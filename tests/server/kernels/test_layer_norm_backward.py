"""The LayerNorm kernel: sizes at the bounds of its blocks and chunks, mixed types, overflow of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.operators import LAYER_NORM as RECORD
from tests.server.kernels.compare import DTYPES, assert_not_finite_alike, assert_right, computed, golden

from npugrad.dtypes import DType
from npugrad_server.backends.cpu.kernels import Kernels

# Rows around those at once (2 or 4) and a block (32) of them; columns around vectors (4 to 16), a block
# of theirs (512 to 2048) and a chunk (16384).
ROWS = (1, 3, 5, 31, 33, 70)
COLUMNS = (1, 3, 15, 17, 33, 511, 2049)
CHUNKS = ((1, 16384), (2, 16385), (33, 16384 + 7), (3, 40_000))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
def test_sizes_at_the_bounds(kernels: Kernels, rows: int, columns: int) -> None:
    _check(kernels, leading=(rows,), normalized=(columns,))


@pytest.mark.parametrize(("rows", "columns"), CHUNKS)
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)], ids=str)
def test_long_rows_go_by_chunks(kernels: Kernels, rows: int, columns: int, mask: Any) -> None:
    _check(kernels, leading=(rows,), normalized=(columns,), output_mask=mask)


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("is_mixed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_types_may_be_mixed(kernels: Kernels, dtype: DType, is_mixed: bool, with_weight: bool) -> None:
    _check(
        kernels, dtype=dtype, leading=(9, 5), normalized=(7, 6), is_mixed=is_mixed, with_weight=with_weight
    )


@pytest.mark.parametrize("offset_bytes", [0, 4, 16, 28, 32, 48, 60])
def test_large_results_are_whole_wherever_they_begin(kernels: Kernels, offset_bytes: int) -> None:
    """From 16 MiB they bypass the cache in whole lines; before the first may be more than a vector."""
    call = RECORD.build(leading=(5500,), normalized=(768,))
    inputs = RECORD.make_inputs(call, np.random.default_rng(4))
    expected = computed(kernels, RECORD, call, inputs)
    name = RECORD.outputs[0].name
    size = expected[name].nbytes
    memory = np.full(size + 128, 0xA5, np.uint8)
    begin = -memory.ctypes.data % 64 + offset_bytes
    results = {**expected, name: memory[begin : begin + size].view(np.float32).reshape(5500, 768)}
    kernels.run(RECORD, inputs, call.attrs, results)
    assert_right(RECORD, call, inputs, results)


def _check(kernels: Kernels, **sizes: Any) -> None:
    call = RECORD.build(**sizes)
    inputs = RECORD.make_inputs(call, np.random.default_rng(4))
    assert_right(RECORD, call, inputs, computed(kernels, RECORD, call, inputs))


@pytest.mark.parametrize("value", [1e38, 3e38, np.inf, np.nan])
@pytest.mark.parametrize("operand", ["grad_out", "input", "weight", "rstd"])
def test_where_float32_overflows_float64_decides(kernels: Kernels, operand: str, value: float) -> None:
    call = RECORD.build(leading=(37,), normalized=(40,))
    inputs = RECORD.make_inputs(call, np.random.default_rng(4))
    array = inputs[operand]
    assert array is not None
    array.reshape(-1)[::7] = value
    with np.errstate(all="ignore"):
        expected = {n: a.astype(np.float32) for n, a in golden(RECORD, call, inputs).items()}
    assert_not_finite_alike(computed(kernels, RECORD, call, inputs), expected)


def test_columns_of_opposite_infinities_are_no_numbers_and_others_stay(kernels: Kernels) -> None:
    call = RECORD.build(leading=(64,), normalized=(20,))
    inputs = RECORD.make_inputs(call, np.random.default_rng(4))
    clean = computed(kernels, RECORD, call, inputs)
    grad_out = inputs["grad_out"]
    assert grad_out is not None
    grad_out[3, 5], grad_out[60, 5] = np.inf, -np.inf
    found = computed(kernels, RECORD, call, inputs)
    assert np.isnan(found["grad_bias"]).nonzero()[0].tolist() == [5]
    others = np.arange(20) != 5
    assert found["grad_bias"][others].tobytes() == clean["grad_bias"][others].tobytes()
