"""Messages between the pool and a worker about canaries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunCanary:
    """Run a canary alongside the calls, and compare its results.

    Attributes:
        number: Its number, from 0.
    """

    number: int


@dataclass(frozen=True)
class CanaryRun:
    """A canary was run; the other attributes are those of `backends.canary.CanaryFinding`.

    Attributes:
        number: Its number.
    """

    number: int
    operator: str
    result: str
    detail: str = ""
