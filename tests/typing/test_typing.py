"""The public surface as type checkers see it: `accept_*.py` must pass, `reject_*.py` fail where they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = sorted(HERE.glob("accept_*.py")) + sorted(HERE.glob("reject_*.py"))
CHECKERS = ("mypy", "pyright")
MARK = re.compile(r"# rejected: mypy\[([\w,-]+)\] pyright\[([\w,-]+)\]$")


@pytest.mark.slow
@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.deep), "pyright"])
def test_checkers_find_exactly_what_the_files_say(checker: str) -> None:
    expected = {}
    for path in FILES:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            if (match := MARK.search(line)) is not None:
                expected[path.name, number] = set(match[1 + CHECKERS.index(checker)].split(","))
    assert len(expected) >= 30, "the files that must fail are not found"
    found = defaultdict(set)
    for name, line_number, code in (_mypy if checker == "mypy" else _pyright)():
        if (ROOT / name).resolve().parent == HERE:  # errors elsewhere are for `make types` to report
            found[Path(name).name, line_number].add(code)
    assert found == expected


def test_each_accepted_file_has_something_to_check() -> None:
    accepted = [path.read_text("utf-8") for path in FILES if path.name.startswith("accept_")]
    assert len(accepted) == 3
    assert all("assert_type(" in text for text in accepted)


Errors = Iterator[tuple[str, int, str]]
"""File, line and the checker's own code of each."""


def _mypy() -> Errors:
    """As the project configures it."""
    files = [path for path in FILES if path.name != "accept_torch.py"]
    for line in _run("mypy", "--output", "json", *files).splitlines():
        error = json.loads(line)
        if error["severity"] == "error":
            yield error["file"], error["line"], error["code"]


def _pyright() -> Errors:
    """As the project configures it, with the tests' own Python."""
    answer = _run("pyright", "--outputjson", "--pythonpath", sys.executable, *FILES)
    for error in json.loads(answer)["generalDiagnostics"]:
        if error["severity"] == "error":
            yield error["file"], error["range"]["start"]["line"] + 1, error["rule"]


def _run(checker: str, *arguments: str | Path) -> str:
    """Runs a checker in the root, so that it reads pyproject.toml."""
    command = [sys.executable, "-m", checker, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    # 1: errors were found, which is what the reject files are for. Anything above: it did not run.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout
