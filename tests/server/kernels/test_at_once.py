"""Calls of all operators at once, some of which nobody wants any more: what ThreadSanitizer has to see."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.server.kernels.compare import assert_same_bits, computed, outputs_for

from npugrad import OPERATORS
from npugrad.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad_server.backends.cpu.kernels import Kernels

    Array = npt.NDArray[Any]
    Made = tuple[OpRecord, CallMeta, Mapping[str, Array | None]]

# Enough tasks for all threads; of deformable attention also levels that overlap, which have another way.
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("multi_scale_deformable_attention_grad", dict(bs=2, nq=150, nh=4, ch=16, levels=((24, 30), (7, 9)))),
    ("multi_scale_deformable_attention_grad", dict(bs=1, nq=1200, nh=1, ch=32, levels=((50, 60),))),
    ("grid_sampler_2d_backward", dict(n=1, c=40, h=50, w=60, oh=45, ow=52)),
    ("grid_sampler_2d_backward", dict(n=5, c=3, h=60, w=50, oh=40, ow=52)),
    ("group_norm_backward", dict(n=4, c=24, hxw=2053, group=3)),
    ("group_norm_backward", dict(n=1, c=2, hxw=70_001, group=1)),
    ("fused_floyd_attention_grad", dict(h=2, n=40, m=36, k=70, d=16, with_mask=True)),
    ("fused_floyd_attention_grad", dict(n=20, m=70, k=130, d=32)),
]
DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


class _Gone(Exception):
    """Nobody waits for the call."""


def _made() -> list[Made]:
    found: list[Made] = []
    for (name, sizes), dtype in zip(CALLS, itertools.cycle(DTYPES), strict=False):
        record = OPERATORS[name]
        call = record.build(dtype=dtype, **sizes)
        found.append((record, call, record.make_inputs(call, np.random.default_rng(len(found)))))
    record, call, inputs = found[0]
    starts = inputs["level_start_index"]
    assert starts is not None
    found.append((record, call, {**inputs, "level_start_index": starts // 2}))
    return found


def _leaver(asks: int) -> Callable[[], None]:
    """Wants the call until it is asked for the `asks`-th time."""
    left = itertools.count(asks - 1, -1)

    def check_wanted() -> None:
        if not next(left):
            raise _Gone

    return check_wanted


@pytest.mark.parametrize("threads", [1, 3])
def test_calls_beside_calls_that_are_given_up_keep_their_bits(
    make_kernels: Callable[[int], Kernels], threads: int
) -> None:
    kernels = make_kernels(threads)
    made = _made()
    alone = [computed(kernels, *one) for one in made]

    def call_all(caller: int) -> int:
        given_up = 0
        for turn in range(2 * len(made)):
            index = (turn * (caller + 1) + caller) % len(made)
            record, call, inputs = made[index]
            outputs = outputs_for(record, call)
            leaves = (turn + caller) % 3 == 0
            try:
                kernels.run(record, inputs, call.attrs, outputs, _leaver(1 + turn % 2) if leaves else None)
            except _Gone:
                given_up += 1
            else:
                assert_same_bits(outputs, alone[index])
        return given_up

    with ThreadPoolExecutor(5) as callers:
        given_up = list(callers.map(call_all, range(5)))
    assert min(given_up) >= 2
    for one, expected in zip(made, alone, strict=True):
        assert_same_bits(computed(kernels, *one), expected)
