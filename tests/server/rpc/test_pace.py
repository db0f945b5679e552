"""How long a frame may be waited for, and what is said when it was waited for too long."""

from __future__ import annotations

import pytest

from npugrad_server.config import ServerSettings
from npugrad_server.rpc.pace import GIVES_WAY_AFTER_S, Pace, PaceLimits

LIMITS = PaceLimits(idle_s=60, min_bytes_per_s=1000, limit_s=600)


def moved(waited_s: float, nbytes: int) -> Pace:
    pace = Pace(LIMITS)
    pace.waited_s, pace.moved_bytes = waited_s, nbytes
    return pace


@pytest.mark.parametrize(
    ("waited_s", "nbytes", "left_s"),
    [
        (0, 0, 60),
        (40, 2, 20.002),  # a byte each 20 s
        (60, 3, 0.003),
        (61, 3, 0),
        (100, 100_000, 60),  # as fast as it must be: it may pause for as long as at its start
        (100, 10**9, 60),
        (590, 10**9, 10),
        (700, 10**9, 0),
    ],
)
def test_a_frame_may_be_waited_for(waited_s: float, nbytes: int, left_s: float) -> None:
    assert moved(waited_s, nbytes).left_s() == pytest.approx(left_s)


def test_what_is_said_names_what_was_found_and_expected() -> None:
    assert moved(0, 0).late_text(60, "no chunk", "one") == "found no chunk for 60 s; expected one before that"
    assert moved(60, 3).late_text(0.003, "", "") == (
        "found 3 bytes in 60 s; expected at least 1000 bytes/s after the first 60 s"
    )
    assert moved(590, 10**9).late_text(10, "", "") == (
        "found 1000000000 bytes in 600 s; expected all of it within 600 s"
    )


def test_who_has_just_begun_is_not_slow() -> None:
    assert not moved(0, 0).is_slow(GIVES_WAY_AFTER_S)
    assert moved(0, 0).is_slow(GIVES_WAY_AFTER_S + 0.01)
    assert not moved(0, 5010).is_slow(5)
    assert moved(9, 9999).is_slow(1)
    assert not moved(9, 10_000).is_slow(1)
    pace = Pace(PaceLimits(5))  # no rate and no limit leave the idle timeout
    pace.waited_s = 1e9
    assert pace.left_s() == 5
    assert not pace.is_slow(100)


def test_what_the_rest_takes_follows_from_the_rate_so_far() -> None:
    assert moved(9, 1000).takes_s(5000, 1) == 50
    assert moved(0, 1000).takes_s(5000, 0) == 0
    assert moved(1, 0).takes_s(5000, 1) == 10_000


def test_the_defaults_let_slow_clients_be() -> None:
    """One of 0.14 Mbit/s may pause for nearly 50 s at any time, and a GiB goes at 0.6 Mbit/s."""
    settings = ServerSettings()
    for limits in (PaceLimits.of_uploads(settings), PaceLimits.of_replies(settings)):
        pace = Pace(limits)
        for _ in range(100):
            pace.waited_s += 10
            pace.moved_bytes += 10 * 140_000 // 8
            assert pace.left_s() > 49
        assert 0.6e6 / 8 * limits.limit_s > 2**30
