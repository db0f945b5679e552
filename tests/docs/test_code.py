"""The code of README and documentation runs as it stands.

The Python of a page is one program, block after block. What a page takes for granted, such as a model, is in
``before/PAGE.py``. A block that cannot run here has `<!-- not run: REASON -->` before its fence.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tests.docs.pages import PAGES, ROOT, blocks, commands_of, python_of, text_of
from tests.fix_server import ServerProcess
from tests.fix_tls import Certificates
from typer.testing import CliRunner

from npugrad import OPERATORS
from npugrad_client.cli import app as client_app
from npugrad_server.cli import app as server_app

BEFORE = Path(__file__).parent / "before"
WITH_PYTHON = [page for page in PAGES if python_of(page)]
COMMANDS = [(page, command) for page in PAGES for command in commands_of(page)]
QUICKSTART = "docs/quickstart.md"
PRINTED = {
    "README.md": [
        r"\(2, 32, 64, 64\) from cpu:0",
        r"161002 group_norm_backward: group: found 0; expected above 0",
        r"^group_norm_backward +sent +- +1 ",
    ],
    "docs/guides/python-client.md": ["100/100"],
    "docs/guides/pytorch.md": [r"^group_norm_backward +sent +- +2 "],
}
"""What the programs print, where their page says so."""


def _marks(page: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.torch] if "npugrad_client.torch" in text_of(page) else []


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, marks=_marks(page)) for page in WITH_PYTHON])
def test_python_runs(page: str, server: ServerProcess, certificates: Certificates, tmp_path: Path) -> None:
    before = BEFORE / f"{Path(page).stem}.py"
    source = (before.read_text("utf-8") if before.exists() else "") + python_of(page)
    libraries = [name for name in ("torch", "jax") if f"npugrad_client.{name}" in source]
    for name in libraries:
        pytest.importorskip(name)
    _write_files(tmp_path, certificates)
    script = tmp_path / "page.py"
    script.write_text(source.replace("127.0.0.1:50051", server.address), "utf-8")
    # Libraries of others may warn.
    command = [sys.executable, *(() if libraries else ("-W", "error")), script.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    assert libraries or not done.stderr
    for expected in PRINTED.get(page, ()):
        assert re.search(expected, done.stdout, re.MULTILINE), done.stdout


def _write_files(folder: Path, certificates: Certificates) -> None:
    """The files that pages name."""
    key, certificate = certificates.caller()
    for name, pem in (("client.key", key), ("client.pem", certificate)):
        (folder / name).write_bytes(pem)
    (folder / "ca.pem").write_bytes(Path(certificates.authority).read_bytes())


def test_what_is_printed_is_of_pages_that_run() -> None:
    assert PRINTED.keys() <= set(WITH_PYTHON)
    assert {path.stem for path in BEFORE.glob("*.py")} <= {Path(page).stem for page in WITH_PYTHON}


def test_every_block_says_what_it_is() -> None:
    known = {"", "python", "sh", "toml", "text", "promql", "yaml"}
    assert {block.language for page in PAGES for block in blocks(page)} <= known


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_have_the_options_that_pages_show(page: str, command: str) -> None:
    program, *arguments = shlex.split(command)
    found: Any = typer.main.get_command(client_app if program == "npugrad" else server_app)
    while arguments and arguments[0] in getattr(found, "commands", {}):
        found = found.commands[arguments.pop(0)]
    context = found.context_class(found, info_name=program, **found.context_settings)
    # Raises for an option that is not there, or one without its value.
    left = found.make_parser(context).parse_args(arguments)[1]
    assert left == [], page


@pytest.mark.parametrize("command", commands_of(QUICKSTART))
def test_commands_of_the_quickstart_run(
    command: str, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *arguments = shlex.split(command)
    if program == "npugrad-server":
        pytest.skip("every test of a server runs it")
    _write_call(tmp_path)
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "bench":
        arguments += ["--duration", "2s", "--allow-client-bound"]
    result = CliRunner().invoke(client_app, arguments, env={"NPUGRAD_TARGET": server.address})
    # The validated call is one that breaks rules, so that there is something to see.
    assert result.exit_code == (1 if arguments[0] == "validate" else 0), result.output
    assert not result.stderr
    if arguments[0] == "call":
        assert (tmp_path / "out.npz").exists()


def _write_call(folder: Path) -> None:
    """The operands and the script that the commands are given."""
    record = OPERATORS["group_norm_backward"]
    call = record.build()
    arrays: dict[str, Any] = {**record.make_inputs(call, np.random.default_rng(1)), **call.attrs}
    np.savez(folder / "in.npz", **arrays)
    (folder / "train.py").write_text(
        "import torch\ntorch.nn.GroupNorm(2, 4)(torch.randn(2, 4, 8)).square().sum().backward()\n", "utf-8"
    )


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(
        re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    )
    known = {name for line in targets for name in line.split()}
    for page in [*PAGES, "CONTRIBUTING.md", "tests/README.md"]:
        assert set(re.findall(r"`make ([a-z][a-z-]*[a-z])\b(?!-)", text_of(page))) <= known, page
