"""Every operator's record as a fixture, and what was counted of them, printed at the end of every run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npugrad.ops import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad.operator import OpRecord

    Report = Callable[[str, str], None]

_LINES: pytest.StashKey[dict[str, str]] = pytest.StashKey()


@pytest.fixture(scope="session", params=list(OPERATORS.values()), ids=list(OPERATORS))
def record(request: pytest.FixtureRequest) -> OpRecord:
    """Give each record in turn."""
    record: OpRecord = request.param
    return record


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    """Give a function that puts a line under a title into the summary of the run."""
    lines = pytestconfig.stash.setdefault(_LINES, {})

    def put(title: str, text: str) -> None:
        lines[title] = text

    return put


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the lines, in the order of their titles."""
    lines = config.stash.get(_LINES, {})
    if lines:
        terminalreporter.section("contract")
        for title in sorted(lines):
            terminalreporter.line(f"{title}: {lines[title]}")
