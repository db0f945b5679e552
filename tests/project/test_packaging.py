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
from packaging.version import Version
from tests.project.distributions import CLIENT, PARTS, ROOT, SERVER, Environment, build, indexable

import npugrad
import npugrad_client
import npugrad_server

VERSION = npugrad.__version__
PACKAGES = {CLIENT: ("npugrad", "npugrad_client"), SERVER: ("npugrad_server",)}
BASE = {
    *("grpcio", "grpcio-status", "googleapis-common-protos", "protobuf"),
    *("numpy", "ml-dtypes", "typer", "rich"),
}
HEAVY_EXTRAS = {"server", "torch", "jax", "npu", "otel", "bench", "demo"}
DEMO = (
    "npugrad demo: the service is not installed: pip install ./server in a checkout of npugrad, "
    "or name a running one with --target\n"
)

Wheels = Mapping[str, zipfile.ZipFile]


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
def metadata(wheels: Wheels) -> dict[str, Message]:
    """Return the METADATA headers of the wheels."""
    found = {}
    for key, wheel in wheels.items():
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        found[key] = HeaderParser().parsestr(wheel.read(name).decode())
    return found


# ---------------------------------------------------------------------------------------- what is in them


@pytest.mark.parametrize("name", PARTS)
def test_wheel_holds_every_module_of_its_packages_and_of_no_other(wheels: Wheels, name: str) -> None:
    files = wheels[name].namelist()
    tops = {file.split("/")[0] for file in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*PACKAGES[name]}
    roots = {CLIENT: [ROOT / "protos", ROOT / "client"], SERVER: [ROOT / "server"]}[name]
    modules = {path.relative_to(root).as_posix() for root in roots for path in root.glob("npugrad*/**/*.py*")}
    expected = {file for file in modules if "_tools/" not in file and file.endswith((".py", ".pyi"))}
    assert {file for file in files if re.search(r"\.pyi?$", file)} == expected
    assert {f"{package}/py.typed" for package in PACKAGES[name]} <= set(files)


def test_no_file_belongs_to_two_wheels(wheels: Wheels) -> None:
    client, server = (set(wheels[name].namelist()) for name in PARTS)
    assert client & server == set()


def test_wheel_ships_protos_for_other_languages(wheels: Wheels) -> None:
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


def test_index_would_take_them_and_the_client_is_for_any_machine(dist: Path) -> None:
    assert indexable(dist) == 4
    assert [path.name for path in dist.glob("npugrad-*.whl")] == [f"npugrad-{VERSION}-py3-none-any.whl"]


# --------------------------------------------------------------------------------------------- metadata


def test_base_install_needs_no_heavy_library_and_every_extra_is_declared(
    metadata: Mapping[str, Message],
) -> None:
    base = {canonicalize_name(each.name) for each in _requirements(metadata[CLIENT], extra=None)}
    assert base == BASE
    assert {*HEAVY_EXTRAS, "tools", "dev"} == set(metadata[CLIENT].get_all("Provides-Extra", []))


def test_no_floor_is_below_the_generator(metadata: Mapping[str, Message]) -> None:
    floors = {each.name: str(each.specifier) for each in _requirements(metadata[CLIENT], extra=None)}
    for pattern, said, library in (
        ("*_pb2.py", r"^# Protobuf Python Version: (\S+)$", "protobuf"),
        ("*_pb2_grpc.py", r"^GRPC_GENERATED_VERSION = '(\S+)'$", "grpcio"),
    ):
        generated = sorted((ROOT / "protos/npugrad/v1").glob(pattern))
        assert generated
        for path in generated:
            match = re.search(said, path.read_text("utf-8"), re.MULTILINE)
            assert match is not None, path.name
            floor = Version(floors[library].removeprefix(">="))
            assert floor >= Version(match[1]), f"{path.name} was made by {library} {match[1]}"


def test_all_say_one_version(metadata: Mapping[str, Message]) -> None:
    versions = {part["Version"] for part in metadata.values()}
    packages = (npugrad, npugrad_client, npugrad_server)
    assert versions == {package.__version__ for package in packages} == {VERSION}


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
    (contract,) = (each for each in _requirements(metadata[SERVER], extra=None) if each.name == CLIENT)
    (server,) = _requirements(metadata[CLIENT], extra="server")
    (npu,) = _requirements(metadata[CLIENT], extra="npu")
    assert [str(each.specifier) for each in (contract, server, npu)] == [f"=={VERSION}"] * 3
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
def client(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with `npugrad` and what it needs, nothing else."""
    return Environment.unpacked(tmp_path_factory.mktemp("client"), CLIENT, wheels[CLIENT])


@pytest.fixture(scope="module")
def server(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with `npugrad[server]`; it has no compiled kernels."""
    return Environment.installed(tmp_path_factory.mktemp("server"), "npugrad[server]", dist)


@pytest.mark.slow
def test_client_alone_works_and_says_what_to_install(client: Environment, tmp_path: Path) -> None:
    demo = client.run("python", "-m", "npugrad_client", "demo", "--out", str(tmp_path))
    assert (demo.returncode, demo.stdout, demo.stderr) == (1, "", DEMO)
    program = "import npugrad_client as c; [getattr(c, name) for name in c.__all__]; print(c.__version__)"
    assert client.run("python", "-c", program).stdout == f"{VERSION}\n"
    assert client.run("python", "-m", "npugrad_server").stderr.endswith("No module named npugrad_server\n")


@pytest.mark.slow
def test_client_of_one_environment_calls_the_server_of_another(
    client: Environment, server: Environment, tmp_path: Path
) -> None:
    commands = sorted(path.name for path in (server.folder / "bin").glob("npugrad*"))
    assert commands == ["npugrad", "npugrad-server"]
    with server.serving(tmp_path) as running:
        answer = client.run("python", "-m", "npugrad_client", "info", "--target", running.address)
        assert answer.returncode == 0, answer.stderr
        assert "cpu-reference" in answer.stdout
        missing = "no compiled kernels: not built for"
        (warning,) = (line for line in running.log_lines() if missing in str(line))
    assert warning["level"] == "warning"


@pytest.mark.slow
def test_server_beside_another_version_of_the_contract_says_so(server: Environment, tmp_path: Path) -> None:
    contract = server.packages / "npugrad" / "__init__.py"
    sources = contract.read_text("utf-8")
    assert f'"{VERSION}"' in sources
    told = (
        f"npugrad-server {VERSION} needs npugrad {VERSION}, but npugrad 9.9.9 is installed: "
        "pip install . ./server in a checkout of one of them\n"
    )
    try:
        contract.write_text(sources.replace(f'"{VERSION}"', '"9.9.9"'), "utf-8")
        checked = server.run("npugrad-server", "check")
        demo = server.run("npugrad", "demo", "--out", str(tmp_path))
    finally:
        contract.write_text(sources, "utf-8")
    assert (checked.returncode, checked.stderr) == (1, told)
    assert (demo.returncode, demo.stderr) == (1, f"npugrad demo: the service did not start; it said:\n{told}")
