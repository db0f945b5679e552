"""What a run of the tests counts: the same in one process and in several, and what `make test` leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import breadth

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
@pytest.mark.parametrize("processes", [(), ("-p", "xdist.plugin", "-n", "2", "--dist", "loadfile")])
def test_each_process_hands_in_its_counts(processes: tuple[str, ...], tmp_path: Path) -> None:
    if processes:
        pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in (10, 20):
        (tmp_path / f"test_{number}.py").write_text(TESTS.format(number=number))
    # Its own settings and no other plugins: those of this repository are for its own tests.
    options = ("-p", "tests.summary", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null")
    command = [sys.executable, "-m", "pytest", "-q", *options, *processes, str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, after = done.stdout.partition(" some section ")
    assert [line for line in after.splitlines()[1:] if ": " in line] == EXPECTED


@pytest.mark.slow
@pytest.mark.deep
def test_make_test_lacks_no_row(request: pytest.FixtureRequest) -> None:
    """It is short, and leaves out no operator, type, mode, refusal, fault or command."""
    config, option = request.config, request.config.option
    if (
        [*config.args] == config.getini("testpaths")
        and option.markexpr in config.getini("addopts")
        and not option.keyword
    ):
        found = breadth.Breadth()
        found.pytest_collection_finish(request.session)
        assert found.missing() == []
        return
    command = [sys.executable, "-m", "tests.breadth"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    missing = [line for line in done.stdout.splitlines() if line.startswith("0\t")]
    assert done.returncode == 0, done.stderr + "\n".join(missing)
