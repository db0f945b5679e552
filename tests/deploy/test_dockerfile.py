"""The image's recipe: what can be known of it without building it.

A build takes minutes, root and packages: `make test-image` (image.py) does it. What these tests run for real
is the linter, and the wheel build from exactly the files the recipe copies.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from platform import machine
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from npugrad_server.backends.cpu.kernels import VARIANTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Stage = Mapping[str, list[str]]

ROOT = Path(__file__).resolve().parents[2]
HOME = "/home/HwHiAiUser"
LIBRARIES = "npugrad_server/backends/cpu/lib/"
# As fast as a build can be: whatever `-o` names is there afterwards.
FAST_COMPILER = '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\nexit 0\n'
RECIPE: Any = DockerfileParser(str(ROOT), env_replace=False)


def stages() -> Iterator[Stage]:
    """The values of each instruction in order: those before the first FROM, then those of each stage."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in RECIPE.structure:
        if line["instruction"] == "FROM":
            yield found
            found = defaultdict(list)
        if line["instruction"] != "COMMENT":
            found[line["instruction"]].append(line["value"])
    yield found


BEFORE, BUILD, RUNTIME = stages()


def commands() -> list[list[str]]:
    """The words of each command that builds, in order."""
    words = [word for run in BUILD["RUN"] for word in (*shlex.split(run), "&&")]
    ends = [place for place, word in enumerate(words) if word == "&&"]
    return [words[first + 1 : last] for first, last in zip([-1, *ends], ends, strict=False)]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "server" / "pyproject.toml").read_text("utf-8"))


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), str(ROOT / "Dockerfile")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_both_stages_stand_on_one_base_that_a_builder_can_choose(project: dict[str, Any]) -> None:
    assert [BUILD["FROM"], RUNTIME["FROM"]] == [["${BASE} AS build"], ["${BASE} AS runtime"]]
    (base, again) = RECIPE.parent_images
    assert {"ARG": [f"BASE={base}"]} == BEFORE
    assert again == base
    name, _, tag = base.partition(":")
    version, variant, _ = tag.split("-")
    assert (name, variant) == ("python", "slim")
    assert len(Version(version).release) == 3, f"{base}: pin the default to a release"
    assert version in SpecifierSet(project["project"]["requires-python"])


def test_runtime_stage_runs_nothing_and_knows_no_package_index() -> None:
    """Without RUN there is nothing to clean up: no package lists, no caches, no compiler."""
    allowed = {"FROM", "LABEL", "COPY", "ENV", "WORKDIR", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert RUNTIME.keys() <= allowed
    asked = {value for value in BUILD["ARG"] if value.startswith("PIP_")}
    assert asked == {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"}
    assert "PIP_" not in str(RUNTIME)


def test_every_install_is_pinned_and_no_installer_is_in_the_image() -> None:
    installs = [each for each in commands() if each[0].endswith("pip") and "install" in each]
    assert len(installs) == 3
    assert {each[0] for each in installs} == {"/opt/build/bin/pip"}
    assert all({"--require-hashes", "--constraint"} & {*each} for each in installs), installs
    others = {"apt", "apt-get", "yum", "dnf", "curl", "wget"}
    assert not [each for each in commands() if others & set(" ".join(each).split())]
    (made,) = (each for each in commands() if "venv" in each and "/opt/npugrad" in each)
    assert "--without-pip" in made


def test_image_runs_as_the_account_that_owns_ascend_devices_and_writes_under_its_home() -> None:
    assert RUNTIME["USER"] == ["1000:1000"]
    assert "--from=build /etc/passwd /etc/group /etc/" in RUNTIME["COPY"]
    assert f"--from=build --chown=1000:1000 {HOME} {HOME}" in RUNTIME["COPY"]
    environment = RECIPE.envs  # of the last stage
    assert environment["HOME"] == HOME
    assert RUNTIME["WORKDIR"] == [HOME]
    for name in ("ASCEND_CACHE_PATH", "ASCEND_WORK_PATH", "TORCH_EXTENSIONS_DIR"):
        assert Path(environment[name]).is_relative_to(HOME), name
    assert environment["PYTHONUNBUFFERED"] == "1"


def test_server_is_process_one_and_gets_sigterm(project: dict[str, Any]) -> None:
    (entrypoint,) = RUNTIME["ENTRYPOINT"]
    assert json.loads(entrypoint) == ["npugrad-server"], "exec form: a shell would keep the signal to itself"
    assert json.loads(RECIPE.cmd) == ["serve"]
    assert "npugrad-server" in project["project"]["scripts"]
    assert RUNTIME["STOPSIGNAL"] == ["SIGTERM"]


def test_image_without_kernels_has_to_be_asked_for() -> None:
    """The builder fails without a compiler, the check without kernels; one argument turns both off."""
    assert "NPUGRAD_BUILD_KERNELS=1" in BUILD["ARG"]
    made = [" ".join(command) for command in commands()]
    compiler, wheel, check = (
        next(place for place, command in enumerate(made) if part in command)
        for part in ("deploy/image/compiler.sh", "pip wheel", "deploy/image/check.sh")
    )
    assert compiler < wheel < check == len(made) - 1
    # The compiler stays in the build stage.
    copied = [value.split()[-2] for value in RUNTIME["COPY"] if "/etc/passwd" not in value]
    assert copied == [HOME, "/opt/npugrad"], "nothing that a package manager writes"


# -------------------------------------------------------------------------------- the build context


def copied() -> list[str]:
    """The paths that the build stage copies from the context."""
    return [source.rstrip("/") for value in BUILD["COPY"] for source in value.split()[:-1]]


def test_context_holds_what_is_copied_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "the context is a list of what may enter"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert allowed == set(copied())
    assert all((ROOT / source).exists() for source in allowed)


def test_wheels_build_from_the_context_alone(project: dict[str, Any], tmp_path: Path) -> None:
    for source in copied():
        _copy(ROOT / source, tmp_path / "src" / source)
    for folder in ("src", "src/server"):
        made = _built(tmp_path / folder, tmp_path, NPUGRAD_BUILD_KERNELS="1")
        assert made.returncode == 0, made.stderr
    assert len([*tmp_path.glob("npugrad-*-py3-none-any.whl")]) == 1
    (wheel,) = tmp_path.glob(f"npugrad_server-{project['project']['version']}-py3-none-linux_*.whl")
    assert _libraries(wheel) == sorted(f"libnpugrad_kernels_{name}.so" for name in VARIANTS[machine()])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, ""),
        ({"NPUGRAD_WHEEL_PLATFORM": "linux_aarch64"}, "expected one such as manylinux_2_28_x86_64"),
        ({"NPUGRAD_BUILD_KERNELS": "0"}, "expected a wheel with kernels"),
    ],
    ids=["right", "no-manylinux", "no-kernels"],
)
def test_wheels_can_be_for_another_machine(settings: dict[str, str], told: str, tmp_path: Path) -> None:
    source = tmp_path / "server"
    _copy(ROOT / "server", source)
    made = _built(source, tmp_path, **{"NPUGRAD_WHEEL_PLATFORM": "manylinux_2_28_aarch64", **settings})
    assert (made.returncode != 0, told in made.stderr) == (bool(told), True), made.stderr
    wheels = [*tmp_path.glob("npugrad_server-*-py3-none-manylinux_2_28_aarch64.whl")]
    assert [_libraries(wheel) for wheel in wheels] == [["libnpugrad_kernels_neon.so"]] * (not told)
    assert not [*(source / LIBRARIES).glob("*.so")]


def _built(source: Path, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    compiler = folder / "c++"
    compiler.write_text(FAST_COMPILER)
    compiler.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name != "NPUGRAD_BUILD_KERNELS"}
    environment = {**inherited, "CXX": str(compiler), **settings}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    return subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def _libraries(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    return sorted(name.removeprefix(LIBRARIES) for name in names if name.startswith(LIBRARIES))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "*.so"))
    else:
        shutil.copy(source, target)
