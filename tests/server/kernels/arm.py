"""`python -m tests.server.kernels.arm`: the kernels' tests on the aarch64 library, under qemu's user mode.

Zig is the compiler, which brings the headers of an old glibc and its own C++ runtime; driver and library run
against the glibc of Debian's cross packages. What is not installed is unpacked below `build`, which needs no
rights.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.server.kernels.conftest import FOLDER, ROOT, VARIANT, load_builder
from tests.server.kernels.driven import DRIVER, build_driver

OUT = ROOT / "build" / "kernels-arm"
GLIBC = "2.28"
"""That of the wheels."""
ZIG = "ZIG"
"""Environment variable: the command of Zig; the package `ziglang` of this Python without it."""
OPTIMISED = ("-Xclang", "-O3", "-fomit-frame-pointer")
"""Zig takes ``-O3`` for ``-O2`` and keeps frame pointers; attention lost a quarter of its speed to that."""
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
SYSROOT = "usr/aarch64-linux-gnu"
LOADER = "lib/ld-linux-aarch64.so.1"
PACKAGES = ("qemu-user-static", "libc6-arm64-cross")


class Missing(RuntimeError):
    """There is no emulator; the message says how to get one."""


def zig(machine: str) -> list[str]:
    """The command of a C++ compiler for a machine, as the builder names it; its cache is below `build`."""
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        os.environ.setdefault(name, str(OUT / "zig"))
    command = shlex.split(os.environ.get(ZIG, "") or f"{sys.executable} -m ziglang")
    return [*command, "c++", "-target", f"{machine}-linux-gnu.{GLIBC}", *OPTIMISED]


def main(arguments: list[str], libraries: Path | None = None) -> int:
    """Builds driver and library, or takes that in `libraries`, and runs pytest with the driver emulated."""
    compiler = zig("aarch64")
    try:
        emulator = find_emulator()
        version = subprocess.run([emulator[0], "--version"], check=True, capture_output=True, text=True)
        print(f"arm: {version.stdout.splitlines()[0]}")
        if libraries is None:
            made = load_builder().build(OUT, target="aarch64", compiler=compiler)
            print(f"arm: {made[0].variant}: {'built' if made[0].fresh else 'up to date'}", flush=True)
        driver = build_driver(OUT / "driver", compiler)
    except RuntimeError as error:
        sys.stderr.write(f"arm: {error}\n")
        return 1
    environment = {
        **os.environ,
        FOLDER: str(libraries or OUT),
        VARIANT: "neon",
        DRIVER: shlex.join([*emulator, str(driver)]),
    }
    # An emulated call takes ten to fifty times as long.
    patience = ["--timeout", "600", "-o", "faulthandler_timeout=550"]
    command = [sys.executable, "-m", "pytest", "tests/server/kernels", *patience, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def find_emulator() -> list[str]:
    """The command that runs a program for aarch64: what is installed, else unpacked from Debian's packages.

    Raises:
        Missing: Neither is to be had.
    """
    unpacked = OUT / "root"
    found = _emulator(None, Path("/"))
    if found is None:
        _unpack(unpacked)
        found = _emulator(str(unpacked / "usr" / "bin"), unpacked)
    if found is None:
        raise Missing(f"no qemu for aarch64; on Debian and Ubuntu: apt-get install {' '.join(PACKAGES)}")
    return found


def _emulator(path: str | None, root: Path) -> list[str] | None:
    program = next((found for name in EMULATORS if (found := shutil.which(name, path=path))), None)
    sysroot = root / SYSROOT
    return [program, "-L", str(sysroot)] if program and (sysroot / LOADER).exists() else None


def _unpack(root: Path) -> None:
    if (root / SYSROOT / LOADER).exists() or not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return
    print(f"arm: unpacking {', '.join(PACKAGES)} below build; nothing is installed", flush=True)
    debs = OUT / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=debs, check=False, capture_output=True)
    if done.returncode:
        raise Missing(
            f"apt-get download {' '.join(PACKAGES)} failed; on Debian and Ubuntu try apt-get update, or "
            f"apt-get install {' '.join(PACKAGES)}:\n{done.stderr.decode(errors='replace')}"
        )
    for package in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    shutil.rmtree(debs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
