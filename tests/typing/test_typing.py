"""The public surface as type checkers see it: `accept_*.py` must pass, `reject_*.py` fail where they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHECKERS = ("mypy", "pyright")
MARK = re.compile(r"# rejected: mypy\[([\w,-]+)\] pyright\[([\w,-]+)\]$")

# Errors by file name and line: the set of the checker's own error codes.
Errors = dict[tuple[str, int], set[str]]


@pytest.fixture(scope="module", params=[pytest.param("mypy", marks=pytest.mark.deep), "pyright"])
def checked(request: pytest.FixtureRequest) -> tuple[str, Errors]:
    """Return a checker's name and what it found in all files of this folder, in one run."""
    run = {"mypy": _run_mypy, "pyright": _run_pyright}[request.param]
    patterns = ("accept_*.py", "reject_*.py")
    return request.param, run([str(path) for pattern in patterns for path in sorted(HERE.glob(pattern))])


@pytest.mark.slow
def test_checkers_find_exactly_what_the_files_say(checked: tuple[str, Errors]) -> None:
    checker, found = checked
    expected = _marks(checker)
    assert len(expected) >= 8, "the files that must fail are not found"
    assert found == expected


def test_each_accepted_file_has_something_to_check() -> None:
    files = list(HERE.glob("accept_*.py"))
    assert files
    assert all("assert_type(" in path.read_text("utf-8") for path in files)


def _marks(checker: str) -> Errors:
    """Return the errors that the reject files ask of a checker."""
    marks: Errors = {}
    for path in HERE.glob("reject_*.py"):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            match = MARK.search(line)
            if match is not None:
                marks[path.name, number] = set(match[1 + CHECKERS.index(checker)].split(","))
    return marks


def _run_mypy(files: list[str]) -> Errors:
    """Run mypy as the project configures it."""
    answer = _run("-m", "mypy", "--output", "json", *files)
    errors: Errors = defaultdict(set)
    for line in answer.stdout.splitlines():
        error = json.loads(line)
        if error["severity"] == "error" and _is_ours(error["file"]):
            errors[Path(error["file"]).name, error["line"]].add(error["code"])
    return dict(errors)


def _run_pyright(files: list[str]) -> Errors:
    """Run pyright as the project configures it, on the tests' own Python."""
    answer = _run("-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *files)
    errors: Errors = defaultdict(set)
    for error in json.loads(answer.stdout)["generalDiagnostics"]:
        if error["severity"] == "error" and _is_ours(error["file"]):
            errors[Path(error["file"]).name, error["range"]["start"]["line"] + 1].add(error["rule"])
    return dict(errors)


def _is_ours(path: str) -> bool:
    """Tell whether the path lies in this folder; errors elsewhere are for `make types` to report."""
    return (ROOT / path).resolve().parent == HERE


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a checker in the root, so that it reads pyproject.toml."""
    answer = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=550, check=False
    )
    # 1: errors were found, which is what the reject files are for. Anything above: it did not run.
    assert answer.returncode in (0, 1), answer.stdout + answer.stderr
    return answer
