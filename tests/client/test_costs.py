"""Which way is faster: what is learned of a kind, what that costs, and how a change is noticed.

Times are given, not measured, so that each verdict is exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from npugrad_client._costs import (
    _MOST_KINDS,
    FASTER_HERE,
    MEASURED_HERE,
    REST,
    TRIALS,
    CallKind,
    CostRow,
    Costs,
    describe,
    kind_of,
)

KIND = CallKind("floyd", ("float32",))
BYTES = 2**20
Seconds = Callable[[int], float]
times = st.floats(1e-5, 10.0)


@dataclass
class World:
    """Calls of one kind whose seconds either way follow from the number of the call."""

    here: Seconds
    there: Seconds
    costs: Costs

    def run(self, calls: int, kind: CallKind = KIND) -> tuple[float, list[bool], list[str]]:
        """Seconds of so many calls; which were sent, and what was said of each."""
        total_s, ways, whys = 0.0, list[bool](), list[str]()
        for number in range(calls):
            why = self.costs.why_local(kind)
            sends = not why
            seconds = (self.there if sends else self.here)(number)
            self.costs.add(kind, "text", is_sent=sends, seconds=seconds, nbytes=BYTES)
            total_s += seconds
            ways.append(sends)
            whys.append(why)
        return total_s, ways, whys


def world(here: float, there: float) -> World:
    return World(lambda _: here, lambda _: there, Costs())


@given(here=times, there=times)
def test_learning_is_short_and_the_faster_way_is_found(here: float, there: float) -> None:
    """Once it is known, the slower one costs two per cent at most."""
    made = world(here, there)
    assert made.run(2 * TRIALS)[1].count(True) <= TRIALS
    assert made.costs.why_local(KIND) == ("" if there < 0.95 * here else FASTER_HERE)
    total_s, _, _ = made.run(2000)
    assert total_s <= 1.02 * 2000 * min(here, there / 0.95)


@given(
    here=st.lists(st.floats(0.8, 1.25), min_size=50, max_size=50),
    there=st.lists(st.floats(1.6, 2.5), min_size=50, max_size=50),
    spikes=st.sets(st.integers(0, 49), max_size=2),
)
def test_noise_sends_nothing_that_is_slower(here: list[float], there: list[float], spikes: set[int]) -> None:
    """Twice as slow, give or take a quarter; now and then a call here takes ten times as long."""
    noisy = [10.0 if number in spikes else seconds for number, seconds in enumerate(here)]
    made = World(lambda n: noisy[n % 50], lambda n: there[n % 50], Costs())
    made.run(2 * TRIALS)
    _, ways, _ = made.run(1000)
    assert ways.count(True) <= 1000 // 32


def test_two_calls_that_are_much_slower_are_enough() -> None:
    _, ways, _ = world(here=0.01, there=1.0).run(50)
    assert [number for number, sends in enumerate(ways) if sends] == [1, 3]


def test_a_slow_first_call_of_a_connection_decides_nothing() -> None:
    made = World(lambda _: 1.0, lambda n: 5.0 if n == 1 else 0.3, Costs())
    made.run(2 * TRIALS)
    assert made.run(20)[1] == [True] * 20


def test_a_server_that_becomes_slow_is_left_and_found_again_when_it_is_fast() -> None:
    made = world(here=1.0, there=0.2)
    made.run(50)
    made.there = lambda _: 4.0
    _, ways, _ = made.run(50)
    assert ways.count(True) <= 4
    made.there = lambda _: 0.2
    _, ways, _ = made.run(1500)
    assert ways[-100:].count(False) <= 4
    assert ways.count(True) > 500


def test_a_host_that_becomes_slow_sends() -> None:
    made = world(here=1.0, there=2.0)
    made.run(20)
    made.here = lambda _: 9.0
    assert made.run(200)[1].count(True) > 150


def test_a_look_says_that_it_measures() -> None:
    made = world(here=1.0, there=0.96 * 0.9)
    made.run(2 * TRIALS)
    _, ways, whys = made.run(2000)
    looks = [why for why, sends in zip(whys, ways, strict=True) if not sends]
    assert looks
    assert set(looks) == {MEASURED_HERE}


def arrays(dtype: str, *shapes: tuple[int, ...]) -> dict[str, np.ndarray | None]:
    return {f"operand{number}": np.zeros(shape, dtype) for number, shape in enumerate(shapes)}


def test_sizes_within_a_power_of_two_are_one_kind() -> None:
    first = kind_of("norm", arrays("float32", (2, 32, 100)), {"n": 2, "c": 32, "hxw": 100})
    assert first == kind_of("norm", arrays("float32", (3, 33, 127)), {"n": 3, "c": 33, "hxw": 127})
    assert first != kind_of("norm", arrays("float32", (2, 32, 128)), {"n": 2, "c": 32, "hxw": 128})
    assert first != kind_of("norm", arrays("float16", (2, 32, 100)), {"n": 2, "c": 32, "hxw": 100})


def test_flags_modes_and_null_operands_keep_kinds_apart() -> None:
    inputs = arrays("float32", (4, 4), (4,))
    attrs = [
        {"mode": mode, "align_corners": align, "output_mask": mask}
        for mode in range(3)
        for align in (False, True)
        for mask in ((True, True), (True, False))
    ]
    nulls = {**inputs, "operand1": None}
    found = [kind_of("norm", given, dict(each)) for given in (inputs, nulls) for each in attrs * 2]
    assert len(set(found)) == 2 * len(attrs)


def test_a_kind_is_described_by_its_largest_operand() -> None:
    assert describe({"mean": None, **arrays("float16", (2, 3), (2, 3, 5))}) == "float16[2,3,5]"


def test_beyond_so_many_kinds_the_others_of_an_operator_are_one() -> None:
    costs = Costs()
    for number in range(_MOST_KINDS + 50):
        costs.add(CallKind("floyd", (number,)), f"{number}", is_sent=True, seconds=1.0, nbytes=1)
    rows = costs.rows()
    assert len(rows) == _MOST_KINDS + 1
    assert (rows[0].kind, rows[0].sent) == (REST, 50)
    assert costs.why_local(CallKind("floyd", ("new",))) == MEASURED_HERE  # none of them ran here so far


def test_what_sending_won_counts_by_byte_and_is_not_guessed() -> None:
    costs = Costs()
    costs.why_local(KIND)
    assert costs.rows() == (), "a choice alone makes no row"
    costs.add(KIND, "text", is_sent=True, seconds=100 / 64, nbytes=100)
    assert costs.rows() == (CostRow("floyd", "text", 1, 0, 100 / 64, None, None),)
    costs.add(KIND, "text", is_sent=True, seconds=300 / 64, nbytes=300)
    costs.add(KIND, "text", is_sent=False, seconds=6.25, nbytes=200)
    assert costs.rows() == (CostRow("floyd", "text", 2, 1, 3.125, 6.25, 6.25),)


def test_threads_lose_no_call() -> None:
    made, start = world(here=1.0, there=3.0), threading.Barrier(8)

    def work() -> None:
        start.wait()
        made.run(200)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work) for _ in range(8)]:
            future.result()
    (row,) = made.costs.rows()
    assert row.sent + row.local == 1600
    assert row.sent <= TRIALS + 8 + 1600 // 32
