from __future__ import annotations

import math
import random

import pytest
from tests.server.pool.pools import make_job

from npugrad_server.pool.run_times import MAX_ESTIMATES, STALE_S, RunTimes, WorkSize, work_size_of


def work(nbytes: int, operator: str = "op", dtype: str = "float32") -> WorkSize:
    return WorkSize((operator, dtype, nbytes.bit_length() - 1), math.log(nbytes))


def known(*runs: tuple[int, float], device: int = 0) -> RunTimes:
    """What is known after so many runs of so many seconds each, one a second."""
    times, now = RunTimes(), 0
    for count, seconds in runs:
        for _ in range(count):
            times.learn(device, work(1000), seconds, now)
            now += 1
    return times


def test_nothing_is_known_before_the_first_call() -> None:
    assert RunTimes().expect((0,), work(1000)) == (0.0, 0.0)
    times = known((1, 0.25))
    assert times.expect((0,), work(1000))[0] == pytest.approx(0.25, rel=0.1)
    for other in (work(4000), work(1000, "other"), work(1000, dtype="float16")):
        assert times.expect((0,), other) == (0.0, 0.0)
    assert times.expect((1,), work(1000)) == (0.0, 0.0), "another device may have another pace"


@pytest.mark.parametrize(("power", "seed"), [(0.0, 0), (0.5, 1), (1.0, 2), (2.0, 3)])
def test_times_are_predicted_by_size_within_a_bucket(power: float, seed: int) -> None:
    times, draw = RunTimes(), random.Random(seed)

    def takes(nbytes: int) -> float:
        return float(1e-3 * (nbytes / 2**20) ** power * math.exp(draw.gauss(0, 0.1)))

    for now in range(150):
        nbytes = draw.randrange(2**20, 2**21)
        times.learn(0, work(nbytes), takes(nbytes), now)
    found = [(takes(nbytes), times.expect((0,), work(nbytes))) for nbytes in range(2**20, 2**21, 3001)]
    good = sum(1 / 1.5 < actual / expected[0] < 1.5 for actual, expected in found)
    kept = sum(actual <= expected[1] for actual, expected in found)
    assert good >= 0.99 * len(found)
    assert kept >= 0.95 * len(found)
    assert all(expected[1] < 2 * expected[0] for _, expected in found)


def test_a_change_of_pace_is_learned_and_one_call_that_was_held_up_is_not() -> None:
    assert known((50, 0.01), (1, 60.0)).expect((0,), work(1000))[1] < 0.1
    times = known((50, 0.01), (1, 60.0), (100, 0.05))
    assert times.expect((0,), work(1000))[0] == pytest.approx(0.05, rel=0.2)


def test_first_calls_that_were_slow_refuse_no_later_ones_and_the_warm_up_is_forgotten() -> None:
    """One call that had to wait for its kernel refused all with a shorter deadline for a minute."""
    longest = [known((count, 5.0)).expect((0,), work(1000))[1] for count in (1, 2, 3)]
    assert longest[:2] == [0, 0]
    assert longest[2] > 5
    assert 0.01 < known((1, 5.0), (3, 0.01)).expect((0,), work(1000))[1] < 0.03


def test_several_devices_share_the_work_by_their_pace() -> None:
    times = known((100, 0.01))
    for now in range(100):
        times.learn(1, work(1000), 0.04, now)
    found = times.expect((0, 1, 2), work(1000))
    # In 40 ms they do 5 calls, with two streams: 16 ms of a stream for each.
    assert found[0] == pytest.approx(0.016, rel=0.01)
    assert found[1] == times.expect((0,), work(1000))[1]


def test_what_is_known_is_doubted_after_a_while_by_one_call() -> None:
    times = RunTimes()
    times.learn(0, work(1000), 0.5, 10)
    assert not times.doubt((0, 1), work(1000), 10 + STALE_S)
    assert times.doubt((0, 1), work(1000), 11 + STALE_S)
    assert not times.doubt((0, 1), work(1000), 12 + STALE_S)


def test_memory_is_bounded_and_the_least_recent_goes_first() -> None:
    times = RunTimes()
    for index in range(MAX_ESTIMATES + 1):
        times.learn(index, work(1000), 1.0, index)
        times.learn(0, work(1000), 1.0, index)
    assert len(times) == MAX_ESTIMATES
    assert times.expect((0,), work(1000))[0] > 0
    assert times.expect((1,), work(1000))[0] == 0


def test_a_call_is_sized_by_all_of_its_tensors() -> None:
    found = work_size_of(make_job(n=2, c=8, hxw=16, group=2).planned)
    assert found.key == ("group_norm_backward", "float32", 11)
    assert 2048 <= round(math.exp(found.log_bytes)) < 4096
