"""`python -m tests.breadth`: what the tests cover, row by row, and what `make test` leaves out.

A row is operator, type, mode, refusal, fault and command, as the parameters of a test say them; beside it
stand how many tests of `make test` and of `make test-all` have it. Ends with 1 if `make test` lacks a row.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from npugrad import OPERATORS, DType
from npugrad.operator import AttrParam, Constraint, OpRecord

_FAULTS = ("plan", "problem", "action", "lie", "mistake", "what", "damage")
_COMMANDS = re.compile(
    r"tests/(?:client/cli|client/demo|server/acceptance)/test_(\w+)\.py|tests/server/test_(cli)\.py"
)


class Row(NamedTuple):
    """One combination; what a test says nothing about is empty."""

    operator: str = ""
    dtype: str = ""
    mode: str = ""
    refusal: str = ""
    fault: str = ""
    command: str = ""


def row(item: pytest.Item) -> Row:
    """The combination of a test."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    words = set(re.split(r"[-\[\] =',{}():]+", item.nodeid))
    command = _COMMANDS.match(item.nodeid)
    return Row(
        operator=_joined({*_records(params.values()), *(words & OPERATORS.keys())}),
        dtype=_joined(words & {str(dtype) for dtype in DType}),
        mode=_joined(words & _MODES),
        refusal=_joined(value.id for value in params.values() if isinstance(value, Constraint)),
        fault=_joined(f"{name} {_told(params[name])}" for name in _FAULTS if name in params),
        command=next(filter(None, command.groups())) if command else "",
    )


_MODES = {
    choice
    for record in OPERATORS.values()
    for param in record.params
    if isinstance(param, AttrParam)
    for choice in param.choices
}


def _records(values: Iterable[Any]) -> set[str]:
    found = (value if isinstance(value, OpRecord) else getattr(value, "record", None) for value in values)
    return {one.name for one in found if isinstance(one, OpRecord)}


def _told(value: object) -> str:
    """A word for a parameter that is the same in every process."""
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def _joined(words: Iterable[str]) -> str:
    return " ".join(sorted(set(words)))


class Breadth:
    """A plugin of pytest that counts the rows of what is collected."""

    def __init__(self) -> None:
        self.short: Counter[Row] = Counter()
        self.deep: Counter[Row] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Sort each test by whether `make test` runs it."""
        for item in session.items:
            (self.deep if item.get_closest_marker("deep") else self.short)[row(item)] += 1

    def missing(self) -> list[Row]:
        """Rows that only `make test-all` has."""
        return sorted(self.deep.keys() - self.short.keys())


def collected(*arguments: str) -> Breadth:
    """The rows of the tests under `make test-all`, which are collected and not run."""
    breadth = Breadth()
    status = pytest.main(["--collect-only", "-qqq", "-p", "no:cacheprovider", *arguments], plugins=[breadth])
    assert status == pytest.ExitCode.OK, f"collection ended with {status!r}"
    return breadth


def main() -> int:
    """Prints the table, tab-separated, then what is missing."""
    breadth = collected()
    print("\t".join(("short", "all", *Row._fields)))
    for one in sorted(breadth.short.keys() | breadth.deep.keys()):
        print("\t".join((str(breadth.short[one]), str(breadth.short[one] + breadth.deep[one]), *one)))
    missing = breadth.missing()
    print(f"{len(breadth.short)} rows in make test, {len(missing)} more in make test-all", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
