"""What is shipped: the wheel's contents, its metadata, the floors, and a client install that stays light."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import zipfile
from email.parser import HeaderParser
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import npugrad

if TYPE_CHECKING:
    from email.message import Message

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"npugrad", "npugrad_server", "npugrad_client"}
BASE = {
    "grpcio",
    "grpcio-status",
    "googleapis-common-protos",
    "protobuf",
    "numpy",
    "ml-dtypes",
    "typer",
    "rich",
}
HEAVY_EXTRAS = {"server", "torch", "jax", "npu", "otel", "bench", "demo"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return the wheel that a user would install, opened."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    # Compiling the kernels takes longer than all else here; tests/server/kernels builds and loads them.
    without = {**os.environ, "NPUGRAD_BUILD_KERNELS": "0"}
    built = subprocess.run(
        command, cwd=ROOT, env=without, capture_output=True, text=True, timeout=60, check=False
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    """Return the wheel's METADATA headers."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(wheel.read(name).decode())


def test_wheel_holds_exactly_the_three_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_wheel_holds_every_module_of_the_packages(wheel: zipfile.ZipFile) -> None:
    roots = [ROOT / "protos", ROOT / "server", ROOT / "client"]
    modules = {path.relative_to(root).as_posix() for root in roots for path in root.glob("npugrad*/**/*.py*")}
    expected = {name for name in modules if "_tools/" not in name and name.endswith((".py", ".pyi"))}
    shipped = {name for name in wheel.namelist() if re.search(r"\.pyi?$", name)}
    assert shipped == expected


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_say_that_they_are_typed(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_wheel_ships_protos_for_other_languages(wheel: zipfile.ZipFile) -> None:
    expected = {f"npugrad/v1/{path.name}" for path in (ROOT / "protos/npugrad/v1").glob("*.proto")}
    assert expected
    assert expected <= set(wheel.namelist())


def test_source_roots_have_no_loose_modules() -> None:
    loose = [path for root in ("protos", "server", "client") for path in (ROOT / root).glob("*.py")]
    assert loose == [], "a module directly in a source root would land beside other people's packages"


def test_base_install_needs_no_heavy_library(metadata: Message) -> None:
    base = {canonicalize_name(each.name) for each in _requirements(metadata, extra=None)}
    assert base == BASE


def test_every_user_extra_is_declared(metadata: Message) -> None:
    assert {*HEAVY_EXTRAS, "dev"} == set(metadata.get_all("Provides-Extra", []))


def test_floors_are_those_of_the_generator(metadata: Message) -> None:
    floors = {each.name: each.specifier for each in _requirements(metadata, extra=None)}
    generated = sorted((ROOT / "protos/npugrad/v1").glob("*_pb2.py"))
    assert generated
    for path in generated:
        match = re.search(r"^# Protobuf Python Version: (\S+)$", path.read_text("utf-8"), re.MULTILINE)
        assert match is not None, path.name
        assert str(floors["protobuf"]) == f">={match[1]}", f"{path.name} was made by protobuf {match[1]}"
    for path in generated[0].parent.glob("*_pb2_grpc.py"):
        match = re.search(r"^GRPC_GENERATED_VERSION = '(\S+)'$", path.read_text("utf-8"), re.MULTILINE)
        assert match is not None, path.name
        assert str(floors["grpcio"]) == f">={match[1]}", f"{path.name} was made by grpcio-tools {match[1]}"


def test_package_knows_its_version(metadata: Message) -> None:
    assert metadata["Version"] == npugrad.__version__


def test_changelog_tells_of_this_version(metadata: Message) -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", text, re.MULTILINE)
    assert "## [Unreleased]" in text
    # Before the first release the version is what Unreleased will become.
    assert not released or metadata["Version"] == released[0]


@pytest.mark.parametrize(
    ("script", "module"), [("npugrad", "npugrad_client.cli"), ("npugrad-server", "npugrad_server.cli")]
)
def test_command_lines_are_declared_and_answer(wheel: zipfile.ZipFile, script: str, module: str) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert f"{script} = {module}:main" in wheel.read(name).decode()
    run = f"import sys; sys.argv[:] = [{script!r}, '--help']; from {module} import main; main()"
    answer = _python(run)
    assert answer.returncode == 0, answer.stderr
    assert "Usage" in answer.stdout


def test_client_imports_with_nothing_but_the_base_install() -> None:
    """The client is what goes onto other people's hosts: no torch, no server library, no plotting."""
    blocked = sorted(_modules_outside_base())
    assert {"torch", "prometheus_client", "pydantic_settings", "structlog", "grpc_health"} <= set(blocked)
    answer = _python(
        f"""
        import sys
        from importlib.abc import MetaPathFinder

        class Absent(MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {blocked!r}:
                    raise ModuleNotFoundError(f"{{name}} is not part of the base install", name=name)
                return None

        sys.meta_path.insert(0, Absent())
        import npugrad, npugrad_client, npugrad_client.cli
        for public in npugrad_client.__all__:
            getattr(npugrad_client, public)
        """
    )
    assert answer.returncode == 0, answer.stderr


def _requirements(metadata: Message, extra: str | None) -> list[Requirement]:
    """Return the requirements that hold with ``extra`` and would not without it; None: the base ones."""
    lines = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    if extra is None:
        return [each for each in lines if each.marker is None]
    return [each for each in lines if each.marker and each.marker.evaluate({"extra": extra})]


def _modules_outside_base() -> set[str]:
    """Return the top-level modules installed here that `pip install npugrad` alone would not bring."""
    base = _closure(BASE)
    modules: set[str] = set()
    kept = set(PACKAGES)
    for distribution in distributions():
        tops = {path.parts[0].partition(".")[0] for path in distribution.files or () if path.suffix == ".py"}
        ours = canonicalize_name(distribution.name) in {*base, "npugrad"}
        (kept if ours else modules).update(tops)
    return modules - kept


def _closure(names: set[str]) -> set[str]:
    """Return the distributions that ``names`` need, themselves included, as installed here."""
    done: set[str] = set()
    todo = set(names)
    while todo:
        name = todo.pop()
        done.add(name)
        for line in requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo |= {canonicalize_name(requirement.name)} - done
    return done


def _python(program: str) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a fresh interpreter that sees the three packages."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
