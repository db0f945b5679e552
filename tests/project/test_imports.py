"""Who may import whom: the contracts of pyproject.toml hold, and each one sees what it is there to see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the linter says of each contract, by id, when every forbidden import is there."""
    folder = tmp_path_factory.mktemp("broken")
    for source in SOURCES:
        shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for _, module, line in FORBIDDEN:
        with (folder / module).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    answer = _lint_imports(folder)
    assert answer.returncode != 0, answer.stdout
    _, _, rest = answer.stdout.partition("Broken contracts")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    places = sorted((rest.index(f"\n{each['name']}\n"), each["id"]) for each in contracts)
    ends = [*(place for place, _ in places[1:]), len(rest)]
    return {name: rest[place:end] for (place, name), end in zip(places, ends, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(("contract", "module", "line"), FORBIDDEN)
def test_a_forbidden_import_is_seen(contract: str, module: str, line: str, broken: dict[str, str]) -> None:
    importer = ".".join(Path(module).with_suffix("").parts[1:]).removesuffix(".__init__")
    imported = line.removeprefix("import ")
    if not imported.startswith("npugrad"):  # of libraries the linter knows the name alone
        imported = imported.partition(".")[0]
    assert f" {importer} -> {imported} (l." in broken[contract]


def test_a_worker_process_loads_no_grpc_and_no_command_line() -> None:
    """A worker starts in a fraction of the front's time, and a fork-unsafe library never enters it."""
    loaded = _modules_after("import npugrad_server.worker.__main__")
    heavy = {"grpc", "typer", "click", "rich", "pydantic", "pydantic_settings", "prometheus_client", "torch"}
    assert "npugrad_server.worker" in loaded
    assert not heavy & {name.partition(".")[0] for name in loaded}


def test_a_server_loads_no_acceptance() -> None:
    """Its start would wait for that."""
    loaded = _modules_after("import npugrad_server.cli")
    assert "npugrad_server.app" in loaded
    assert not [name for name in loaded if name.startswith("npugrad_server.acceptance.")]


def test_the_contract_loads_no_grpc() -> None:
    """Validation without a server must not start a gRPC runtime."""
    loaded = _modules_after("import npugrad, npugrad.codec")
    assert "npugrad.codec" in loaded
    assert "grpc" not in loaded


def _lint_imports(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the tree at ``folder`` with that tree's own contracts."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *arguments]
    path = os.pathsep.join(str(folder / source) for source in SOURCES)
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "1000"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def _modules_after(statement: str) -> set[str]:
    """Return the names of all modules that a fresh interpreter has loaded after ``statement``."""
    program = f"""
        import sys
        {statement}
        print("\\n".join(sys.modules))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())
