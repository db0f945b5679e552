"""`python -m tests.project.release`: what a release ships, built into ``dist``, each file checked.

Zig compiles the server's kernels for the glibc of manylinux_2_28. Those for this machine run in a fresh
environment, those for aarch64 under qemu's user mode.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from tests.project import supply
from tests.project.distributions import CLIENT, PARTS, ROOT, SERVER, Environment, build, indexable
from tests.server.kernels import arm

DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"
"""Where compiled kernels stay, so that a second run compiles what changed only."""
MACHINES = ("x86_64", "aarch64")
LIBRARIES = "npugrad_server/backends/cpu/lib/"
# What every kernel has to do: a minute of emulation. `make test-kernels-arm` has all of the tests.
EMULATED = ("-k", "test_every_kernel")


def main() -> int:
    """Builds and checks; 0 when all is well."""
    shutil.rmtree(DIST, ignore_errors=True)
    build(PARTS[CLIENT], DIST, "sdist", "wheel")
    build(PARTS[SERVER], DIST, "sdist")
    source = unpacked()
    for machine in MACHINES:
        start = time.monotonic()
        wheel = build_wheel(source, machine)
        print(f"release: {wheel.name}: {audited(wheel)}, {time.monotonic() - start:.0f} s", flush=True)
    print(f"release: {indexable(DIST)} files, none of which an index would refuse")
    with tempfile.TemporaryDirectory() as folder:
        if platform.machine() in MACHINES:
            print(f"release: {checked(Path(folder) / 'fresh')}", flush=True)
            for bill in supply.bills_of_wheels(Path(folder)):
                print(f"release: {bill}", flush=True)
        if platform.machine() == "aarch64":
            return 0
        with zipfile.ZipFile(next(DIST.glob("*_aarch64.whl"))) as opened:
            opened.extractall(folder, [name for name in opened.namelist() if name.startswith(LIBRARIES)])
        return arm.main([*EMULATED], Path(folder) / LIBRARIES)


def unpacked() -> Path:
    """The source distribution of the server, unpacked: what is built from it needs nothing else."""
    path = next(DIST.glob("npugrad_server-*.tar.gz"))
    source = WORK / path.name.removesuffix(".tar.gz")
    for old in source.glob("*"):
        if old.name != "build":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    with tarfile.open(path) as archive:
        archive.extractall(WORK, filter="data")
    return source


def build_wheel(source: Path, machine: str) -> Path:
    """Builds the server's wheel for a machine."""
    name = f"manylinux_{arm.GLIBC.replace('.', '_')}_{machine}"
    settings = {"NPUGRAD_BUILD_KERNELS": "1", "NPUGRAD_WHEEL_PLATFORM": name}
    build(source, DIST, "wheel", CXX=shlex.join(arm.zig(machine)), **settings)
    return next(DIST.glob(f"*-py3-none-{name}.whl"))


def audited(wheel: Path) -> str:
    """What auditwheel makes of the wheel's libraries.

    Raises:
        AssertionError: They need more than the wheel's tag says.
    """
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = " ".join(done.stdout.split())
    found = re.search(r'following platform tag: "(manylinux_(\d+)_(\d+)_(\w+))"', said)
    assert found, done.stdout + done.stderr
    assert (int(found[2]), int(found[3])) <= tuple(map(int, arm.GLIBC.split("."))), said
    assert wheel.stem.endswith(found[4]), said
    return f"auditwheel: {found[1]}"


def checked(folder: Path) -> str:
    """What the server says of its CPU device in a fresh environment.

    Raises:
        AssertionError: It has no compiled kernels.
    """
    fresh = Environment.installed(folder, "npugrad[server]", DIST)
    options = (f"--listen=unix:{folder}/s", "--metrics-listen=", "--devices=cpu:0")
    told = fresh.run("npugrad-server", "check", *options).stdout
    assert "compiled kernels (" in told, told
    return told.splitlines()[-1]


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
