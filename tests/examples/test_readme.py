"""The README's Python and its shell examples run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from npugrad import OPERATORS
from npugrad_client.cli import app

if TYPE_CHECKING:
    from tests.fix_server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    """The code blocks of the README with this language after the fence."""
    pieces = re.split(r"^```", README, flags=re.MULTILINE)
    inside = (piece.partition("\n") for piece in pieces[1::2])
    return [text for head, _, text in inside if head == language]


COMMANDS = [
    line.split(" #")[0].strip()
    for block in _blocks("")
    for line in block.splitlines()
    if line.startswith("npugrad ")
]


def test_quickstart_runs(server: ServerProcess, tmp_path: Path) -> None:
    source, _ = _blocks("python")  # the other one is tested with the torch adapter
    assert len(source.strip().splitlines()) <= 22
    script = tmp_path / "quickstart.py"
    script.write_text(source.replace("127.0.0.1:50051", server.address), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "(2, 32, 64, 64) from cpu:0" in done.stdout
    assert "161002 group_norm_backward: group: found 0; expected above 0" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_shell_example_runs(
    command: str, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = OPERATORS["group_norm_backward"]
    call = record.build()
    arrays: dict[str, Any] = {**record.make_inputs(call, np.random.default_rng(1)), **call.attrs}
    np.savez(tmp_path / "in.npz", **arrays)
    (tmp_path / "train.py").write_text(
        "import torch\ntorch.nn.GroupNorm(2, 4)(torch.randn(2, 4, 8)).square().sum().backward()\n", "utf-8"
    )
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)[1:]
    if arguments[0] == "bench":
        arguments += ["--duration", "0.3s", "--allow-client-bound"]
    result = CliRunner().invoke(app, arguments, env={"NPUGRAD_TARGET": server.address})
    # The validated call is one that breaks rules, so that there is something to see.
    assert result.exit_code == (1 if arguments[0] == "validate" else 0), result.output
    assert not result.stderr
    if arguments[0] == "call":
        assert (tmp_path / "out.npz").exists()
