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
    """One reason.

    Attributes:
        kind: ``"died"``: a worker process of the load test ended, or the run could not begin.
            ``"interrupted"``: somebody ended it before its time. ``"client_bound"``: the client, not the
            server, set the figures.
        message: It in a sentence.
        is_allowed: Whether whoever ran it said beforehand that objectives are to be judged all the same.
    """

    kind: Kind
    message: str
    is_allowed: bool = False


def flaws(result: Result) -> tuple[Flaw, ...]:
    """The flaws of a run, the gravest first; none of one that counts."""
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
    """Those flaws for which no objective is judged."""
    return tuple(flaw for flaw in flaws(result) if not flaw.is_allowed)
