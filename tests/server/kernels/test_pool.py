"""Threads, tasks, cancellation and scratch memory of the kernels; what ThreadSanitizer has to see."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.derived import FLOATS, longer
from tests.server.kernels.compare import Array, assert_same_bits, computed, outputs_for
from tests.server.kernels.driven import driver_command

from npugrad import OPERATORS
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad_server.backends.cpu.kernels import Kernels, _Body, _Call, _Poll

NORM = OPERATORS["group_norm_backward"]
OK, CANCELLED = 0, 1
Made = tuple[OpRecord, CallMeta, Mapping[str, Array | None]]


def run_tasks(
    kernels: Kernels, tasks: int, body: Callable[[int, int], None], poll: Callable[[], int] | None = None
) -> int:
    function = _Body(lambda _, task, slot: body(task, slot))
    asked = _Poll(lambda _: poll()) if poll else _Poll()
    call = _Call(None, None, None, None, 0, 0, 0, 0, asked, None)
    return int(
        kernels.functions.npugrad_probe_tasks(kernels.context, ctypes.byref(call), tasks, function, None)
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_task_runs_once_in_a_slot_of_its_own(
    make_kernels: Callable[[int], Kernels], threads: int
) -> None:
    kernels = make_kernels(threads)
    assert kernels.threads == threads
    seen: list[int] = []
    slots: set[int] = set()

    def body(task: int, slot: int) -> None:
        assert slot not in slots
        slots.add(slot)
        seen.append(task)
        slots.remove(slot)

    for tasks in (0, 1, 2, 1000):
        seen.clear()
        assert run_tasks(kernels, tasks, body) == OK
        assert sorted(seen) == list(range(tasks))


def test_the_other_threads_take_part(kernels: Kernels) -> None:
    both = threading.Barrier(2, timeout=20)
    met: set[int] = set()

    def body(task: int, slot: int) -> None:
        both.wait()
        met.add(slot)

    assert run_tasks(kernels, 2, body) == OK
    assert met == {0, 1}


def test_calls_at_once_share_the_threads(make_kernels: Callable[[int], Kernels]) -> None:
    kernels = make_kernels(2)
    lock = threading.Lock()
    running, most, done = 0, 0, 0

    def body(task: int, slot: int) -> None:
        nonlocal running, most, done
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1
            done += 1

    with ThreadPoolExecutor(5) as callers:
        statuses = list(callers.map(lambda _: run_tasks(kernels, 200, body), range(5)))
    assert statuses == [OK] * 5
    assert done == 1000
    assert most <= kernels.threads


def test_a_call_nobody_wants_ends_between_tasks(kernels: Kernels) -> None:
    done: list[int] = []
    assert (
        run_tasks(kernels, 100_000, lambda task, _: done.append(task), lambda: len(done) >= 10) == CANCELLED
    )
    assert 10 <= len(done) < 100_000
    # It left nothing behind.
    again: list[int] = []
    assert run_tasks(kernels, 50, lambda task, _: again.append(task)) == OK
    assert len(again) == 50


def test_scratch_memory_is_aligned_and_never_shared(kernels: Kernels) -> None:
    for nbytes in (1, 64, 5000, 3 * 2**20, 9 * 2**20):
        for _ in range(3):
            assert kernels.functions.npugrad_probe_scratch(kernels.context, nbytes, 5) == OK, nbytes


def test_scratch_memory_is_kept_up_to_its_bound(library: Path) -> None:
    with closing(Kernels(1, library, scratch_bytes=2**20)) as kernels:
        assert kernels.kept_bytes == 0
        kernels.functions.npugrad_probe_scratch(kernels.context, 100_000, 4)
        kept = kernels.kept_bytes
        assert 400_000 <= kept <= 2**20
        kernels.functions.npugrad_probe_scratch(kernels.context, 100_000, 4)
        assert kernels.kept_bytes == kept, "the second call reuses what the first one left"
        kernels.functions.npugrad_probe_scratch(kernels.context, 700_000, 4)
        assert 0 < kernels.kept_bytes <= 2**20
    kernels.close()  # once more is no mistake


def test_small_scratch_memory_is_used_again(library: Path) -> None:
    for nbytes in (0, 1, 64, 4096, 5000):
        with closing(Kernels(1, library)) as kernels:
            kernels.functions.npugrad_probe_scratch(kernels.context, nbytes, 3)
            kept = kernels.kept_bytes
            for _ in range(20):
                assert kernels.functions.npugrad_probe_scratch(kernels.context, nbytes, 3) == OK, nbytes
            assert kernels.kept_bytes == kept, nbytes


def test_too_much_scratch_memory_is_an_answer(kernels: Kernels) -> None:
    no_memory = 4
    assert kernels.functions.npugrad_probe_scratch(kernels.context, 2**62, 1) == no_memory


@pytest.mark.skipif(
    "LD_PRELOAD" in os.environ or bool(driver_command()),
    reason="neither a sanitizer's runtime nor a driver survives a fork with threads",
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_threads_of_its_own(kernels: Kernels) -> None:
    call = NORM.build(n=2, c=8, hxw=5000, group=1)
    inputs = NORM.make_inputs(call, np.random.default_rng(0))
    expected = computed(kernels, NORM, call, inputs)
    child = os.fork()
    if not child:
        try:
            assert_same_bits(computed(kernels, NORM, call, inputs), expected)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert_same_bits(computed(kernels, NORM, call, inputs), expected)


# ------------------------------------------------------------------------- calls of all operators at once


class _Gone(Exception):
    """Nobody waits for the call."""


def _made(kernels: Kernels) -> list[Made]:
    """Calls of every operator; also with tables of integers halved, which for some is another way."""
    found: list[Made] = []
    # Enough tasks for all threads.
    long = [derived for record in OPERATORS.values() for derived in longer(record, 2**15, 2)[::2]]
    for derived, dtype in zip(long, itertools.cycle(FLOATS), strict=False):
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
