"""Calls of all operators at once, some of which nobody wants any more: what ThreadSanitizer has to see."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt
import pytest
from tests.derived import FLOATS, longer
from tests.server.kernels.compare import assert_same_bits, computed, outputs_for

from npugrad import OPERATORS
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad_server.backends.cpu.kernels import Kernels

Array = npt.NDArray[Any]
Made = tuple[OpRecord, CallMeta, Mapping[str, Array | None]]

# Enough tasks for all threads.
LONG = [derived for record in OPERATORS.values() for derived in longer(record, 2**15, 2)[::2]]


class _Gone(Exception):
    """Nobody waits for the call."""


def _made(kernels: Kernels) -> list[Made]:
    """Calls of every operator; also with tables of integers halved, which for some is another way."""
    found: list[Made] = []
    for derived, dtype in zip(LONG, itertools.cycle(FLOATS), strict=False):
        record, call = derived.record, derived.call(dtype)
        if record.name not in kernels.operators:
            continue
        inputs = derived.operands(call, len(found))
        found.append((record, call, inputs))
        tables = {n: a // 2 for n, a in inputs.items() if a is not None and a.dtype.kind == "i"}
        if tables:
            found.append((record, call, {**inputs, **tables}))
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
    made = _made(kernels)
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
