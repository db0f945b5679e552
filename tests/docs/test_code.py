"""The code of README and documentation runs as it stands.

The Python of a page is one program, block after block. What a page takes for granted, such as a model, is in
``before/PAGE.py``. A block that cannot run here has `<!-- not run: REASON -->` before its fence.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tests.client import programs
from tests.client.bench.made import forked_workers as forked_workers
from tests.docs.pages import PAGES, ROOT, blocks, commands_of, python_of, text_of
from tests.fix_server import ServerProcess
from tests.fix_tls import Certificates
from typer.testing import CliRunner

from npugrad import OPERATORS
from npugrad_client.cli import app as client_app
from npugrad_server.cli import app as server_app

BEFORE = Path(__file__).parent / "before"
WITH_PYTHON = [page for page in PAGES if "```python" in text_of(page) and python_of(page)]
QUICKSTART = "docs/quickstart.md"
PRINTED = {
    "README.md": [
        r"\(2, 32, 64, 64\) from cpu:0",
        r"161002 group_norm_backward: group: found 0; expected above 0",
        r"^group_norm_backward +sent +- +1 ",
    ],
    "docs/index.md": [r"\(2, 8, 16\) from cpu:0 cpu"],
    "docs/quickstart.md": [
        r"\(2, 3, 32, 48\) \(2, 16, 24, 2\)\ncomputed by cpu:0 cpu",
        r"161002 grid_sampler_2d_backward: interpolation_mode: found 7; expected 0 \(bilinear\) or 1",
    ],
    "docs/guides/python-client.md": ["100/100"],
    "docs/guides/pytorch.md": [r"^group_norm_backward +sent +- +2 "],
}
"""What the programs print, where their page says so."""


def _marks(page: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.torch] if "npugrad_client.torch" in text_of(page) else []


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, marks=_marks(page)) for page in WITH_PYTHON])
def test_python_runs(
    page: str,
    server: ServerProcess,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a process; what needs seconds to import stays in this one."""
    before = BEFORE / f"{Path(page).stem}.py"
    source = (before.read_text("utf-8") if before.exists() else "") + python_of(page)
    libraries = [name for name in ("torch", "jax") if f"npugrad_client.{name}" in source]
    for name in libraries:
        pytest.importorskip(name)
    _write_files(tmp_path, certificates)
    monkeypatch.chdir(tmp_path)
    source = source.replace("127.0.0.1:50051", server.address)
    if libraries:
        exec(compile(source, page, "exec", dont_inherit=True), {"__name__": "__main__"})
        printed = capsys.readouterr().out
    else:
        done = programs.run("import warnings; warnings.simplefilter('error')\n" + source)
        assert (done.returncode, done.stderr) == (0, "")
        printed = done.stdout
    for expected in PRINTED.get(page, ()):
        assert re.search(expected, printed, re.MULTILINE), printed


def _write_files(folder: Path, certificates: Certificates) -> None:
    """The files that pages name."""
    key, certificate = certificates.caller()
    for name, pem in (("client.key", key), ("client.pem", certificate)):
        (folder / name).write_bytes(pem)
    (folder / "ca.pem").write_bytes(Path(certificates.authority).read_bytes())


def test_every_block_says_what_it_is() -> None:
    assert PRINTED.keys() <= set(WITH_PYTHON)
    assert {path.stem for path in BEFORE.glob("*.py")} <= {Path(page).stem for page in WITH_PYTHON}
    known = {"", "python", "sh", "toml", "text", "promql", "yaml"}
    assert {block.language for page in PAGES for block in blocks(page)} <= known


def test_commands_have_the_options_that_pages_show() -> None:
    programs = {"npugrad": client_app, "npugrad-server": server_app}
    commands: dict[str, Any] = {name: typer.main.get_command(app) for name, app in programs.items()}
    shown = [(page, command) for page in PAGES for command in commands_of(page)]
    assert len(shown) > 20
    for page, command in shown:
        program, *arguments = shlex.split(command)
        found = commands[program]
        while arguments and arguments[0] in getattr(found, "commands", {}):
            found = found.commands[arguments.pop(0)]
        context = found.context_class(found, info_name=program, **found.context_settings)
        # Raises for an option that is not there, or one without its value.
        assert found.make_parser(context).parse_args(arguments)[1] == [], (page, command)


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
        arguments += ["--duration", "500ms", "--allow-client-bound"]
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
