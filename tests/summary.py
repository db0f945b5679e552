"""What tests count, printed at the end of a run; each process of pytest-xdist hands in its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Tally = Callable[[str, int | str], None]

_COUNTS: pytest.StashKey[dict[str, dict[str, int | str]]] = pytest.StashKey()
_OUTPUT = "npugrad_counts"


def tally_of(config: pytest.Config, section: str) -> Tally:
    """A function that adds a number to a line of a section, or sets its text."""
    counts = config.stash.setdefault(_COUNTS, {}).setdefault(section, {})

    def add(title: str, value: int | str) -> None:
        before = counts.get(title, 0)
        counts[title] = before + value if isinstance(before, int) and isinstance(value, int) else value

    return add


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands over what this process counted, if it is not the one that prints."""
    output: Any = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = session.config.stash.get(_COUNTS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds what a process counted; one that crashed hands over nothing."""
    for section, counts in getattr(node, "workeroutput", {}).get(_OUTPUT, {}).items():
        add = tally_of(node.config, section)
        for title, value in counts.items():
            add(title, value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the lines of each section in the order of their titles."""
    for section, counts in sorted(config.stash.get(_COUNTS, {}).items()):
        terminalreporter.section(section)
        for title in sorted(counts):
            terminalreporter.line(f"{title}: {counts[title]}")
