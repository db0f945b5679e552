"""What the end-to-end tests counted, printed at the end of every run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Report = Callable[[str, int | str], None]

_COUNTS: pytest.StashKey[dict[str, int | str]] = pytest.StashKey()


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Report:
    """Give a function that adds a number to a line of the summary, or sets its text."""
    counts = pytestconfig.stash.setdefault(_COUNTS, {})

    def add(title: str, value: int | str) -> None:
        before = counts.get(title, 0)
        counts[title] = before + value if isinstance(before, int) and isinstance(value, int) else value

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the lines, in the order of their titles."""
    counts = config.stash.get(_COUNTS, {})
    if counts:
        terminalreporter.section("end to end")
        for title in sorted(counts):
            terminalreporter.line(f"{title}: {counts[title]}")
