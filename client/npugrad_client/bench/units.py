"""Parses and formats durations, shares and rates."""

from __future__ import annotations

import math
import re

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?|\.\d+)\s*(?P<unit>us|ms|s|m|h)", re.ASCII)
_NUMBER = re.compile(r"\d+(\.\d+)?|\.\d+", re.ASCII)
_SHARE = re.compile(r"(?P<number>\d+(\.\d+)?|\.\d+)\s*(?P<percent>%?)", re.ASCII)
_RATE = re.compile(r"(?P<number>\d+(\.\d+)?|\.\d+)\s*(/s)?", re.ASCII)


def parse_duration(value: object) -> float:
    """Seconds of ``"50ms"``, ``"30s"`` or ``"2m"``.

    A bare number is rejected, even 0: some would read seconds, others milliseconds.

    Raises:
        ValueError: It is not a duration.
    """
    text = value.strip() if isinstance(value, str) else "" if isinstance(value, bool) else str(value)
    match = _DURATION.fullmatch(text) if isinstance(value, str) else None
    if match is None:
        expected = "a duration such as 50ms, 30s or 2m"
        if _NUMBER.fullmatch(text):
            expected = f"a duration with its unit, such as {text}ms or {text}s"
        raise ValueError(f"found {value!r}; expected {expected}")
    return float(match["number"]) * _SECONDS[match["unit"]]


def parse_share(value: str) -> float:
    """A share from 0 to 1: ``"0.1%"`` or ``"0.001"``.

    Raises:
        ValueError: It is not a share, or above 1.
    """
    match = _SHARE.fullmatch(value.strip())
    share = math.nan if match is None else float(match["number"]) / (100 if match["percent"] else 1)
    if not 0 <= share <= 1:
        raise ValueError(f"found {value!r}; expected a share such as 0.1% or 0.001")
    return share


def parse_rate(value: str) -> float:
    """Calls per second: ``"95/s"`` or ``"95"``.

    Raises:
        ValueError: It is not a rate above 0.
    """
    match = _RATE.fullmatch(value.strip())
    if match is None or float(match["number"]) <= 0:
        raise ValueError(f"found {value!r}; expected a rate above 0 such as 95/s")
    return float(match["number"])


def format_seconds(seconds: float | None) -> str:
    """Formats a duration with three significant digits; ``-`` for one that is not known."""
    if seconds is None:
        return "-"
    if not math.isfinite(seconds):
        return str(seconds)
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def format_rate(per_s: float) -> str:
    """Formats a rate with three significant digits."""
    return f"{_digits(per_s) if per_s >= 1 else format(per_s, '.3g')}/s"


def format_share(share: float) -> str:
    """Formats a share in percent."""
    return f"{share * 100:.3g} %"


def _digits(value: float) -> str:
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, 3 - whole)}f}"
