"""The examples in other languages get the bits and the refusals that the Python client gets, either way."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.examples import foreign
from tests.fix_server import ServerProcess

from npugrad_client import Client, InvalidOperand

pytestmark = pytest.mark.slow


@pytest.fixture(params=["node", "cpp", "go"])
def command(request: pytest.FixtureRequest) -> list[str]:
    """What runs the example; skips where its toolchain could not be had."""
    try:
        return foreign.command(request.param)
    except foreign.Unavailable as error:
        pytest.skip(str(error))


def run(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)


def tensor(*shape: int) -> Any:
    """What the examples send, made as they make it."""
    numbers = np.arange(np.prod(shape)) * 37 % 101 / 50 - 1
    return numbers.astype(np.float32).reshape(shape)


def test_bits_and_refusals_are_those_of_python(
    command: list[str], server: ServerProcess, tmp_path: Path
) -> None:
    operands: dict[str, Any] = {
        "grad_output": tensor(1, 3, 64, 64),
        "input": tensor(1, 3, 512, 512),
        "grid": tensor(1, 64, 64, 2),
        "padding_mode": 0,
        "align_corners": False,
        "output_mask": (True, True),
    }
    with Client(server.address) as client:
        grads = client.grid_sampler_2d_backward(interpolation_mode=0, **operands)
        with pytest.raises(InvalidOperand) as refused:
            client.grid_sampler_2d_backward(interpolation_mode=7, **operands)
    expected = grads.input_grad.tobytes() + grads.grid_grad.tobytes()
    assert np.any(grads.input_grad)
    assert np.any(grads.grid_grad)

    done = run(command, server.address, str(tmp_path / "gradients"))
    assert (done.returncode, done.stderr) == (0, "")
    error = refused.value
    (rule,) = error.violations
    refusal = f"refused: {error.reason} {error.code} {rule.id}: found {rule.found}; expected {rule.expected}"
    assert done.stdout.splitlines() == [
        f"unary: {len(expected)} bytes from cpu:0",
        "streamed: the same bits",
        refusal,  # of the unary call
        refusal,  # of the streamed one
    ]
    assert (tmp_path / "gradients").read_bytes() == expected


def test_nobody_there(command: list[str], tmp_path: Path) -> None:
    done = run(command, f"unix:{tmp_path}/none.sock")
    assert done.returncode == 1
    assert done.stderr.startswith("not from the service: ")
    assert done.stdout == ""
