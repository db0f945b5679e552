"""How calls are handed to C."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.server.kernels.compare import assert_right, assert_same_bits, computed, outputs_for

from npugrad import OPERATORS
from npugrad.dtypes import DType
from npugrad.meta import CallMeta
from npugrad.operator import AttrParam
from npugrad_server.backends.cpu.calls import Block, Layout
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


def test_attributes_come_in_three_lists_and_arrays_in_place() -> None:
    kinds = {
        "a": "int8",
        "b": "int64_array",
        "c": "double",
        "d": "float_array",
        "e": "bool_array",
        "f": "int32",
    }
    params = tuple(AttrParam(name=n, c_name=n, type=kind, doc="One.") for n, kind in kinds.items())  # type: ignore[arg-type]
    layout = Layout(replace(NORM, params=params))
    attrs = {"a": -1, "b": (2, 3), "c": 0.5, "d": (1.5, 2.5), "e": (True, False), "f": 4}
    assert layout.integers(attrs) == [-1, 2, 3, 4]
    assert layout.reals(attrs) == [0.5, 1.5, 2.5]
    assert layout.bools(attrs) == b"\1\0"
    null = {**attrs, "b": None, "d": None, "e": None}
    assert (layout.integers(null), layout.reals(null), layout.bools(null)) == ([-1, 4], [0.5], b"")


@pytest.mark.parametrize("kind", ["uint64", "scalar", "string"])
def test_an_attribute_that_kernels_are_not_given_is_no_silent_loss(kind: Any) -> None:
    params = (AttrParam(name="a", c_name="a", type=kind, doc="One."),)
    with pytest.raises(TypeError, match="group_norm_backward: found an attribute of a kind"):
        Layout(replace(NORM, params=params))
