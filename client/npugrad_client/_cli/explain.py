"""`npugrad explain`: what the documents say about a code, an operator or a constraint."""

from __future__ import annotations

import difflib
import itertools
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from npugrad.error_table import BLAME, BY_CODE, BY_REASON, BlameRule, ErrorRow
from npugrad.operator import AttrParam, Constraint, OpRecord, TensorParam
from npugrad.ops import OPERATORS
from npugrad.profiles import records_at
from npugrad_client._cli import json_answers
from npugrad_client._cli.terminal import FileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType

    from npugrad.releases import CannRelease

_PICK_MARK = " *"
_PROPOSED = 5
"""Maximum number of names suggested for a misspelt one."""
_LIKENESS = 0.8
"""Least similarity of a suggestion, as difflib measures it: one letter in five may be wrong."""
_SHORTEST = 4
"""Letters of the shortest word that is suggested for another one."""


class UnknownSubject(FileError):
    """Nothing has this name; the message suggests similar ones."""


def explain(
    console: Console, subject: str, constraint: str | None = None, release: CannRelease | None = None
) -> None:
    """Prints what is documented; arguments and errors as in `find`."""
    found = find(subject, constraint, release)
    if isinstance(found, OpRecord):
        console.print(_operator_text(found))
    elif isinstance(found, ErrorRow):
        console.print(_code_text(found, records_at(OPERATORS, release)))
    else:
        console.print(Group(*_spaced([_constraint_text(owner, match) for owner, match in found])))


def explanation(
    subject: str, constraint: str | None = None, release: CannRelease | None = None
) -> dict[str, Any]:
    """Returns the same for scripts: one of ``operator``, ``error`` and ``constraints``."""
    found = find(subject, constraint, release)
    if isinstance(found, OpRecord):
        return {"operator": json_answers.operator(found)}
    if isinstance(found, ErrorRow):
        return {"error": json_answers.error(found, records_at(OPERATORS, release))}
    return {"constraints": [json_answers.constraint(owner, match) for owner, match in found]}


def find(
    subject: str, constraint: str | None = None, release: CannRelease | None = None
) -> OpRecord | ErrorRow | list[tuple[OpRecord, Constraint]]:
    """Finds what a subject refers to.

    Args:
        subject: An aclnn number, a reason, an operator (either of its names) or a constraint's identifier.
        constraint: Identifier of one constraint of the operator.
        release: Release of CANN whose pages say it; None for those that the records are written from.

    Raises:
        UnknownSubject: There is no such subject or constraint.
    """
    records = records_at(OPERATORS, release)
    record = find_operator(subject, records)
    if constraint is not None:
        if record is None:
            expected = f"an operator before a constraint; {_operators_told()}"
            raise UnknownSubject(nearest(subject, _operators(), expected))
        return [(record, _one(record, constraint))]
    if (found := record or _row(subject)) is not None:
        return found
    rules = [(s, c) for s in records.values() for c in s.constraints if c.id == subject]
    if not rules:
        expected = f"an operator, an aclnn number, a reason or a constraint; {_operators_told()}"
        raise UnknownSubject(nearest(subject, subjects(), expected))
    return rules


def nearest(found: str, known: Iterable[str], expected: str) -> str:
    """Returns a message that a name is unknown, with similar known ones.

    Args:
        found: The name.
        known: All known names.
        expected: What they are, in case none is similar.
    """
    asked = _plain(found)
    names = {_plain(name): name for name in known}
    near = [name for text, name in names.items() if _is_part(asked, text) or _is_short_for(asked, name)]
    if near := near or _misspelt(asked, names.values()):
        return f"found {found!r}; did you mean {', '.join(near[:_PROPOSED])}?"
    return f"found {found!r}; expected {expected}"


def _plain(name: str) -> str:
    """Reduces a name to what all its spellings have in common: group_norm, GroupNorm, groupnorm."""
    return name.lower().replace("_", "")


def _is_part(asked: str, text: str) -> bool:
    return len(asked) > 2 and asked in text


def _is_short_for(asked: str, name: str) -> bool:
    """Whether the name's words begin with these letters."""
    words = [word for word in _words(name.removeprefix("aclnn")) if word.isalpha()]
    return _is_part(asked, "".join(word[0] for word in words).lower()[: len(asked)])


def _misspelt(asked: str, names: Iterable[str]) -> list[str]:
    """The names that are nearly so, or some words of which are: group_nrom is near group_norm_backward."""
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        words = _words(name)
        for start, end in itertools.combinations(range(len(words) + 1), 2):
            parts["".join(words[start:end]).lower()].append(name)
    likely = [part for part in parts if len(part) >= _SHORTEST]
    close = difflib.get_close_matches("".join(_words(asked)), likely, n=_PROPOSED, cutoff=_LIKENESS)
    return list(dict.fromkeys(name for part in close for name in parts[part]))


def _words(name: str) -> list[str]:
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)


def _operators_told() -> str:
    return "operators: " + ", ".join(f"{record.name} ({record.aclnn_name})" for record in OPERATORS.values())


def _operators() -> list[str]:
    return [*OPERATORS, *(s.aclnn_name for s in OPERATORS.values())]


def find_operator(subject: str, records: Mapping[str, OpRecord] = OPERATORS) -> OpRecord | None:
    """The operator of this name, or of the aclnn function's; None if there is none."""
    by_aclnn = {record.aclnn_name.lower(): record for record in records.values()}
    return records.get(subject.lower()) or by_aclnn.get(subject.lower())


def _row(subject: str) -> ErrorRow | None:
    if subject.isdecimal():
        return BY_CODE.get(int(subject))
    return BY_REASON.get(subject.upper())


def subjects() -> list[str]:
    """All that can be explained."""
    names = [*_operators(), *map(str, BY_CODE), *BY_REASON]
    return names + [c.id for s in OPERATORS.values() for c in s.constraints]


def _one(record: OpRecord, identifier: str) -> Constraint:
    for constraint in record.constraints:
        if constraint.id == identifier:
            return constraint
    raise UnknownSubject(
        nearest(identifier, (c.id for c in record.constraints), f"a constraint of {record.name}")
    )


def _spaced(parts: Sequence[RenderableType]) -> list[RenderableType]:
    """The parts, separated by empty lines."""
    return [piece for part in parts for piece in (Text(), part)][1:]


def _code_text(row: ErrorRow, records: Mapping[str, OpRecord]) -> RenderableType:
    number = (
        "a reason of this service, with no aclnn number" if row.code is None else f"aclnn status {row.code}"
    )
    retry = "retrying may help" if row.retryable else "retrying does not help"
    title = Text(f"{row.reason}: {number}", style="bold")
    facts = Text(f"{row.sentence} gRPC status {row.grpc_status}; {retry}.")
    if row.code is None:
        blame = [rule for rule in BLAME if row.reason in rule.reasons]
        return Group(*_spaced([Group(title, facts), *([_blame(blame)] if blame else [])]))
    groups = []
    for record in records.values():
        rules = [c for c in record.constraints if c.code == row.code]
        if rules:
            groups.append(Group(Text(f"{record.name}: {_count(rules)}", style="bold"), _rules(rules)))
    if not groups:
        groups = [Group(Text("No documented constraint has this code; a device may return it."))]
    return Group(*_spaced([Group(title, facts), *groups]), *_legend(row.code))


def _blame(rules: Sequence[BlameRule]) -> RenderableType:
    """Who is to blame for what may end in an error."""
    parts = [
        Text(f"{rule.event}\n  evidence: {rule.evidence}\n  who pays: {rule.who_pays}") for rule in rules
    ]
    return Group(Text("Who is to blame", style="bold"), *parts)


def _count(constraints: Sequence[Constraint]) -> str:
    return f"{len(constraints)} constraint{'s' * (len(constraints) != 1)}"


def _rules(constraints: Sequence[Constraint]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for constraint in constraints:
        mark = _PICK_MARK if constraint.pick else ""
        table.add_row(f"  {constraint.id}{mark}", constraint.text)
    return table


def _legend(code: int | None = None, record: OpRecord | None = None) -> list[RenderableType]:
    rules = [
        c
        for s in ([record] if record else OPERATORS.values())
        for c in s.constraints
        if code in (None, c.code)
    ]
    if not any(c.pick for c in rules):
        return []
    text = "* Document and vendor source differ: npugrad explain OPERATOR CONSTRAINT shows both sides."
    return [Text(), Text(text, style="dim")]


def _operator_text(record: OpRecord) -> RenderableType:
    head = Group(
        Text(f"{record.name}: {record.aclnn_name}", style="bold"),
        Text(f"{record.summary} Oldest CANN: {record.min_cann}."),
        *(
            Text(f"  on {product.full_name}" + ("" if source in record.documents else f" ({source})"))
            for product, source in record.products.items()
        ),
        *([Text(f"By the pages of CANN {record.release}.")] if record.release else []),
        *(Text(f"  {text}") for text in record.notes.values()),
    )
    groups: list[RenderableType] = []
    for code in dict.fromkeys(c.code for c in record.constraints):
        rules = [c for c in record.constraints if c.code == code]
        title = f"{code} {BY_CODE[code].reason}: {_count(rules)}"
        groups.append(Group(Text(title, style="bold"), _rules(rules)))
    return Group(
        *_spaced([head, _parameters(record), *groups]),
        *_legend(record=record),
        *_not_expressible(record),
        Text(),
        Text(f"One in full: npugrad explain {record.name} {record.constraints[-1].id}", style="dim"),
    )


def _parameters(record: OpRecord) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("parameter", "in C", "kind", "meaning"):
        table.add_column(name, no_wrap=name != "meaning")
    for param in record.params:
        table.add_row(param.name, param.c_name, _kind(param), param.doc)
    return table


def _kind(param: TensorParam | AttrParam) -> str:
    kind = param.type if isinstance(param, AttrParam) else param.role
    return f"optional {kind}" if param.optional else kind


def _not_expressible(record: OpRecord) -> list[RenderableType]:
    if not record.not_expressible:
        return []
    lines = [f"  {n.source}: {n.reason}." for n in record.not_expressible]
    title = Text("Documented, but no call through the service can violate it", style="bold")
    return [Text(), title, *map(Text, lines)]


def _constraint_text(record: OpRecord, constraint: Constraint) -> RenderableType:
    facts = [
        ("code", f"{constraint.code} {BY_CODE[constraint.code].reason}"),
        ("rule", constraint.text),
        ("operands", ", ".join(constraint.operands)),
        *(("source", str(source)) for source in constraint.sources),
        ("vendor", _vendor(constraint)),
    ]
    if constraint.products is not None:
        facts.append(("products", ", ".join(sorted(constraint.products))))
    if constraint.requires:
        facts.append(("after", f"checked only if these hold: {', '.join(constraint.requires)}"))
    if constraint.pick:
        facts.append(("both sides", constraint.pick))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in facts:
        table.add_row(f"  {name}", text)
    return Group(Text(f"{record.name} {constraint.id}", style="bold"), table)


def _vendor(constraint: Constraint) -> str:
    words = constraint.vendor_words
    said = {"accepts": "accepts such a call", "varies": "answers differently depending on the call"}
    return f"the vendor's own source {said.get(words, f'returns {words}')}"
