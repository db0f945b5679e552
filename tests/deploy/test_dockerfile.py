"""The image's recipe: what can be known of it without building it.

A build takes minutes, root and packages: `make test-image` (image.py) does it. What these tests run for real
is the linter, the scripts, and the wheel build from exactly the files the recipe copies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from platform import machine
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from npugrad_server.backends.cpu.kernels import LIBRARIES as LOADED
from npugrad_server.backends.cpu.kernels import VARIANTS, usable_variants

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "deploy" / "image"
ACCOUNT = "HwHiAiUser"
HOME = f"/home/{ACCOUNT}"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SETTING = "NPUGRAD_BUILD_KERNELS"
LIBRARIES = "npugrad_server/backends/cpu/lib/"
# As fast as a build can be: whatever `-o` names is there afterwards.
FAST_COMPILER = '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\nexit 0\n'


# ------------------------------------------------------------------------------------ the recipe


@dataclass(frozen=True)
class Instruction:
    """One instruction of the Dockerfile, its continuation lines joined."""

    keyword: str
    value: str


@pytest.fixture(scope="module")
def instructions() -> list[Instruction]:
    """Return the Dockerfile's instructions in order."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def build(instructions: list[Instruction]) -> list[Instruction]:
    """Return the instructions of the build stage."""
    return _stages(instructions)[1]


@pytest.fixture(scope="module")
def runtime(instructions: list[Instruction]) -> list[Instruction]:
    """Return the instructions of the stage that becomes the image."""
    return _stages(instructions)[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), str(ROOT / "Dockerfile")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_both_stages_stand_on_one_base_that_a_builder_can_choose(instructions: list[Instruction]) -> None:
    before, build, runtime = _stages(instructions)
    (base,) = (each.value for each in before if each.keyword == "ARG")
    assert [stage[0].value for stage in (build, runtime)] == ["${BASE} AS build", "${BASE} AS runtime"]
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-\w+", base), f"{base}: pin the default to a release"


def test_default_base_has_a_python_that_the_package_allows(
    instructions: list[Instruction], project: dict[str, Any]
) -> None:
    match = re.search(r"python:(\d+\.\d+\.\d+)", instructions[0].value)
    assert match is not None
    assert match[1] in SpecifierSet(project["project"]["requires-python"])


def test_runtime_stage_runs_nothing(runtime: list[Instruction]) -> None:
    """Without RUN there is nothing to clean up: no package lists, no caches, no compiler."""
    allowed = {"FROM", "LABEL", "COPY", "ENV", "WORKDIR", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {each.keyword for each in runtime} <= allowed


def test_package_index_never_reaches_the_image(build: list[Instruction], runtime: list[Instruction]) -> None:
    asked = {each.value for each in build if each.keyword == "ARG" and each.value.startswith("PIP_")}
    assert asked == {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"}
    assert not any("PIP_" in each.value for each in runtime)


def test_every_install_is_pinned(build: list[Instruction]) -> None:
    commands = [
        command.strip() for each in build if each.keyword == "RUN" for command in each.value.split("&&")
    ]
    installs = [command for command in commands if " install " in command and "/pip " in command]
    assert len(installs) == 3
    assert all(command.startswith("/opt/build/bin/pip ") for command in installs), installs
    assert all("--require-hashes" in command or "--constraint" in command for command in installs), installs
    assert not any(re.search(r"\b(apt|apt-get|yum|dnf|curl|wget)\b", command) for command in commands)


def test_environment_of_the_image_gets_no_installer(build: list[Instruction]) -> None:
    """What installs is in the build stage, pinned, and recent enough to install into another environment."""
    (made,) = (
        command
        for value in _values(build, "RUN")
        for command in value.split("&&")
        if "-m venv" in command and "/opt/npugrad" in command
    )
    assert "--without-pip" in made
    (pip,) = (pin for pin, _ in _pins("requirements-build.txt") if pin.name == "pip")
    assert Version(str(pip.specifier).removeprefix("==")) >= Version("22.3")
    assert "pip" not in {pin.name for pin, _ in _pins("requirements-server.txt")}


def test_image_runs_as_the_account_that_owns_ascend_devices(runtime: list[Instruction]) -> None:
    assert _values(runtime, "USER") == ["1000:1000"]
    copies = _values(runtime, "COPY")
    assert "--from=build /etc/passwd /etc/group /etc/" in copies
    assert f"--from=build --chown=1000:1000 {HOME} {HOME}" in copies


def test_whatever_writes_writes_under_home(runtime: list[Instruction]) -> None:
    environment = dict(
        pair.split("=", 1) for value in _values(runtime, "ENV") for pair in value.split() if "=" in pair
    )
    assert environment["HOME"] == HOME
    assert _values(runtime, "WORKDIR") == [HOME]
    for name in ("ASCEND_CACHE_PATH", "ASCEND_WORK_PATH", "TORCH_EXTENSIONS_DIR"):
        assert Path(environment[name]).is_relative_to(HOME), name
    assert environment["PYTHONUNBUFFERED"] == "1"


def test_server_is_process_one_and_gets_sigterm(runtime: list[Instruction], project: dict[str, Any]) -> None:
    (entrypoint,) = _values(runtime, "ENTRYPOINT")
    (command,) = _values(runtime, "CMD")
    assert json.loads(entrypoint) == ["npugrad-server"], "exec form: a shell would keep the signal to itself"
    assert json.loads(command) == ["serve"]
    assert "npugrad-server" in project["project"]["scripts"]
    assert _values(runtime, "STOPSIGNAL") == ["SIGTERM"]


# -------------------------------------------------------------------------------- the build context


def test_context_holds_what_is_copied_and_nothing_else(build: list[Instruction]) -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "the context is a list of what may enter"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert allowed == set(_copied(build))
    assert all((ROOT / source).exists() for source in allowed)


def test_wheel_builds_from_the_context_alone(
    build: list[Instruction], project: dict[str, Any], tmp_path: Path
) -> None:
    context = tmp_path / "src"
    for source in _copied(build):
        _copy(ROOT / source, context / source)
    compiler = tmp_path / "c++"
    compiler.write_text(FAST_COMPILER)
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    needed = {**os.environ, "NPUGRAD_BUILD_KERNELS": "1", "CXX": str(compiler)}
    made = subprocess.run(
        command, cwd=context, env=needed, capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr
    (path,) = tmp_path.glob(f"npugrad-{project['project']['version']}-py3-none-linux_*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    assert {"npugrad", "npugrad_server", "npugrad_client"} <= {name.split("/")[0] for name in names}
    libraries = [name.rpartition("/")[2] for name in names if name.startswith(LIBRARIES)]
    assert sorted(libraries) == sorted(f"libnpugrad_kernels_{name}.so" for name in VARIANTS[machine()])


# ------------------------------------------------------------------------------------- the compiler


def test_image_without_kernels_has_to_be_asked_for(build: list[Instruction]) -> None:
    """The builder fails without a compiler, the check without kernels; one argument turns both off."""
    assert "NPUGRAD_BUILD_KERNELS=1" in _values(build, "ARG")
    assert f"compiler.sh: {SETTING}=0" in _installed({}, **{SETTING: "0"}).stdout
    commands = [command.strip() for value in _values(build, "RUN") for command in value.split("&&")]
    compiler, wheel, check = (
        next(place for place, command in enumerate(commands) if part in command)
        for part in ("deploy/image/compiler.sh", "pip wheel", "deploy/image/check.sh")
    )
    assert compiler < wheel < check == len(commands) - 1


def test_compiler_stays_in_the_build_stage(runtime: list[Instruction]) -> None:
    copied = [value.split()[-2] for value in _values(runtime, "COPY") if "/etc/passwd" not in value]
    assert copied == [HOME, "/opt/npugrad"], "nothing that a package manager writes"


def test_compiler_of_the_base_is_taken() -> None:
    made = _installed({"clang++": "exit 0", "apt-get": "echo apt-get $*"})
    assert (made.returncode, "apt-get" in made.stdout) == (0, False), made


@pytest.mark.parametrize(
    ("manager", "packages"),
    [
        ("apt-get", ["g++"]),
        ("dnf", ["gcc-c++", "libstdc++-static"]),
        ("yum", ["gcc-c++", "libstdc++-static"]),
    ],
)
def test_compiler_comes_by_the_package_manager_of_the_base(manager: str, packages: list[str]) -> None:
    made = _installed({manager: f"echo {manager} $*"})
    assert made.returncode == 0, made.stderr
    installs = [line for line in made.stdout.splitlines() if line.startswith(f"{manager} install ")]
    assert [line.split()[-1] for line in installs] == packages
    assert all("-y" in line or "--yes" in line or "--assumeyes" in line for line in installs), (
        "nobody answers"
    )


def test_static_runtime_is_no_must_but_the_compiler_is() -> None:
    no_static = 'case "$*" in *static) exit 1 ;; esac'
    assert _installed({"dnf": no_static}).returncode == 0
    assert _installed({"dnf": "exit 1"}).returncode == 1
    assert _installed({"apt-get": "exit 100"}).returncode == 100


def test_base_with_neither_compiler_nor_package_manager_fails_the_build() -> None:
    made = _installed({})
    assert made.returncode == 1
    assert f"no apt-get, dnf or yum to install one with; take a base with a compiler, or {SETTING}=0" in (
        made.stderr
    )


@pytest.mark.slow
def test_check_does_without_the_ports_of_the_host(tmp_path: Path) -> None:
    """A build shares them with whatever runs there, at times with a server of ours."""
    server = _server(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        listen = {"NPUGRAD_LISTEN": address, "NPUGRAD_METRICS_LISTEN": address}
        made = _checked(server, NPUGRAD_BUILD_KERNELS="0", **listen)
    assert (made.returncode, "FAIL" in made.stdout) == (0, False), made


@pytest.mark.deep
@pytest.mark.slow
def test_check_fails_the_build_unless_kernels_load_or_nobody_asked_for_them(tmp_path: Path) -> None:
    server = _server(tmp_path)
    made = _checked(server, NPUGRAD_KERNELS_VARIANT="none")
    assert (made.returncode, "no compiled kernels; NPUGRAD_BUILD_KERNELS=0" in made.stderr) == (1, True), made
    made = _checked(server, NPUGRAD_KERNELS_VARIANT="none", NPUGRAD_BUILD_KERNELS="0")
    assert (made.returncode, "cpu-reference" in made.stdout) == (0, True), made
    made = _checked(server, NPUGRAD_DRAIN_TIMEOUT_S="soon", NPUGRAD_BUILD_KERNELS="0")
    assert (made.returncode, "FAIL" in made.stdout) == (1, True), made
    if usable_variants() and any(LOADED.glob("*.so")):
        assert _checked(server).returncode == 0


@pytest.mark.slow
def test_build_for_real_says_why_a_machine_cannot() -> None:
    command, nothing = [sys.executable, "-m", "tests.deploy.image"], {"PATH": ""}
    made = subprocess.run(
        command, cwd=ROOT, env=nothing, capture_output=True, text=True, timeout=250, check=False
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("image: skipped: no mmdebstrap, buildah, ")


# -------------------------------------------------------------------------------------- the account

PASSWD = "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
GROUP = "root:x:0:\ndaemon:x:1:\nsudo:x:27:ubuntu\n"
OURS = f"{ACCOUNT}:x:1000:1000:npugrad server:{HOME}:/usr/sbin/nologin"


def test_account_is_added_where_the_base_has_none(tmp_path: Path) -> None:
    made = _make_account(tmp_path, PASSWD, GROUP)
    assert made.returncode == 0, made.stderr
    assert _read(tmp_path) == (PASSWD + OURS + "\n", GROUP + f"{ACCOUNT}:x:1000:\n")


def test_account_is_added_after_a_last_line_without_an_end(tmp_path: Path) -> None:
    assert _make_account(tmp_path, PASSWD.rstrip("\n"), GROUP.rstrip("\n")).returncode == 0
    assert _read(tmp_path) == (PASSWD + OURS + "\n", GROUP + f"{ACCOUNT}:x:1000:\n")


def test_account_of_the_base_is_kept_as_it_is(tmp_path: Path) -> None:
    passwd = PASSWD + f"{ACCOUNT}:x:1000:1000::/home/{ACCOUNT}:/bin/bash\n"
    group = GROUP + f"{ACCOUNT}:x:1000:HwDmUser\n"
    assert _make_account(tmp_path, passwd, group).returncode == 0
    assert _read(tmp_path) == (passwd, group)


def test_other_holder_of_the_number_is_replaced(tmp_path: Path) -> None:
    passwd = PASSWD + "ubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash\nlast:x:1001:1001::/:/bin/false\n"
    group = GROUP + "ubuntu:x:1000:\nlast:x:1001:\n"
    assert _make_account(tmp_path, passwd, group).returncode == 0
    assert _read(tmp_path) == (
        PASSWD + "last:x:1001:1001::/:/bin/false\n" + OURS + "\n",
        GROUP + f"last:x:1001:\n{ACCOUNT}:x:1000:\n",
    )


def test_making_the_account_twice_changes_nothing(tmp_path: Path) -> None:
    _make_account(tmp_path, PASSWD, GROUP)
    first = _read(tmp_path)
    assert _make_account(tmp_path, *first).returncode == 0
    assert _read(tmp_path) == first


@pytest.mark.parametrize(
    ("passwd", "group", "reason"),
    [
        (f"{ACCOUNT}:x:1001:1000::{HOME}:/bin/sh\n", f"{ACCOUNT}:x:1000:\n", "the number 1001"),
        (f"{ACCOUNT}:x:1000:1000::{HOME}:/bin/sh\n", f"{ACCOUNT}:x:1001:\n", "the number 1001"),
        (f"{ACCOUNT}:x:1000:100::{HOME}:/bin/sh\n", f"{ACCOUNT}:x:1000:\n", "the group 100"),
    ],
)
def test_base_whose_account_cannot_open_devices_fails_the_build(
    tmp_path: Path, passwd: str, group: str, reason: str
) -> None:
    made = _make_account(tmp_path, PASSWD + passwd, GROUP + group)
    assert made.returncode != 0
    assert reason in made.stderr


# ------------------------------------------------------------------------------------------- pins


@pytest.mark.parametrize("name", ["requirements-build.txt", "requirements-server.txt"])
def test_every_pin_is_exact_and_hashed(name: str) -> None:
    pins = list(_pins(name))
    assert pins
    for pin, hashes in pins:
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), f"{pin} is not one version"
        assert hashes >= 1, f"{pin} has no hash"


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_meet_what_the_package_asks_for(project: dict[str, Any], python: str) -> None:
    asked = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["server"]]
    _assert_pinned("requirements-server.txt", asked, python)
    _assert_pinned("requirements-build.txt", project["build-system"]["requires"], python)


@pytest.mark.parametrize("name", ["requirements-build.txt", "requirements-server.txt"])
def test_pins_leave_nothing_to_be_found_at_build_time(project: dict[str, Any], name: str) -> None:
    """Follows the requirements of the distributions installed here, so it speaks for this Python version."""
    optional = project["project"]["optional-dependencies"]
    roots = {
        "requirements-build.txt": project["build-system"]["requires"],
        "requirements-server.txt": [*project["project"]["dependencies"], *optional["server"]],
    }
    pinned = {canonicalize_name(pin.name) for pin, _ in _pins(name)}
    assert _closure(roots[name]) <= pinned


def test_torch_and_torch_npu_are_the_pair_that_the_package_names(project: dict[str, Any]) -> None:
    text = (IMAGE / "constraints-npu.txt").read_text("utf-8")
    rows = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    pins = {row.name: Version(str(row.specifier).removeprefix("==")) for row in rows[:2]}
    assert pins["torch"].release[:2] == pins["torch_npu"].release[:2]
    for asked in map(Requirement, project["project"]["optional-dependencies"]["npu"]):
        assert pins[asked.name] in asked.specifier, asked


# ---------------------------------------------------------------------------------------- helpers


def _stages(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Return the instructions before the first FROM, then those of each stage."""
    stages: list[list[Instruction]] = [[]]
    for each in instructions:
        if each.keyword == "FROM":
            stages.append([])
        stages[-1].append(each)
    assert len(stages) == 3, "one build stage and one runtime stage"
    return stages


def _values(stage: list[Instruction], keyword: str) -> list[str]:
    """Return the values of all instructions of one kind."""
    return [each.value for each in stage if each.keyword == keyword]


def _copied(build: list[Instruction]) -> list[str]:
    """Return the paths that the build stage copies from the context."""
    return [source.rstrip("/") for value in _values(build, "COPY") for source in value.split()[:-1]]


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder without compiled Python."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "*.so"))
    else:
        shutil.copy(source, target)


def _make_account(root: Path, passwd: str, group: str) -> subprocess.CompletedProcess[str]:
    """Run account.sh on a root file system with these two files."""
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text(passwd)
    (root / "etc/group").write_text(group)
    command = ["sh", str(IMAGE / "account.sh"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)


def _installed(tools: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run compiler.sh where there are only these commands, each a line of shell."""
    with tempfile.TemporaryDirectory() as folder:
        for name, line in tools.items():
            (Path(folder) / name).write_text(f"#!/bin/sh\n{line}\n")
            (Path(folder) / name).chmod(0o755)
        return _script("compiler.sh", PATH=folder, **environment)


def _server(folder: Path) -> Path:
    """Return a command npugrad-server that runs this checkout."""
    server = folder / "npugrad-server"
    server.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m npugrad_server "$@"\n')
    server.chmod(0o755)
    return server


def _checked(server: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run check.sh with this command and no setting of ours but these."""
    free = {name: value for name, value in os.environ.items() if not name.startswith("NPUGRAD_")}
    return _script("check.sh", str(server), **{**free, **environment})


def _script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the image with exactly this environment."""
    command = ["/bin/sh", str(IMAGE / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _read(root: Path) -> tuple[str, str]:
    """Return passwd and group as the script left them."""
    return (root / "etc/passwd").read_text(), (root / "etc/group").read_text()


def _pins(name: str) -> Iterator[tuple[Requirement, int]]:
    """Yield each pin of a requirements file with the number of its hashes."""
    text = (IMAGE / name).read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for row in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if row.strip():
            requirement, *hashes = re.split(r"\s+--hash=sha256:", row.strip())
            yield Requirement(requirement), len(hashes)


def _assert_pinned(name: str, asked: list[str], python: str) -> None:
    """Check that for one version of Python exactly one pin answers each requirement."""
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    pins = [pin for pin, _ in _pins(name) if pin.marker is None or pin.marker.evaluate(environment)]
    for requirement in map(Requirement, asked):
        wanted = canonicalize_name(requirement.name)
        found = [pin for pin in pins if canonicalize_name(pin.name) == wanted]
        assert len(found) == 1, f"{name}, Python {python}, {requirement.name}: not one pin but {found}"
        version = str(found[0].specifier).removeprefix("==")
        assert version in requirement.specifier, f"{name} pins {found[0]}, asked for {requirement}"


def _closure(asked: list[str]) -> set[str]:
    """Return the distributions that the requirements need here, directly or not, extras included."""
    done: set[tuple[str, str]] = set()
    todo = [pair for each in map(Requirement, asked) for pair in _wanted(each)]
    while todo:
        name, extra = todo.pop()
        done.add((name, extra))
        for each in map(Requirement, requires(name) or ()):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                todo += _wanted(each) - done
    return {name for name, _ in done}


def _wanted(requirement: Requirement) -> set[tuple[str, str]]:
    """Return what to follow: the distribution's base requirements, as the empty extra, and each extra."""
    name = canonicalize_name(requirement.name)
    return {(name, extra) for extra in ("", *requirement.extras)}
