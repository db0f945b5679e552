"""The quickstart gets a right gradient and shows a refusal."""

from __future__ import annotations

from tests.examples.run import run_example
from tests.fix_server import ServerProcess


def test_gradient_is_right_and_the_refusal_has_its_number(server: ServerProcess) -> None:
    done = run_example("quickstart.py", "--target", server.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "grad_input (2, 8, 6, 6) from cpu:0" in done.stdout
    assert "refused with 161002: group_norm_backward: c, group: found" in done.stdout


def test_unreachable_service_fails() -> None:
    assert run_example("quickstart.py", "--target", "no.such.invalid:1").returncode != 0
