"""The asynchronous quickstart: many calls at once, all right, one given up."""

from __future__ import annotations

from tests.examples.run import run_example
from tests.fix_server import StartServer


def test_all_gradients_are_right(start_server: StartServer) -> None:
    # Large enough for the call that is given up; it must not be done within 50 ms.
    server = start_server("--input-arena-bytes", "640MiB", "--output-arena-bytes", "256MiB")
    done = run_example("quickstart_async.py", "--target", server.address, "--calls", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for said in ("30 calls side by side: all right", "in a batch, 8 at a time: all right", "one: right"):
        assert said in done.stdout


def test_unreachable_service_fails() -> None:
    assert run_example("quickstart_async.py", "--target", "no.such.invalid:1").returncode != 0
