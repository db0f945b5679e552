"""The gate that keeps calls out of gRPC while a process forks, without a fork: see `test_forks` for those."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from npugrad_client._forks import ForkGate


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def inside(gate: ForkGate, threads: ThreadPoolExecutor) -> threading.Event:
    """A thread inside the gate, which leaves when the event is set."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with gate:
            entered.set()
            assert leave.wait(60)

    threads.submit(stay)
    assert entered.wait(60)
    return leave


def test_a_fork_waits_for_who_is_inside(threads: ThreadPoolExecutor) -> None:
    gate = ForkGate(60)
    leave = inside(gate, threads)
    shut = threads.submit(gate.shut)
    assert not shut.done()
    leave.set()
    assert shut.result(60)


def test_who_comes_meanwhile_waits_for_all_forks(threads: ThreadPoolExecutor) -> None:
    gate = ForkGate(60)
    assert gate.shut()
    assert gate.shut()
    entered = threading.Event()

    def enter() -> None:
        with gate:
            entered.set()

    coming = threads.submit(enter)
    gate.open()
    assert not entered.is_set()
    gate.open()
    coming.result(60)
    assert entered.is_set()


def test_a_fork_does_not_wait_for_its_own_thread_or_for_ever(threads: ThreadPoolExecutor) -> None:
    gate = ForkGate(0.01)
    with gate:
        assert gate.shut()
        gate.open()
        leave = inside(gate, threads)
        assert not gate.shut()
        gate.open()
        leave.set()


def test_a_child_begins_with_an_open_gate(threads: ThreadPoolExecutor) -> None:
    gate = ForkGate(60)
    leave = inside(gate, threads)
    forking = threads.submit(gate.shut)
    leave.set()
    forking.result(60)
    gate.reset()
    with gate:
        pass
    assert gate.shut()
