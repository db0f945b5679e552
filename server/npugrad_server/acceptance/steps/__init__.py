"""The steps in order; each module defines one `STEP`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from npugrad_server.acceptance.steps import (
    crash,
    determinism,
    environment,
    ladder,
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
    ladder.STEP,
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
"""All steps, by number."""


_QUICK = ("ladder", "environment", "round_trip", "operators", "soak")
_QUICK_SOAK_S = 15.0


class StepSelection(NamedTuple):
    """The steps of an acceptance.

    Attributes:
        steps: The steps, by number.
        soak_s: Seconds of the soak.
        left_out: What a full acceptance would also have done, in sentences.
    """

    steps: tuple[Step, ...]
    soak_s: float
    left_out: tuple[str, ...]


def select_steps(text: str, *, quick: bool, soak_s: float) -> StepSelection:
    """Selects the steps; a quick acceptance has the short ones, or those in `text`, with less in each.

    Raises:
        ValueError: A step does not exist; the message lists all.
    """
    chosen = choose(text)
    if not quick:
        return StepSelection(chosen, soak_s, ())
    if not text.strip():
        chosen = tuple(step for step in STEPS if step.key in _QUICK)
    others = ", ".join(f"{step.number} ({step.key})" for step in STEPS if step not in chosen)
    short_s = min(soak_s, _QUICK_SOAK_S)
    told = [f"--quick: steps {others}"] if others else []
    told.append(f"--quick: operands of realistic sizes, and all of the soak beyond {short_s:g} s")
    return StepSelection(chosen, short_s, tuple(told))


def choose(text: str, steps: tuple[Step, ...] = STEPS) -> tuple[Step, ...]:
    """Returns the steps in a list of numbers and keys such as ``"1,3,soak"``; all of them if it is empty.

    Raises:
        ValueError: A step does not exist; the message lists all.
    """
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    known = {str(step.number): step for step in steps} | {step.key: step for step in steps}
    unknown = [part for part in wanted if part not in known]
    if unknown:
        names = ", ".join(f"{step.number} ({step.key})" for step in steps)
        raise ValueError(f"found step {', '.join(map(repr, unknown))}; expected some of {names}")
    numbers = {known[part].number for part in wanted}
    return tuple(step for step in steps if not wanted or step.number in numbers)
