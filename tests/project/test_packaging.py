"""What is shipped: two distributions without a common file, their metadata, and fresh environments."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Mapping
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.project.distributions import CLIENT, PARTS, SERVER, Environment, build, indexable

import npugrad
import npugrad_client
import npugrad_server

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {CLIENT: ("npugrad", "npugrad_client"), SERVER: ("npugrad_server",)}
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
DEMO = (
    "npugrad demo: the service is not installed: pip install 'npugrad[server]', "
    "or name a running one with --target\n"
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with sdist and wheel of both, the wheels without kernels: they take a minute."""
    made = tmp_path_factory.mktemp("dist")
    for folder in PARTS.values():
        build(folder, made, "sdist", "wheel", NPUGRAD_BUILD_KERNELS="0")
    return made


@pytest.fixture(scope="module")
def wheels(dist: Path) -> dict[str, zipfile.ZipFile]:
    """Return the wheels that users would install, opened, by the name of the distribution."""
    return {name: zipfile.ZipFile(next(dist.glob(f"{name.replace('-', '_')}-*.whl"))) for name in PARTS}


@pytest.fixture(scope="module")
def metadata(wheels: Mapping[str, zipfile.ZipFile]) -> dict[str, Message]:
    """Return the METADATA headers of the wheels."""
    found = {}
    for key, wheel in wheels.items():
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        found[key] = HeaderParser().parsestr(wheel.read(name).decode())
    return found


# ---------------------------------------------------------------------------------------- what is in them


@pytest.mark.parametrize("name", PARTS)
def test_wheel_holds_exactly_its_packages(wheels: Mapping[str, zipfile.ZipFile], name: str) -> None:
    tops = {file.split("/")[0] for file in wheels[name].namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*PACKAGES[name]}


def test_no_file_belongs_to_two_wheels(wheels: Mapping[str, zipfile.ZipFile]) -> None:
    client, server = (set(wheels[name].namelist()) for name in PARTS)
    assert client & server == set()


@pytest.mark.parametrize("name", PARTS)
def test_wheel_holds_every_module_of_the_packages(wheels: Mapping[str, zipfile.ZipFile], name: str) -> None:
    roots = {CLIENT: [ROOT / "protos", ROOT / "client"], SERVER: [ROOT / "server"]}[name]
    modules = {path.relative_to(root).as_posix() for root in roots for path in root.glob("npugrad*/**/*.py*")}
    expected = {file for file in modules if "_tools/" not in file and file.endswith((".py", ".pyi"))}
    shipped = {file for file in wheels[name].namelist() if re.search(r"\.pyi?$", file)}
    assert shipped == expected


@pytest.mark.parametrize("name", PARTS)
def test_packages_say_that_they_are_typed(wheels: Mapping[str, zipfile.ZipFile], name: str) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES[name]} <= set(wheels[name].namelist())


def test_wheel_ships_protos_for_other_languages(wheels: Mapping[str, zipfile.ZipFile]) -> None:
    expected = {f"npugrad/v1/{path.name}" for path in (ROOT / "protos/npugrad/v1").glob("*.proto")}
    assert expected
    assert expected <= set(wheels[CLIENT].namelist())


def test_source_roots_have_no_loose_modules() -> None:
    loose = [path for root in ("protos", "server", "client") for path in (ROOT / root).glob("*.py")]
    assert loose == [], "a module directly in a source root would land beside other people's packages"


def test_source_distribution_of_the_server_builds_the_kernels(dist: Path) -> None:
    (path,) = dist.glob("npugrad_server-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT / "server").as_posix() for path in (ROOT / "server/kernels").glob("*.*")}
    assert {"LICENSE", "pyproject.toml", *sources} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_both_ship_the_same_license() -> None:
    assert (ROOT / "server/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_index_would_take_them(dist: Path) -> None:
    assert indexable(dist) == 4


# --------------------------------------------------------------------------------------------- metadata


def test_client_is_for_any_machine(dist: Path) -> None:
    assert [path.name for path in dist.glob("npugrad-*.whl")] == [
        f"npugrad-{npugrad.__version__}-py3-none-any.whl"
    ]


def test_base_install_needs_no_heavy_library(metadata: Mapping[str, Message]) -> None:
    base = {canonicalize_name(each.name) for each in _requirements(metadata[CLIENT], extra=None)}
    assert base == BASE


def test_every_user_extra_is_declared(metadata: Mapping[str, Message]) -> None:
    assert {*HEAVY_EXTRAS, "dev"} == set(metadata[CLIENT].get_all("Provides-Extra", []))


def test_floors_are_those_of_the_generator(metadata: Mapping[str, Message]) -> None:
    floors = {each.name: each.specifier for each in _requirements(metadata[CLIENT], extra=None)}
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


def test_all_say_one_version(metadata: Mapping[str, Message]) -> None:
    versions = {part["Version"] for part in metadata.values()}
    packages = (npugrad, npugrad_client, npugrad_server)
    assert versions == {package.__version__ for package in packages} == {npugrad.__version__}


def test_both_link_to_the_vendors_sources(metadata: Mapping[str, Message]) -> None:
    client, server = ([*part.get_all("Project-URL", [])] for part in (metadata[CLIENT], metadata[SERVER]))
    assert client == server
    for line in client:
        label, _, url = line.partition(", ")
        assert 0 < len(label) <= 32, "what an index accepts"
        assert url.startswith("https://gitcode.com/cann/")
    found = {line.rpartition("/")[2] for line in client}
    assert found == {"ops-cv", "ops-nn", "ops-transformer"}


def test_each_needs_the_other_in_its_own_version(metadata: Mapping[str, Message]) -> None:
    version = npugrad.__version__
    (contract,) = (each for each in _requirements(metadata[SERVER], extra=None) if each.name == CLIENT)
    (server,) = _requirements(metadata[CLIENT], extra="server")
    (npu,) = _requirements(metadata[CLIENT], extra="npu")
    assert [str(each.specifier) for each in (contract, server, npu)] == [f"=={version}"] * 3
    assert [(each.name, each.extras) for each in (server, npu)] == [(SERVER, set()), (SERVER, {"npu"})]


def test_changelog_tells_of_this_version(metadata: Mapping[str, Message]) -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", text, re.MULTILINE)
    assert "## [Unreleased]" in text
    # Before the first release the version is what Unreleased will become.
    assert not released or metadata[CLIENT]["Version"] == released[0]


def _requirements(metadata: Message, extra: str | None) -> list[Requirement]:
    """Return the requirements that hold with ``extra`` and would not without it; None: the base ones."""
    lines = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    if extra is None:
        return [each for each in lines if each.marker is None]
    return [each for each in lines if each.marker and each.marker.evaluate({"extra": extra})]


# ----------------------------------------------------------------------------------- fresh environments


@pytest.fixture(scope="module")
def client(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with `npugrad` and what it needs, nothing else."""
    return Environment.installed(tmp_path_factory.mktemp("client"), CLIENT, dist)


@pytest.fixture(scope="module")
def server(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with `npugrad[server]`; it has no compiled kernels."""
    return Environment.installed(tmp_path_factory.mktemp("server"), "npugrad[server]", dist)


@pytest.mark.slow
def test_client_alone_works_and_says_what_to_install(client: Environment, tmp_path: Path) -> None:
    assert client.commands() == ["npugrad"]
    assert client.run("npugrad", "--version").stdout == f"npugrad {npugrad.__version__}\n"
    assert client.python("-m", "npugrad_client", "--version").stdout == f"npugrad {npugrad.__version__}\n"
    demo = client.run("npugrad", "demo", "--out", str(tmp_path))
    assert (demo.returncode, demo.stdout, demo.stderr) == (1, "", DEMO)
    program = "import npugrad_client as c; [getattr(c, name) for name in c.__all__]; print(c.__version__)"
    assert client.python("-c", program).stdout == f"{npugrad.__version__}\n"
    assert client.python("-m", "npugrad_server").stderr.endswith("No module named npugrad_server\n")


@pytest.mark.slow
def test_client_of_one_environment_calls_the_server_of_another(
    client: Environment, server: Environment, tmp_path: Path
) -> None:
    assert server.commands() == ["npugrad", "npugrad-server"]
    checked = server.run(
        "npugrad-server", "check", "--devices=cpu:0", f"--listen=unix:{tmp_path}/s", "--metrics-listen="
    )
    assert checked.returncode == 0, checked.stdout
    missing = "no compiled kernels: not built for"
    assert missing in checked.stdout
    with server.serving(tmp_path) as running:
        answer = client.run("npugrad", "info", "--target", running.address)
        assert answer.returncode == 0, answer.stderr
        assert "cpu-reference" in answer.stdout
        (warning,) = (line for line in running.log_lines() if missing in str(line))
    assert warning["level"] == "warning"


@pytest.mark.slow
def test_server_beside_another_version_of_the_contract_says_so(server: Environment, tmp_path: Path) -> None:
    version = npugrad.__version__
    (contract,) = server.folder.glob("lib/python*/site-packages/npugrad/__init__.py")
    sources = contract.read_text("utf-8")
    assert f'"{version}"' in sources
    told = (
        f"npugrad-server {version} needs npugrad {version}, but npugrad 9.9.9 is installed: "
        f"pip install npugrad=={version} npugrad-server=={version}\n"
    )
    try:
        contract.write_text(sources.replace(f'"{version}"', '"9.9.9"'), "utf-8")
        checked = server.run("npugrad-server", "check")
        demo = server.run("npugrad", "demo", "--out", str(tmp_path))
    finally:
        contract.write_text(sources, "utf-8")
    assert (checked.returncode, checked.stderr) == (1, told)
    assert (demo.returncode, demo.stderr) == (1, f"npugrad demo: the service did not start; it said:\n{told}")
