"""`python -m tests.second_runs`: pytest, then what failed once more, alone; `make test` and its kin run it.

A test that fails among thousands of others and passes alone met an order of events that the product allows,
or a machine that stood still; it is named at the end. What is no such matter of chance is red at once: a test
that draws its data, whose failure is a finding; an error in set-up or tear-down, where servers are looked at;
a process that crashed; the runner's time-out; a warning. So is a run in which more than three tests failed,
a test that fails twice, and one that `second_runs.txt` names because it needed its second run before.

The second run is a process of its own with the same seed, after everything else.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LEDGER = Path(os.environ.get("NPUGRAD_SECOND_RUNS", Path(__file__).with_suffix(".txt")))
MOST = 3
_RED = "npugrad_red_at_once"


@dataclass(eq=False)
class Outcomes:
    """A plugin that keeps what became of the tests of a run.

    Attributes:
        failed: Why a test that failed has no second run, by identifier; empty if it has one.
        passed: What ran to its end and was right.
        warnings: Texts of those that no test turned into an error.
        seed: Of the run.
    """

    failed: dict[str, str] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    seed: int | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes a part of a test: set-up, call or tear-down, or the crash of its process."""
        if report.failed:
            red = getattr(report, _RED, "its process crashed")
            self.failed[report.nodeid] = self.failed.get(report.nodeid) or red
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Takes a file that cannot be read."""
        if report.failed:
            self.failed[report.nodeid] = "it cannot be collected"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Takes the end of a process of pytest-xdist."""
        if error:
            self.failed[f"process {node.gateway.id}"] = "it crashed"

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        """Takes a warning."""
        self.warnings.append(f"{nodeid or 'no test'}: {warning_message.message}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Takes the seed, and has `--last-failed` forget what failed in other runs."""
        self.seed = session.config.getoption("randomly_seed", None)
        if session.config.cache is not None:
            session.config.cache.set("cache/lastfailed", dict.fromkeys(self.failed, True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Writes on a report why its failure is red at once; it travels to the process that counts."""
    report = yield
    if report.failed:
        setattr(report, _RED, _red_at_once(item, call))
    return report


def _red_at_once(item: pytest.Item, call: pytest.CallInfo[Any]) -> str:
    errors = list(_with_causes(call.excinfo.value)) if call.excinfo else []
    if call.when != "call":
        return f"an error in its {call.when}"
    if item.get_closest_marker("hypothesis"):
        return "it draws its data"
    if any(isinstance(each, pytest.fail.Exception) and str(each).startswith("Timeout (>") for each in errors):
        return "the runner's time-out"
    return "a warning" if any(isinstance(each, Warning) for each in errors) else ""


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, those of its group, and those that it was raised for, as `tests.derived.told` does."""
    while error is not None:
        yield error
        for part in getattr(error, "exceptions", ()):
            yield from _with_causes(part)
        error = error.__cause__ or error.__context__


def ledger(path: Path) -> dict[str, str]:
    """Causes by test of those that needed their second run before.

    Raises:
        ValueError: A line has no cause, or there are more than five.
    """
    lines = [line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    causes = {name: cause for name, _, cause in (line.partition("  # ") for line in lines)}
    if len(lines) > 5 or not all(causes.values()):
        raise ValueError(f"{path}: expected at most five tests, each with its cause after two spaces and a #")
    return causes


def main(arguments: Sequence[str]) -> int:
    """Runs the tests with arguments of pytest; returns the exit code."""
    past, first = ledger(LEDGER), Outcomes()
    arguments = ["-p", "tests.second_runs", *arguments]
    code = pytest.main(arguments, plugins=[first])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code
    red = {name: why for name, why in first.failed.items() if why}
    red |= {name: f"once more, after: {past[name]}" for name in first.failed if name in past}
    red |= dict.fromkeys(first.warnings, "a warning")
    if len(first.failed) > MOST:
        red |= dict.fromkeys(first.failed.keys() - red.keys(), f"more than {MOST} tests failed")
    if red or not first.failed:
        return _told(red, []) or code
    print("\nonce more, alone, what failed among others:", flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        second = process.submit(_once_more, arguments, first.seed).result()
    red = dict.fromkeys(first.failed.keys() - (second.passed - second.failed.keys()), "it failed twice")
    return _told(red, [name for name in first.failed if name not in red])


def _once_more(arguments: Sequence[str], seed: int | None) -> Outcomes:
    outcomes = Outcomes()
    same = [] if seed is None else [f"--randomly-seed={seed}"]
    pytest.main([*arguments, *same, "-n", "0", "--last-failed"], plugins=[outcomes])
    return outcomes


def _told(red: dict[str, str], needed: Sequence[str]) -> int:
    for name in sorted(needed):
        print(f"SECOND RUN: {name}: failed among others, passed alone")
    for name, why in sorted(red.items()):
        print(f"RED: {name}: {why}")
    if needed and not red:
        print(f"passed, {len(needed)} of at most {MOST} in a second run")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
