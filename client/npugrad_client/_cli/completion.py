"""What a shell completes, once `npugrad --install-completion` has told it how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer  # noqa: TC002 -- typer itself reads the annotations

from npugrad.ops import OPERATORS
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Iterable


def operators(incomplete: str) -> list[str]:
    """Names of operators."""
    return _starting(incomplete, OPERATORS)


def products(incomplete: str) -> list[str]:
    """Names of products."""
    return _starting(incomplete, map(str, Product))


def subjects(incomplete: str) -> list[str]:
    """Whatever can be explained: operators by both names, numbers, reasons, rules."""
    from npugrad_client._cli import explain

    return _starting(incomplete, explain.subjects())


def rules(context: typer.Context, incomplete: str) -> list[str]:
    """Rules of the operator that stands before them."""
    from npugrad_client._cli import explain

    record = explain.find_operator(context.params.get("subject") or "")
    return _starting(incomplete, (rule.id for rule in record.constraints) if record else ())


def scenarios(incomplete: str) -> list[str]:
    """Scenarios of the package; none without the extra that they need."""
    try:
        from npugrad_client.bench.scenario_file import shipped_scenarios
    except ImportError:
        return []
    return _starting(incomplete, shipped_scenarios())


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
