"""What the image's build installs: every version exact, hashed, and what the package asks for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from npugrad._tools.floors import requirements

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "deploy" / "image"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "server" / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def asked() -> list[str]:
    return [str(each) for each in requirements()]


def test_what_installs_is_recent_enough_to_install_into_another_environment_and_stays_behind() -> None:
    (pip,) = (pin for pin, _ in _pins("requirements-build.txt") if pin.name == "pip")
    assert Version(str(pip.specifier).removeprefix("==")) >= Version("22.3")
    assert "pip" not in {pin.name for pin, _ in _pins("requirements-server.txt")}


def test_every_pin_is_exact_and_hashed_and_nothing_is_left_to_be_found_at_build_time(
    project: dict[str, Any], asked: list[str]
) -> None:
    """Follows the requirements of the distributions installed here, so it speaks for this Python version."""
    roots = {"requirements-build.txt": project["build-system"]["requires"], "requirements-server.txt": asked}
    for name, wanted in roots.items():
        pins = list(_pins(name))
        assert pins
        for pin, hashes in pins:
            assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), f"{pin} is not one version"
            assert hashes >= 1, f"{pin} has no hash"
        assert _closure(wanted) <= {canonicalize_name(pin.name) for pin, _ in pins}
        for python in PYTHONS:
            _assert_pinned(name, wanted, python)


def test_torch_and_torch_npu_are_the_pair_that_the_package_names(project: dict[str, Any]) -> None:
    text = (IMAGE / "constraints-npu.txt").read_text("utf-8")
    rows = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    pins = {row.name: Version(str(row.specifier).removeprefix("==")) for row in rows[:2]}
    assert pins["torch"].release[:2] == pins["torch_npu"].release[:2]
    for asked in map(Requirement, project["project"]["optional-dependencies"]["npu"]):
        assert pins[asked.name] in asked.specifier, asked


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
