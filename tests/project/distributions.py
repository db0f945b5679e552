"""Builds the two distributions, and makes environments that hold them and what they need, offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.fix_server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
CLIENT, SERVER = "npugrad", "npugrad-server"
PARTS = {CLIENT: ROOT, SERVER: ROOT / "server"}
"""The folder of each distribution's pyproject.toml."""


def build(source: Path, dist: Path, *targets: str, **environment: str) -> None:
    """Build the ``sdist``, the ``wheel`` or both of the distribution whose folder is ``source``."""
    asked = [part for target in targets for part in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(dist), *asked]
    settings = {**os.environ, **environment}
    done = subprocess.run(command, cwd=source, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def indexable(dist: Path) -> int:
    """Have ``twine`` check every file in ``dist`` as an index would, and return how many there are."""
    files = [str(path) for path in dist.iterdir()]
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == len(files), done.stdout
    return len(files)


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one install and what that needs, which is linked from this one."""

    folder: Path

    @classmethod
    def installed(cls, folder: Path, wanted: str, dist: Path) -> Environment:
        """Install ``wanted``, such as ``npugrad[server]``, from the wheels in ``dist``.

        pip resolves it, and fails if anything that is needed is missing or of another version.
        """
        found = cls._made(folder, wanted)
        pip = [sys.executable, "-m", "pip", "--python", str(folder), "--disable-pip-version-check", "install"]
        options = ["--quiet", "--no-index", "--no-compile", "--only-binary=:all:", f"--find-links={dist}"]
        settings = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        settings |= {"PIP_CONFIG_FILE": os.devnull}
        command = [*pip, *options, wanted]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return found

    @classmethod
    def unpacked(cls, folder: Path, name: str, wheel: zipfile.ZipFile) -> Environment:
        """Lay the files of a wheel beside what it needs, without its commands."""
        found = cls._made(folder, name)
        wheel.extractall(found.packages)
        return found

    @classmethod
    def _made(cls, folder: Path, wanted: str) -> Environment:
        """Link the packages that ``wanted`` needs, as installed here, except our own."""
        venv.create(folder, symlinks=True)
        found, here = cls(folder), Path(sysconfig.get_path("purelib"))
        for name in _closure(wanted) - {*PARTS}:
            for top in {path.parts[0] for path in distribution(name).files or ()} - {"..", "__pycache__"}:
                target = found.packages / top
                if not target.exists():
                    target.symlink_to(here / top)
        return found

    @property
    def packages(self) -> Path:
        """Where packages are installed."""
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, away from the checkout and with no setting of ours."""
        asked = [str(self.folder / "bin" / command), *arguments]
        return subprocess.run(
            asked, cwd=self.folder, env=_settings(), capture_output=True, text=True, timeout=120, check=False
        )

    @contextmanager
    def serving(self, folder: Path) -> Iterator[ServerProcess]:
        """Run the environment's server, with its log in ``folder``."""
        log = folder / "server.log"
        command = [
            str(self.folder / "bin" / "npugrad-server"),
            *("serve", "--devices=cpu:0", f"--listen=unix:{folder / 'socket'}"),
            *("--metrics-listen=", "--prefault-bytes=0", "--log-format=json"),
        ]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, cwd=self.folder, env=_settings(), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        running = ServerProcess(process, log)
        try:
            running.wait_ready()
            yield running
            running.stop()
        finally:
            running.kill()


def _settings() -> dict[str, str]:
    ours = re.compile("NPUGRAD_|PYTHONPATH|COLUMNS")
    return {name: value for name, value in os.environ.items() if not ours.match(name)}


def _closure(wanted: str) -> set[str]:
    """Return the distributions that a requirement needs, itself included, as installed here."""
    done: set[tuple[str, str]] = set()
    todo = [Requirement(wanted)]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for known, extra in done if known == name}:
            done.add((name, extra))
            for each in map(Requirement, distribution(name).requires or ()):
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    todo.append(each)
    return {name for name, _ in done}
