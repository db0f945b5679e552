"""What `make lint` counts: the tree keeps the limits, and each limit sees what it is there to see."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npugrad._tools.limits import EXCEPTIONS, problems

ROOT = Path(__file__).resolve().parents[2]
TOOL = "protos/npugrad/_tools/limits.py"
ONE_LINE = "x = 1\n"


def plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def function(lines: int) -> str:
    """A function with so many lines of code below its docstring."""
    return 'def f(\n    a: int,\n) -> None:\n    """What it does."""\n' + "    x = 1\n" * lines


def run(root: Path) -> tuple[int, str]:
    """Exit status and complaints of the tool of a checkout."""
    done = subprocess.run([sys.executable, root / TOOL], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_the_tree_keeps_them() -> None:
    assert run(ROOT) == (0, "")


def test_the_command_fails_with_a_line_for_each(tmp_path: Path) -> None:
    plant(tmp_path, TOOL, "")
    shutil.copy(ROOT / TOOL, tmp_path / TOOL)
    plant(tmp_path, "client/npugrad_client/a.py", ONE_LINE * 401)
    status, told = run(tmp_path)
    assert status == 1
    assert "client/npugrad_client/a.py: found 401 lines; expected at most 400\n" in told


@pytest.mark.parametrize(
    ("folder", "text", "most"),
    [
        ("server/npugrad_server", ONE_LINE * 400, None),
        ("server/npugrad_server", ONE_LINE * 401, "found 401 lines; expected at most 400"),
        ("tests", ONE_LINE * 600, None),
        ("tests", ONE_LINE * 601, "found 601 lines; expected at most 600"),
    ],
)
def test_the_length_of_a_file(folder: str, text: str, most: str | None, tmp_path: Path) -> None:
    plant(tmp_path, f"{folder}/a.py", text)
    assert problems(tmp_path, {}) == ([] if most is None else [f"{folder}/a.py: {most}"])


def test_the_length_of_a_function_without_its_docstring(tmp_path: Path) -> None:
    plant(tmp_path, "client/npugrad_client/a.py", function(40))
    assert problems(tmp_path, {}) == []
    plant(tmp_path, "client/npugrad_client/a.py", function(41))
    expected = "client/npugrad_client/a.py:f: found 41 lines of code; expected at most 40"
    assert problems(tmp_path, {}) == [expected]


def test_a_public_class_name_stands_for_one_class(tmp_path: Path) -> None:
    plant(tmp_path, "protos/npugrad/a.py", "class Outcome:\n    pass\n\n\nclass _Own:\n    pass\n")
    plant(tmp_path, "server/npugrad_server/b.py", "class _Own:\n    pass\n\n\nFIGURE = 1\n")
    plant(tmp_path, "tests/test_a.py", "class Outcome:\n    pass\n")
    assert problems(tmp_path, {}) == []
    alias = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    Outcome = int\n"
    for second in ("class Outcome:\n    pass\n", "Outcome = int\n", "Outcome: type = int\n", alias):
        plant(tmp_path, "client/npugrad_client/c.py", second)
        (found,) = problems(tmp_path, {})
        assert found.startswith("Outcome: found 2 definitions; expected 1: ")
        assert "protos/npugrad/a.py:1" in found


def test_an_exception_holds_as_long_as_it_is_needed(tmp_path: Path) -> None:
    name, exceptions = "protos/npugrad/a.py", {"protos/npugrad/a.py:f": "it is a table"}
    plant(tmp_path, name, function(41))
    assert problems(tmp_path, exceptions) == []
    plant(tmp_path, name, function(3))
    assert problems(tmp_path, exceptions) == [f"{name}:f: an exception that nothing needs"]


def test_an_exception_is_for_one_function(tmp_path: Path) -> None:
    name, long = "protos/npugrad/a.py", function(41).replace("\n", "\n    ").rstrip(" ")
    plant(tmp_path, name, f"class A:\n    {long}\n\nclass B:\n    {long}")
    expected = [f"{name}:{each}.f: found 41 lines of code; expected at most 40" for each in "AB"]
    assert problems(tmp_path, {}) == expected
    assert problems(tmp_path, {f"{name}:A.f": "it is a table"}) == expected[1:]


def test_each_exception_has_a_reason() -> None:
    assert all(EXCEPTIONS.values())
