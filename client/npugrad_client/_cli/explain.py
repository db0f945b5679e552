"""`npugrad explain`: what the documents say, about a code, an operator or one constraint."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from npugrad.errors import BY_CODE, BY_REASON, ErrorRow
from npugrad.ops import OPERATORS
from npugrad.spec import AttrParam, Constraint, OpSpec, TensorParam

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType


class UnknownSubject(Exception):
    """There is nothing of that name; the message proposes what comes near."""


def explain(console: Console, subject: str, constraint: str | None = None) -> None:
    """Prints what is documented.

    Args:
        console: Where to print.
        subject: An aclnn number, a reason, an operator (either of its names) or a constraint's identifier.
        constraint: Identifier of one constraint of the operator.

    Raises:
        UnknownSubject: There is no such subject or constraint.
    """
    spec = _operator(subject)
    if spec is not None:
        console.print(_one(spec, constraint) if constraint else _operator_text(spec))
    elif subject.isdigit() and int(subject) in BY_CODE:
        console.print(_code_text(BY_CODE[int(subject)]))
    elif subject.upper() in BY_REASON:
        console.print(_code_text(BY_REASON[subject.upper()]))
    else:
        found = [(s, c) for s in OPERATORS.values() for c in s.constraints if c.id == subject]
        if not found:
            raise UnknownSubject(_nearest(subject, _subjects()))
        for owner, match in found:
            console.print(_constraint_text(owner, match))


def _operator(subject: str) -> OpSpec | None:
    by_aclnn = {spec.aclnn_name.lower(): spec for spec in OPERATORS.values()}
    return OPERATORS.get(subject) or by_aclnn.get(subject.lower())


def _subjects() -> list[str]:
    names = [*OPERATORS, *(s.aclnn_name for s in OPERATORS.values()), *map(str, BY_CODE), *BY_REASON]
    return names + [c.id for s in OPERATORS.values() for c in s.constraints]


def _nearest(subject: str, known: Iterable[str]) -> str:
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(subject, names, n=5, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "expected an operator, an aclnn number or a reason"
    return f"found nothing about {subject!r}; {hint}"


def _one(spec: OpSpec, identifier: str) -> RenderableType:
    for constraint in spec.constraints:
        if constraint.id == identifier:
            return _constraint_text(spec, constraint)
    raise UnknownSubject(_nearest(identifier, (c.id for c in spec.constraints)))


def _code_text(row: ErrorRow) -> RenderableType:
    number = "no aclnn number" if row.code is None else str(row.code)
    retry = "retrying may help" if row.retryable else "retrying does not help"
    title = Text(f"{row.reason} ({number})", style="bold")
    facts = Text(f"{row.sentence} gRPC status {row.grpc_status}; {retry}.")
    if row.code is None:
        return Group(title, facts)
    table = _constraint_table("operator")
    for spec in OPERATORS.values():
        for constraint in spec.constraints:
            if constraint.code == row.code:
                table.add_row(spec.name, constraint.id, constraint.text + _pick_mark(constraint))
    return Group(
        title, facts, table if table.row_count else Text("No documented constraint gives this code.")
    )


def _constraint_table(first: str) -> Table:
    table = Table(show_lines=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    table.add_column("constraint", no_wrap=True)
    table.add_column("documented rule")
    return table


def _pick_mark(constraint: Constraint) -> str:
    return " (document and vendor source differ)" if constraint.pick else ""


def _operator_text(spec: OpSpec) -> RenderableType:
    products = ", ".join(
        p.full_name + ("" if source in spec.documents else f" (from {source})")
        for p, source in spec.products.items()
    )
    head = Text(f"{spec.name}  ({spec.aclnn_name})", style="bold")
    facts = Text(f"{spec.summary}\nProducts: {products}. Oldest CANN: {spec.min_cann}.")
    parameters = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("parameter", "in C", "kind", "meaning"):
        parameters.add_column(name, no_wrap=name != "meaning")
    for param in spec.params:
        parameters.add_row(param.name, param.c_name, _kind(param), param.doc)
    rules = _constraint_table("code")
    for constraint in sorted(spec.constraints, key=lambda c: c.code):
        rules.add_row(str(constraint.code), constraint.id, constraint.text + _pick_mark(constraint))
    more = Text(f"One in full: npugrad explain {spec.name} {spec.constraints[0].id}", style="dim")
    return Group(head, facts, Text(), parameters, Text(), rules, _not_expressible(spec), more)


def _kind(param: TensorParam | AttrParam) -> str:
    if isinstance(param, AttrParam):
        return param.type
    return "output" if param.role == "output" else "optional input" if param.optional else "input"


def _not_expressible(spec: OpSpec) -> Text:
    lines = [f"Not expressible through the service: {n.source}: {n.reason}." for n in spec.not_expressible]
    return Text("\n".join(lines), style="dim")


def _constraint_text(spec: OpSpec, constraint: Constraint) -> RenderableType:
    lines = [
        f"{spec.name} {constraint.id}",
        f"  code       {constraint.code} {BY_CODE[constraint.code].reason}",
        f"  rule       {constraint.text}",
        f"  operands   {', '.join(constraint.operands)}",
        *(f"  source     {source}" for source in constraint.sources),
        f"  vendor     {_vendor(constraint)}",
    ]
    if constraint.products is not None:
        lines.append(f"  products   {', '.join(sorted(constraint.products))}")
    if constraint.requires:
        lines.append(f"  looked at after {', '.join(constraint.requires)}")
    if constraint.pick:
        lines.append(f"  both sides {constraint.pick}")
    return Text("\n".join(lines))


def _vendor(constraint: Constraint) -> str:
    if constraint.vendor_code == "accepts":
        return "the vendor's own source accepts such a call"
    return f"the vendor's own source returns {constraint.vendor_code}"
