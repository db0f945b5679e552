"""The counts at the end of a run are the same in one process and in several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import pytest
from tests.summary import tally_of

@pytest.fixture(scope="session")
def tally(pytestconfig):
    return tally_of(pytestconfig, "some section")
"""
TESTS = """
def test_counts(tally):
    tally("calls", {number})
    tally("calls", 1)
    tally("what {number} says", "so many: {number}")
"""
EXPECTED = ["calls: 32", "what 10 says: so many: 10", "what 20 says: so many: 20"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_each_process_hands_in_its_counts(processes: int, tmp_path: Path) -> None:
    if processes:
        pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in (10, 20):
        (tmp_path / f"test_{number}.py").write_text(TESTS.format(number=number))
    command = [sys.executable, "-m", "pytest", "-p", "tests.summary", "-p", "no:cacheprovider", "-q"]
    # Its own settings: those of this repository are for its own tests.
    command += ["--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)]
    command += ["-n", str(processes), "--dist", "loadfile"] if processes else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, after = done.stdout.partition(" some section ")
    assert [line for line in after.splitlines()[1:] if ": " in line] == EXPECTED
