"""What the pool and a worker say to each other of canaries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunCanary:
    """Run a canary beside the calls, and compare its results.

    Attributes:
        number: Which one, from 0.
    """

    number: int


@dataclass(frozen=True)
class CanaryRun:
    """A canary was run; the attributes beside these are those of `backends.canary.CanaryFinding`.

    Attributes:
        number: Which one.
    """

    number: int
    operator: str
    result: str
    detail: str = ""
