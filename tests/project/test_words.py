"""The check of `make lint` for words that the glossary has replaced."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npugrad._tools.words import problems, replaced

ROOT = Path(__file__).resolve().parents[2]
TOOL = "protos/npugrad/_tools/words.py"
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a glossary and nothing else."""
    plant(tmp_path, "docs/glossary.md", TABLE)
    return tmp_path


def plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def run(root: Path) -> tuple[int, str]:
    """Exit status and complaints of the tool of a checkout."""
    done = subprocess.run([sys.executable, root / TOOL], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_none_is_left() -> None:
    assert len(replaced()) >= 10
    assert run(ROOT) == (0, "")


def test_the_command_fails_with_a_line_for_each(checkout: Path) -> None:
    plant(checkout, TOOL, "")
    shutil.copy(ROOT / TOOL, checkout / TOOL)
    plant(checkout, "README.md", "# Pool\n\nThe ledger.\n")
    assert run(checkout) == (1, f"README.md:3: {LEDGER}\n")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("docs/security.md", "# A\n\nThe Ledger is\nof no\ninterest.\n", [f"3: {LEDGER}", f"4: {PHRASE}"]),
        ("docs/security.md", "# A\n\n```\nledger\n```\n`ledger` [b](ledger.md) ledgers entry\n", []),
        ("client/npugrad_client/a.py", '"""Ledger."""\n', [f"1: {LEDGER}"]),
        (
            "client/npugrad_client/a.py",
            'def f() -> None:\n    """X.\n\n    A ledger.\n    """\n',
            [f"4: {LEDGER}"],
        ),
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
            "try:\n    pass\nexcept OSError as entry:\n    pass\n",
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
    assert problems(checkout) == [f"{name}:{each}" for each in expected]


def test_a_row_says_where_it_is_rejected(checkout: Path) -> None:
    plant(checkout, "docs/glossary.md", TABLE.replace("| names |", "| somewhere |"))
    with pytest.raises(ValueError, match="'entry': found 'somewhere'; expected 'everywhere' or 'names'"):
        replaced(checkout)
