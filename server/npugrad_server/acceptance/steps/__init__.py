"""The steps in order, one module each; a module has one `STEP`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.acceptance.steps import (
    crash,
    determinism,
    environment,
    memory,
    operators,
    refusals,
    round_trip,
    soak,
    speed,
    timeout,
)

if TYPE_CHECKING:
    from npugrad_server.acceptance.step import Step

STEPS: tuple[Step, ...] = (
    environment.STEP,
    round_trip.STEP,
    operators.STEP,
    refusals.STEP,
    determinism.STEP,
    memory.STEP,
    timeout.STEP,
    soak.STEP,
    speed.STEP,
    crash.STEP,
)
"""All steps by number."""


def choose(text: str, steps: tuple[Step, ...] = STEPS) -> tuple[Step, ...]:
    """The steps of a list of numbers and keys such as ``"1,3,soak"``; all of them when it is empty.

    Raises:
        ValueError: There is no such step; the message lists all.
    """
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    known = {str(step.number): step for step in steps} | {step.key: step for step in steps}
    unknown = [part for part in wanted if part not in known]
    if unknown:
        names = ", ".join(f"{step.number} ({step.key})" for step in steps)
        raise ValueError(f"found step {', '.join(map(repr, unknown))}; expected some of {names}")
    numbers = {known[part].number for part in wanted}
    return tuple(step for step in steps if not wanted or step.number in numbers)
