"""`make test` is short, and leaves out no operator, type, mode, refusal, fault or command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.deep
def test_make_test_lacks_no_row() -> None:
    command = [sys.executable, "-m", "tests.breadth"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr + "\n".join(
        line for line in done.stdout.splitlines() if line.startswith("0\t")
    )
