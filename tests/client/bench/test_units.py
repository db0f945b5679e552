"""Durations, shares and rates as people write them."""

from __future__ import annotations

import pytest

from npugrad_client.bench.units import (
    format_seconds,
    format_share,
    parse_duration,
    parse_rate,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05),
        ("30s", 30),
        ("2m", 120),
        ("1h", 3600),
        ("250 us", 0.00025),
        ("1.5 s", 1.5),
        ("0s", 0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "5 days", "-1s", "ms", "1s 2ms", True, None, [1], float("nan"), -1, "1e3", "inf"]
)
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="expected a duration such as 50ms, 30s or 2m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("value", "number"), [("50", "50"), (50, "50"), (" 0.5 ", "0.5"), (0.5, "0.5"), ("0", "0"), (0, "0")]
)
def test_a_number_without_a_unit_is_refused(value: object, number: str) -> None:
    with pytest.raises(ValueError, match="found") as caught:
        parse_duration(value)
    expected = f"expected a duration with its unit, such as {number}ms or {number}s"
    assert str(caught.value) == f"found {value!r}; {expected}"


def test_shares() -> None:
    assert parse_share("0.1%") == pytest.approx(0.001)
    assert parse_share("0.02") == pytest.approx(0.02)
    assert parse_share("100%") == 1


@pytest.mark.parametrize("text", ["", "101%", "1.5", "-1%", "x", "5 of 100"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a share such as 0\.1% or 0\.001"):
        parse_share(text)


def test_rates() -> None:
    assert parse_rate("95/s") == 95
    assert parse_rate("0.5") == 0.5


@pytest.mark.parametrize("text", ["0", "0/s", "-3", "fast", "5/m"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate above 0 such as 95/s"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (0.000012, "12.0 us"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (1.5, "1.50 s"),
        (75, "75.0 s"),
        (float("inf"), "inf"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_shares_for_people() -> None:
    assert format_share(0.001234) == "0.123 %"
