"""Who may import whom: the contracts of pyproject.toml hold, and each one sees what it is there to see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from npugrad.ops import OPERATORS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("protos", "server", "client")

# (contract id, module that gets the import, the import it must not have)
FORBIDDEN = [
    ("sides", "client/npugrad_client/_arrays.py", "import npugrad_server"),
    ("sides", "server/npugrad_server/config.py", "import npugrad_client"),
    ("sides", "protos/npugrad/dtypes.py", "import npugrad_client"),
    ("server-layers", "server/npugrad_server/worker/__init__.py", "import npugrad_server.pool"),
    ("server-layers", "server/npugrad_server/dispatch.py", "import npugrad_server.rpc"),
    ("grpc", "protos/npugrad/codec.py", "import grpc"),
    ("worker", "protos/npugrad/ops/_normalisation.py", "import rich"),
    ("grpc", "server/npugrad_server/pool/__init__.py", "import grpc.aio"),
    ("worker", "server/npugrad_server/worker/__init__.py", "import npugrad_server.config"),
    ("ctypes", "server/npugrad_server/worker/__init__.py", "import ctypes"),
    ("torch", "protos/npugrad/layout.py", "import torch"),
    ("torch", "client/npugrad_client/_arrays.py", "import torch"),
    ("jax", "client/npugrad_client/_arrays.py", "import jax"),
    ("otel", "client/npugrad_client/_transport.py", "import opentelemetry"),
    ("otel", "server/npugrad_server/rpc/funnel.py", "import opentelemetry.trace"),
    ("tools", "client/npugrad_client/_arrays.py", "import npugrad._tools"),
]


def test_all_contracts_are_kept() -> None:
    answer = _lint_imports(ROOT)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.slow
def test_every_forbidden_import_is_seen(tmp_path: Path) -> None:
    for source in SOURCES:
        shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for _, module, line in FORBIDDEN:
        with (tmp_path / module).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    answer = _lint_imports(tmp_path)
    assert answer.returncode != 0, answer.stdout
    _, _, rest = answer.stdout.partition("Broken contracts")
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    places = sorted((rest.index(f"\n{each['name']}\n"), each["id"]) for each in linter["contracts"])
    ends = [*(place for place, _ in places[1:]), len(rest)]
    told = {name: rest[place:end] for (place, name), end in zip(places, ends, strict=True)}
    for contract, module, line in FORBIDDEN:
        importer = ".".join(Path(module).with_suffix("").parts[1:]).removesuffix(".__init__")
        imported = line.removeprefix("import ")
        if not imported.startswith("npugrad"):  # of libraries the linter knows the name alone
            imported = imported.partition(".")[0]
        assert f" {importer} -> {imported} (l." in told[contract], (contract, module)


def test_contract_worker_and_server_load_no_more_than_they_need() -> None:
    """Validation without a server starts no gRPC runtime, and a worker in a fraction of the front's time.

    A library that is not safe to fork never enters a worker, and no start waits for the acceptance.
    """
    steps = ("npugrad, npugrad.codec", "npugrad_server.worker.__main__", "npugrad_server.cli")
    program = "import sys\n" + "".join(f"import {step}\nprint(*sys.modules)\n" for step in steps)
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    contract, worker, server = (set(line.split()) for line in answer.stdout.splitlines())
    assert "npugrad.codec" in contract
    assert not contract & {"grpc", *RECORDS}
    assert worker >= RECORDS, "at the start, and not while a call waits"
    assert server >= RECORDS
    heavy = {"grpc", "typer", "click", "rich", "pydantic", "pydantic_settings", "prometheus_client", "torch"}
    assert "npugrad_server.worker" in worker
    assert not heavy & {name.partition(".")[0] for name in worker}
    assert {"npugrad_server.app", "grpc"} <= server
    assert not {"torch", "torch_npu"} & server
    assert not [name for name in server if name.startswith("npugrad_server.acceptance.")]


RECORDS = {f"npugrad.ops.{name}" for name in OPERATORS}
COMMAND = "import sys; sys.argv[0] = 'npugrad'; from npugrad_client.cli import main; main()"


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--help"], {}),
        (["--version"], {}),
        (["call", "--help"], {}),
        (["info", "--nope"], {}),
        (["info", "--target", "host:abc"], {}),
        (["validate", "group_norm", "--local"], {}),
        ([], {"_NPUGRAD_COMPLETE": "complete_bash", "COMP_WORDS": "npugrad va", "COMP_CWORD": "1"}),
    ],
    ids=" ".join,
)
def test_help_completion_and_refusals_load_nothing_heavy(
    arguments: list[str], variables: dict[str, str]
) -> None:
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {COMMAND}"
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, **variables}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    loaded = set(answer.stderr.splitlines()[-1].split())
    assert "npugrad_client.cli" in loaded, answer.stderr
    assert not loaded & {"numpy", "grpc", "google.protobuf", *RECORDS}
    assert answer.stdout or answer.returncode == 2


def test_a_client_loads_no_record_before_a_call_and_no_more_than_that_of_the_call() -> None:
    program = """
        import sys
        from npugrad_client import Client
        import npugrad
        print(len(npugrad.OPERATORS), "group_norm_backward" in npugrad.OPERATORS, *sys.modules)
        assert npugrad.OPERATORS["group_norm_backward"].name == "group_norm_backward"
        print(*sys.modules)
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    before, after = (line.split() for line in answer.stdout.splitlines())
    assert before[:2] == [str(len(RECORDS)), "True"]
    assert not RECORDS & set(before)
    assert RECORDS & set(after) == {"npugrad.ops.group_norm_backward"}


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the tree at ``folder`` with that tree's own contracts."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    path = os.pathsep.join(str(folder / source) for source in SOURCES)
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "1000"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
