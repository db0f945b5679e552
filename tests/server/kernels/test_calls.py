"""How calls are handed to C, and how numbers of 16 bits become float32 and back there."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.server.kernels.compare import Array, assert_right, assert_same_bits, computed, outputs_for

from npugrad import OPERATORS
from npugrad.dtypes import DType, dtype_from_name
from npugrad.meta import CallMeta
from npugrad.operator import AttrParam
from npugrad_server.backends.cpu.calls import Block, Layout, _data_of
from npugrad_server.backends.cpu.kernels import Kernels

NORM = OPERATORS["group_norm_backward"]


def _made(dtype: DType = DType.FLOAT32, seed: int = 1) -> tuple[CallMeta, dict[str, Any]]:
    call = NORM.build(dtype=dtype, n=2, c=6, hxw=300, group=3)
    return call, NORM.make_inputs(call, np.random.default_rng(seed))


def test_a_call_may_start_another_while_it_is_polled(kernels: Kernels) -> None:
    call, inputs = _made()
    inner_call, inner_inputs = _made(DType.BFLOAT16, seed=2)
    found: list[dict[str, Any]] = []

    def asked() -> None:
        if not found:
            found.append(computed(kernels, NORM, inner_call, inner_inputs))

    outputs = outputs_for(NORM, call)
    kernels.run(NORM, inputs, call.attrs, outputs, asked)
    assert_right(NORM, call, inputs, outputs)
    assert_right(NORM, inner_call, inner_inputs, found[0])


def test_calls_at_once_are_polled_by_their_own_function(kernels: Kernels) -> None:
    call, inputs = _made()
    both = threading.Barrier(2, timeout=20)
    met: dict[str, BaseException] = {}

    def run(name: str) -> None:
        def asked() -> None:
            both.wait()
            raise KeyError(name)

        try:
            kernels.run(NORM, inputs, call.attrs, outputs_for(NORM, call), asked)
        except KeyError as error:
            met[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: error.args for name, error in met.items()} == {"a": ("a",), "b": ("b",)}


def test_an_operand_inside_another_array_is_found_there(kernels: Kernels) -> None:
    call, inputs = _made()
    wide = np.full((4, *inputs["input"].shape), np.nan, np.float32)
    wide[2] = inputs["input"]
    assert_same_bits(
        computed(kernels, NORM, call, {**inputs, "input": wide[2]}), computed(kernels, NORM, call, inputs)
    )


def test_calls_that_share_blocks_are_computed_as_if_they_had_their_own(kernels: Kernels) -> None:
    call, _ = _made()
    spare: list[Block] = []
    for seed in range(3):
        inputs, outputs = _made(seed=seed)[1], outputs_for(NORM, call)
        kernels.run(NORM, inputs, call.attrs, outputs, lambda: None, spare=spare)
        assert_same_bits(outputs, computed(kernels, NORM, call, inputs))
        assert len(spare) == 1


def test_threads_that_share_blocks_take_one_each(kernels: Kernels) -> None:
    call, _ = _made()
    spare: list[Block] = []
    rounds = 50
    found: dict[int, list[dict[str, Any]]] = {}

    def run(seed: int) -> None:
        inputs = _made(seed=seed)[1]
        found[seed] = [outputs_for(NORM, call) for _ in range(rounds)]
        for outputs in found[seed]:
            kernels.run(NORM, inputs, call.attrs, outputs, lambda: None, spare=spare)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(spare) <= len(threads)
    for seed, results in found.items():
        right = computed(kernels, NORM, call, _made(seed=seed)[1])
        for outputs in results:
            assert_same_bits(outputs, right)


def test_a_block_takes_only_arrays_like_those_before(kernels: Kernels) -> None:
    call, inputs = _made()
    spare: list[Block] = []
    kernels.run(NORM, inputs, call.attrs, outputs_for(NORM, call), spare=spare)
    for other in (None, inputs["input"][:1], inputs["input"].view(np.int32), inputs["input"].T):
        blocks = list(spare)
        with pytest.raises(ValueError, match="found input of another type, shape or strides"):
            kernels.run(NORM, {**inputs, "input": other}, call.attrs, outputs_for(NORM, call), spare=blocks)


def test_strides_that_c_cannot_take_are_refused(kernels: Kernels) -> None:
    call, inputs = _made()
    outputs = outputs_for(NORM, call)
    packed = np.zeros(inputs["input"].size * 6 + 6, np.uint8)
    odd = np.ndarray(inputs["input"].shape, np.float32, packed, 0, (1800 * 6, 300 * 6, 6))
    for array in (inputs["input"][..., ::-1], odd):
        with pytest.raises(ValueError, match="found strides that are negative or no multiple"):
            kernels.run(NORM, {**inputs, "input": array}, call.attrs, outputs)


def test_the_address_of_any_array_is_where_its_data_lie() -> None:
    whole = np.zeros((4, 6, 8), np.float32)
    frozen = whole.copy()
    frozen.flags.writeable = False
    shared = np.frombuffer(memoryview(bytearray(64)), np.uint8)
    for array in (whole, whole[1:, ::2, 3:], frozen, frozen[2], np.zeros((0, 3)), np.array(1.0), shared):
        assert _data_of(array) == array.ctypes.data


def test_attributes_come_in_three_lists_and_arrays_in_place() -> None:
    kinds = {
        "a": "int8",
        "b": "int64_array",
        "c": "double",
        "d": "float_array",
        "e": "bool_array",
        "f": "int32",
        "g": "float",
    }
    params = tuple(AttrParam(name=n, c_name=n, type=kind, doc="One.") for n, kind in kinds.items())  # type: ignore[arg-type]
    layout = Layout(replace(NORM, params=params))
    attrs = {"a": -1, "b": (2, 3), "c": 0.5, "d": (1.5, 2.5), "e": (True, False), "f": 4, "g": 0.25}
    assert layout.integers(attrs) == [-1, 2, 3, 4]
    assert layout.reals(attrs) == [0.5, 1.5, 2.5, 0.25]
    assert layout.bools(attrs) == b"\1\0"
    null = {**attrs, "b": None, "d": None, "e": None}
    assert (layout.integers(null), layout.reals(null), layout.bools(null)) == ([-1, 4], [0.5, 0.25], b"")


@pytest.mark.parametrize("kind", ["uint64", "scalar", "string"])
def test_an_attribute_that_kernels_are_not_given_is_no_silent_loss(kind: Any) -> None:
    params = (AttrParam(name="a", c_name="a", type=kind, doc="One."),)
    with pytest.raises(TypeError, match="group_norm_backward: found an attribute of a kind"):
        Layout(replace(NORM, params=params))


# -------------------------------------------------------------------------------- numbers of 16 bits


NARROW = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
F32 = np.dtype(np.float32)


def convert(kernels: Kernels, source: Array, target: Array, count: int) -> None:
    numbers = [dtype_from_name(array.dtype).acl for array in (source, target)]
    status = kernels.functions.npugrad_probe_convert(
        source.ctypes.data, numbers[0], target.ctypes.data, numbers[1], count
    )
    assert status == 0


def converted(kernels: Kernels, source: Array, dtype: np.dtype[Any]) -> Array:
    target = np.empty(source.shape, dtype)
    convert(kernels, source, target, source.size)
    return target


def every_pattern(dtype: np.dtype[Any]) -> Array:
    return np.arange(65536, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_pattern_widens_exactly(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    source = every_pattern(dtype)
    found, expected = converted(kernels, source, F32), source.astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(nan, np.isnan(found))
    assert np.array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))
    assert np.array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_pattern_comes_back_and_a_nan_stays_one_with_its_payload(
    kernels: Kernels, dtype: np.dtype[Any]
) -> None:
    source = every_pattern(dtype)
    back = converted(kernels, converted(kernels, source, F32), dtype).view(np.uint16)
    quiet = np.where(np.isnan(source.astype(np.float32)), 0x200 if dtype == np.float16 else 0x40, 0)
    if dtype != np.float16:
        # A widened bfloat16 is the same NaN, so the quiet bit comes with the way back.
        assert np.isnan(back.view(dtype).astype(np.float32)).sum() == (quiet > 0).sum()
    assert np.array_equal(back, source.view(np.uint16) | quiet.astype(np.uint16))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrowing_rounds_to_nearest_even(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    """Every number of the type, the middle to the next one, and the floats beside that middle."""
    wide = np.sort(every_pattern(dtype).astype(np.float32))
    wide = wide[np.isfinite(wide)]
    middle = ((wide[:-1].astype(np.float64) + wide[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(sign * np.inf)) for sign in (1, -1)]
    # 65520 is halfway between the largest float16 and what would come next.
    bounds = np.array([65519.996, 65520, 65536, 1e-45, 0.0, np.inf, np.finfo(np.float32).max], np.float32)
    beyond = np.concatenate([bounds, -bounds])
    source = np.concatenate([wide, middle, *beside, beyond])
    with np.errstate(over="ignore", under="ignore"):
        expected = source.astype(dtype)
    found = converted(kernels, source, dtype)
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_ends_of_any_length_touch_nothing_else(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    source = np.arange(1, 65, dtype=np.float32)
    for count in range(35):
        target = np.full(64, 7, dtype)
        convert(kernels, source, target, count)
        assert np.array_equal(target[:count].astype(np.float32), source[:count]), count
        assert (target[count:].astype(np.float32) == 7).all(), count
