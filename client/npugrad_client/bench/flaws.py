"""Flaws that invalidate a run: it then meets no objective and is not compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from npugrad_client.bench.bottleneck import client_bound

if TYPE_CHECKING:
    from npugrad_client.bench.result import Result

Kind = Literal["died", "interrupted", "client_bound"]


@dataclass(frozen=True)
class Flaw:
    """One flaw.

    Attributes:
        kind: ``"died"``: a worker process of the load test ended, or the run could not begin.
            ``"interrupted"``: it was interrupted. ``"client_bound"``: the client, not the server, set the
            figures.
        message: The flaw in a sentence.
        is_allowed: Whether an option of the run allowed it beforehand, so that objectives are judged anyway.
    """

    kind: Kind
    message: str
    is_allowed: bool = False


def flaws(result: Result) -> tuple[Flaw, ...]:
    """Returns the flaws of a run, the most serious first; empty for a valid run."""
    found = []
    if result.died:
        found.append(Flaw("died", f"The run died: {result.died}."))
    if result.is_interrupted:
        found.append(Flaw("interrupted", "Interrupted: this is what was measured until then."))
    if reasons := client_bound(result):
        message = f"The client was the bottleneck: {'; '.join(reasons)}."
        found.append(Flaw("client_bound", message, result.is_client_bound_allowed))
    return tuple(found)


def spoiling(result: Result) -> tuple[Flaw, ...]:
    """Returns the flaws because of which no objective is judged."""
    return tuple(flaw for flaw in flaws(result) if not flaw.is_allowed)
