"""The Python of the client's page, up to its adapters, runs as pasted: one block after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from npugrad_client.cli import app

if TYPE_CHECKING:
    from tests.fix_server import ServerProcess
    from tests.fix_tls import Certificates

PAGE = (Path(__file__).resolve().parents[2] / "client" / "README.md").read_text(encoding="utf-8")
CORE = PAGE.partition("\n## PyTorch\n")[0]


def blocks() -> list[str]:
    """Its blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```$", CORE, re.MULTILINE | re.DOTALL)


def test_every_block_runs_after_the_ones_before_it(
    server: ServerProcess, certificates: Certificates, tmp_path: Path
) -> None:
    found = blocks()
    assert len(found) == 8
    assert "..." not in "".join(found)
    key, certificate = certificates.caller()
    for name, pem in (("client.key", key), ("client.pem", certificate)):
        (tmp_path / name).write_bytes(pem)
    (tmp_path / "ca.pem").write_bytes(Path(certificates.authority).read_bytes())
    script = tmp_path / "page.py"
    page = "\n".join(found).replace("127.0.0.1:50051", server.address)
    script.write_text(f"import os\n\nos.chdir({str(tmp_path)!r})\n{page}", encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "100/100" in done.stdout


def test_the_table_of_options_is_that_of_the_commands() -> None:
    table = PAGE.partition("| option of ")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(--[a-z-]+|NPUGRAD_[A-Z_]+)`", table))
    for command in ("info", "ops", "validate", "call"):
        said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
        assert named <= set(re.findall(r"--[a-z-]+|NPUGRAD_[A-Z_]+", said)), command
    assert len(named) == 10
