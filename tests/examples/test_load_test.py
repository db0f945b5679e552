"""The example measures a server of known service time; its exit status says whether objectives were met."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.examples.run import run_example
from tests.fix_server import ServerProcess, run_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Each call takes 60 ms by a timer, whatever else the machine does."""
    with run_server(tmp_path_factory.mktemp("known") / "server.log", devices="test:2?ms=60") as running:
        yield running


@pytest.mark.deep
def test_objectives_that_are_met(known: ServerProcess, tmp_path: Path) -> None:
    load = ["--rate", "10", "--duration", "3s", "--shared", "--slo", "p50=30s,errors=0.1%"]
    done = run_example("load_test.py", "--target", known.address, "--out", str(tmp_path), *load)
    assert done.stdout.count("met: p50: ") == 3, done.stdout + done.stderr
    assert (
        "operands made by the server, not sent: grid_sampler_2d_backward float32 medium recipe" in done.stdout
    )
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    verdicts = {0: "no difference", 3: "slower", 4: "inconclusive"}  # the machine is shared
    assert verdicts[done.returncode] in done.stdout or "faster" in done.stdout


def test_a_missed_objective_ends_it(known: ServerProcess, tmp_path: Path) -> None:
    load = ["--rate", "10", "--duration", "1s", "--shared", "--slo", "p50=30ms"]
    done = run_example("load_test.py", "--target", known.address, "--out", str(tmp_path), *load)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count("$ npugrad bench") == 1
    assert "MISSED: p50: " in done.stdout


def test_nobody_there(tmp_path: Path) -> None:
    done = run_example("load_test.py", "--target", f"unix:{tmp_path}/none.sock", "--out", str(tmp_path))
    assert done.returncode == 6
    assert "cannot reach" in done.stderr
