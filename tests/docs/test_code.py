"""The code of README and documentation runs as it stands.

The Python of a page is one program, block after block. What a page takes for granted, such as a model, is in
``before/PAGE.py``. A block that cannot run here has `<!-- not run: REASON -->` before its fence.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tests.client import programs
from tests.client.bench.made import forked_workers as forked_workers
from tests.client.bench.made import result as made_result
from tests.docs.pages import PAGES, ROOT, blocks, commands_of, python_of, text_of
from tests.fix_server import ServerProcess, StartServer
from tests.fix_tls import Certificates
from tests.server.test_cluster import node
from tests.server.test_cluster import text_of as cluster_of
from typer.testing import CliRunner

from npugrad import OPERATORS
from npugrad_client._cli.bench_status import FAILED, INVALID, MISSED
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
    shutil.copytree(certificates.folder, folder, dirs_exist_ok=True)
    for name in ("ca.pem", "ca.crt"):
        shutil.copy(certificates.authority, folder / name)


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


SHORT = ("--duration", "500ms", "--warm-up", "0s", "--allow-client-bound")
"""Of a load test. On a slow machine calls may then fail or objectives be missed, but it ran."""


def _shown() -> Iterator[Any]:
    """Each command that can run here: those of the quickstart, one of each other kind, the rest if deep."""
    kinds = set()
    for command in dict.fromkeys(line for page in (QUICKSTART, *PAGES) for line in commands_of(page)):
        kind = tuple(re.findall(r"^[a-z-]+| [a-z]+\b(?!\.)", command.partition(" -")[0])[:3])
        deep = kind in kinds and command not in commands_of(QUICKSTART)
        kinds.add(kind)
        if "acceptance" not in command:  # it needs an NPU; its own tests run it on the simulated CANN
            yield pytest.param(command, marks=pytest.mark.deep if deep else ())


@pytest.mark.slow
@pytest.mark.parametrize("command", list(_shown()))
def test_commands_run(
    command: str,
    server: ServerProcess,
    start_server: StartServer,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _write_call(tmp_path)
    _write_files(tmp_path, certificates)
    monkeypatch.chdir(tmp_path)
    for placeholder in ("127.0.0.1:50051", "ADDRESS"):
        command = command.replace(placeholder, server.address)
    if "--tls-ca" in command:
        far = start_server(*certificates.flags, credentials=certificates.credentials()).address
        near = far.replace("127.0.0.1", "localhost")
        command = command.replace("npu1:50051,npu2:50051", f"{far},{near}").replace("localhost:50051", near)
    program, *arguments = shlex.split(command)
    if program == "npugrad":
        _run_client(arguments, server)
    elif arguments[0] == "serve":
        _run_server(arguments[1:], certificates, start_server)
    else:
        free = ["--listen", "127.0.0.1:0", "--metrics-listen="] if arguments[0] == "check" else []
        result = CliRunner().invoke(server_app, [*arguments, *free], input=cluster_of(node()))
        assert result.exit_code == 0, result.output


def _run_client(arguments: list[str], server: ServerProcess) -> None:
    """The validated call breaks a rule, so that there is something to see."""
    statuses = {1} if arguments[0] == "validate" else {0}
    if arguments[0] == "bench" and arguments[1].startswith("-"):
        is_scenario = "--scenario" in arguments and "--find-capacity" not in arguments
        arguments += (*(("--rate", "20") if is_scenario else ()), *SHORT)
        statuses = {0, FAILED, MISSED, INVALID}
    result = CliRunner().invoke(client_app, arguments, env={"NPUGRAD_TARGET": server.address})
    assert result.exit_code in statuses, result.output
    assert not result.stderr
    assert result.exit_code != FAILED or "answers" in result.stdout or arguments[0] == "validate"
    files = {"-o", "--html", "--json", "--csv"}
    written = [name for flag, name in pairwise(arguments) if flag in files]
    assert all(Path(name).stat().st_size for name in written)


def _run_server(flags: list[str], certificates: Certificates, start_server: StartServer) -> None:
    """On a free port in place of the one it names, and with the paths of files: it starts elsewhere."""
    files = [str(Path(flag).resolve()) if Path(flag).exists() else flag for flag in flags]
    at = files.index("--listen") if "--listen" in files else len(files)
    pair = certificates.caller() if "--tls-client-ca" in files else None
    credentials = certificates.credentials(pair) if "--tls-key" in files else None
    start_server(*files[:at], *files[at + 2 :], credentials=credentials)


def _write_call(folder: Path) -> None:
    """The operands and the script that the commands are given."""
    record = OPERATORS["group_norm_backward"]
    call = record.build()
    arrays: dict[str, Any] = {**record.make_inputs(call, np.random.default_rng(1)), **call.attrs}
    np.savez(folder / "in.npz", **arrays)
    for name in ("a.json", "b.json"):
        (folder / name).write_text(made_result().as_json(), "utf-8")
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
