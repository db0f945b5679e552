"""What `make lint` counts and looks for: the tree keeps it, and each check sees what it is there to see."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npugrad._tools import limits, record_lines, words

ROOT = Path(__file__).resolve().parents[2]
LIMITS, WORDS = (f"protos/npugrad/_tools/{name}.py" for name in ("limits", "words"))
ONE_LINE = "x = 1\n"
TABLE = """# Glossary

## Replaced words

| word | use instead | where |
| --- | --- | --- |
| ledger | admission control | everywhere |
| of no interest | irrelevant | everywhere |
| entry | ticket | names |
"""
LEDGER, PHRASE, ENTRY = (
    "'ledger'; use 'admission control'",
    "'of no interest'; use 'irrelevant'",
    "'entry'; use 'ticket'",
)


def plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def function(lines: int) -> str:
    """A function with so many lines of code below its docstring."""
    return 'def f(\n    a: int,\n) -> None:\n    """What it does."""\n' + "    x = 1\n" * lines


def run(root: Path, tool: str) -> tuple[int, str]:
    """Exit status and complaints of a tool of a checkout."""
    done = subprocess.run([sys.executable, root / tool], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a glossary, the tools and nothing else."""
    plant(tmp_path, "docs/glossary.md", TABLE)
    for tool in (LIMITS, WORDS):
        plant(tmp_path, tool, "")
        shutil.copy(ROOT / tool, tmp_path / tool)
    return tmp_path


def test_the_commands_fail_with_a_line_for_each(checkout: Path) -> None:
    """That the repository keeps both is for `make lint`."""
    assert len(words.replaced()) >= 10
    plant(checkout, "client/npugrad_client/a.py", ONE_LINE * 401)
    plant(checkout, "README.md", "# Pool\n\nThe ledger.\n")
    status, told = run(checkout, LIMITS)
    assert status == 1
    assert "client/npugrad_client/a.py: found 401 lines; expected at most 400\n" in told
    assert run(checkout, WORDS) == (1, f"README.md:3: {LEDGER}\n")


# --------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(("folder", "most"), [("server/npugrad_server", 400), ("tests", 600)])
def test_the_length_of_a_file(folder: str, most: int, tmp_path: Path) -> None:
    plant(tmp_path, f"{folder}/a.py", ONE_LINE * most)
    assert limits.problems(tmp_path, {}) == []
    plant(tmp_path, f"{folder}/a.py", ONE_LINE * (most + 1))
    expected = f"{folder}/a.py: found {most + 1} lines; expected at most {most}"
    assert limits.problems(tmp_path, {}) == [expected]


@pytest.mark.parametrize("around", ["", "try:\n    pass\nexcept OSError:\n", "if x:\n    pass\nelse:\n"])
def test_the_length_of_a_function_without_its_docstring(around: str, tmp_path: Path) -> None:
    def found(lines: int) -> list[str]:
        inner = function(lines).replace("\n", "\n    ").rstrip(" ") if around else function(lines)
        plant(tmp_path, "client/npugrad_client/a.py", around + "    " * bool(around) + inner)
        return limits.problems(tmp_path, {})

    assert found(40) == []
    assert found(41) == ["client/npugrad_client/a.py:f: found 41 lines of code; expected at most 40"]


def test_a_public_class_name_stands_for_one_class(tmp_path: Path) -> None:
    plant(tmp_path, "protos/npugrad/a.py", "class Outcome:\n    pass\n\n\nclass _Own:\n    pass\n")
    plant(tmp_path, "server/npugrad_server/b.py", "class _Own:\n    pass\n\n\nFIGURE = 1\n")
    plant(tmp_path, "tests/test_a.py", "class Outcome:\n    pass\n")
    assert limits.problems(tmp_path, {}) == []
    alias = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    Outcome = int\n"
    for second in ("class Outcome:\n    pass\n", "Outcome = int\n", "Outcome: type = int\n", alias):
        plant(tmp_path, "client/npugrad_client/c.py", second)
        (found,) = limits.problems(tmp_path, {})
        assert found.startswith("Outcome: found 2 definitions; expected 1: ")
        assert "protos/npugrad/a.py:1" in found


def test_an_exception_is_for_one_function_holds_as_long_as_it_is_needed_and_has_a_reason(
    tmp_path: Path,
) -> None:
    name, exceptions = "protos/npugrad/a.py", {"protos/npugrad/a.py:f": "it is a table"}
    plant(tmp_path, name, function(41))
    assert limits.problems(tmp_path, exceptions) == []
    plant(tmp_path, name, function(3))
    assert limits.problems(tmp_path, exceptions) == [f"{name}:f: an exception that nothing needs"]
    long = function(41).replace("\n", "\n    ").rstrip(" ")
    plant(tmp_path, name, f"class A:\n    {long}\n\nclass B:\n    {long}")
    expected = [f"{name}:{each}.f: found 41 lines of code; expected at most 40" for each in "AB"]
    assert limits.problems(tmp_path, {}) == expected
    assert limits.problems(tmp_path, {f"{name}:A.f": "it is a table"}) == expected[1:]
    assert all(limits.EXCEPTIONS.values())


# ---------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("docs/security.md", "# A\n\nThe Ledger is\nof no\ninterest.\n", [f"3: {LEDGER}", f"4: {PHRASE}"]),
        ("docs/security.md", "# A\n\n```\nledger\n```\n`ledger` [b](ledger.md) ledgers entry\n", []),
        ("client/npugrad_client/a.py", '"""Ledger."""\n', [f"1: {LEDGER}"]),
        ("client/npugrad_client/a.py", 'def f():\n    """X.\n\n    A ledger.\n    """\n', [f"4: {LEDGER}"]),
        ("client/npugrad_client/a.py", 'class _A:\n    """Ledger."""\n\n# ledger\nledger = 1\n', []),
        ("server/npugrad_server/pool/a.py", "class LastEntry:\n    pass\n", [f"1: {ENTRY}"]),
        ("server/npugrad_server/pool/a.py", "def f(first_entry: int) -> None: ...\n", [f"1: {ENTRY}"]),
        (
            "server/npugrad_server/pool/a.py",
            "a.last_entry = 1\nENTRY = entry\n",
            [f"1: {ENTRY}", f"2: {ENTRY}"],
        ),
        ("server/npugrad_server/pool/entry.py", "x = 1\n", [f"1: {ENTRY}"]),
        ("server/npugrad_server/pool/a.py", "from a import b as entry\n", [f"1: {ENTRY}"]),
        (
            "server/npugrad_server/pool/a.py",
            "try:\n    x\nexcept OSError as entry:\n    x\n",
            [f"3: {ENTRY}"],
        ),
        ("client/npugrad_client/a.py", 'X = 1\n"""The ledger."""\n', [f"2: {LEDGER}"]),
        ("client/npugrad_client/a.py", '_X = 1\n"""The ledger."""\n', []),
        ("server/README.md", "The ledger.\n", [f"1: {LEDGER}"]),
        ("server/npugrad_server/pool/a.py", "f(entry.reentry)\n", []),
    ],
)
def test_where_a_word_is_rejected(name: str, text: str, expected: list[str], checkout: Path) -> None:
    plant(checkout, name, text)
    assert words.problems(checkout) == [f"{name}:{each}" for each in expected]


def test_a_row_says_where_it_is_rejected(checkout: Path) -> None:
    plant(checkout, "docs/glossary.md", TABLE.replace("| names |", "| somewhere |"))
    with pytest.raises(ValueError, match="'entry': found 'somewhere'; expected 'everywhere' or 'names'"):
        words.replaced(checkout)


def test_records_stay_as_short_as_they_are() -> None:
    """Lines of the first six records, of their workloads, and of what all records are written in."""
    most = {"records": 1400, "workloads": 385, "vocabulary": 1370, "derivation": 290}
    assert {what: number for what, number in record_lines.counted().items() if number > most[what]} == {}
    assert max(record_lines.operators().values()) <= 260
