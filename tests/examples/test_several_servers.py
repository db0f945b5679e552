"""Of two servers one is killed, and the example loses nothing."""

from __future__ import annotations

import re

import pytest
from tests.examples.run import run_example
from tests.fix_server import ServerProcess


@pytest.mark.deep
@pytest.mark.slow
def test_no_call_is_lost_when_a_server_is_killed() -> None:
    done = run_example("several_servers.py", "--calls", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"^killed 127\.0\.0\.1:\d+ after 150 answers$", done.stdout, re.MULTILINE)
    (again,) = re.findall(r"^300 of 300 right, (\d+) sent again$", done.stdout, re.MULTILINE)
    assert int(again) >= 1, "nothing was in flight on the victim"


def test_servers_that_run_may_be_given_and_a_lost_one_among_them(server: ServerProcess) -> None:
    lost = "unix:/nonexistent/npugrad.sock"
    done = run_example("several_servers.py", "--targets", lost, server.address, "--calls", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 of 20 right" in done.stdout
    assert "killed" not in done.stdout


def test_no_server_at_all_fails() -> None:
    assert run_example("several_servers.py", "--targets", "no.such.invalid:1", "--calls", "2").returncode != 0
