"""Builds the CPU kernels: `python server/kernels/build.py` with any C++17 compiler, nothing else.

Makes one shared library for each variant of the instruction set, from the same sources; the loader picks one
by the CPU's flags, and that one is made first. They go to `npugrad_server/backends/cpu/lib`, next to the
loader, so that installed and editable packages find them the same way. Libraries that are up to date are not
rebuilt.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCES = Path(__file__).resolve().parent
LIBRARIES = SOURCES.parent / "npugrad_server" / "backends" / "cpu" / "lib"
COMPILERS = ("c++", "g++", "clang++")
SETTING = "NPUGRAD_BUILD_KERNELS"
"""Environment variable: ``0`` builds none if the build is optional, ``1`` makes having none an error."""

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx512": (*_AVX2, *_AVX512), "avx2": _AVX2, "baseline": ()},
    "aarch64": {"neon": ()},
}
"""Compiler flags of each variant, by machine."""
FLAGS = (
    "-std=c++17",
    "-O3",
    # Fuses a product and the sum it goes into where the variant can: vector types have no other portable way
    # to say it. All other floating-point rules are kept. Results of variants differ in the last bits; each
    # variant always reproduces its own.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
)
LINK = ("-shared", "-pthread", "-Wl,-z,defs")
EXPORTS = SOURCES / "exports.map"
# With its own C++ runtime inside: a process may have another one, such as torch's.
STATIC = ("-static-libstdc++", "-static-libgcc", "-s")
SANITIZERS = {
    "address": ("-fsanitize=address", "-fno-omit-frame-pointer", "-g", "-O1"),
    # GCC's `undefined` does not include floats that do not fit the integer they are converted to.
    "undefined": ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-g", "-O1"),
    "thread": ("-fsanitize=thread", "-g", "-O1"),
}


class BuildError(RuntimeError):
    """The kernels cannot be built; the message says what was tried, or what the compiler said."""


class NoCompiler(BuildError):
    """There is no compiler here; an optional build does without the kernels."""


@dataclass(frozen=True)
class Built:
    """One library.

    Attributes:
        variant: Its instruction set.
        path: Its path.
        fresh: Whether this run made it.
    """

    variant: str
    path: Path
    fresh: bool


def find_compiler() -> list[str]:
    """The command of the C++ compiler: CXX, else the first of `COMPILERS` that exists.

    Raises:
        NoCompiler: There is none.
        BuildError: CXX names one that does not exist.
    """
    given = os.environ.get("CXX", "")
    if given:
        words = shlex.split(given)
        if shutil.which(words[0]) is None:
            raise BuildError(f"found CXX={given}; expected an installed C++ compiler")
        return words
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise NoCompiler(f"no C++ compiler: none of CXX, {', '.join(COMPILERS)} is there")


def machine() -> str:
    """The processor's family as `VARIANTS` names it."""
    found = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(found, found)


def processor_flags() -> set[str]:
    """Flags of this processor as Linux names them; empty if it does not tell."""
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def native_variant(target: str | None = None) -> str:
    """The variant that the loader would pick here; empty if the target is another machine."""
    flags = {flag.replace("bmi1", "bmi") for flag in processor_flags()}  # as the compiler names it
    for name, wanted in VARIANTS.get(machine(), {}).items():
        if all(flag.removeprefix("-m") in flags for flag in wanted if "=" not in flag):
            return name if target in (None, machine()) else ""
    return ""


def library_name(variant: str) -> str:
    """File name of a variant's library."""
    return f"libnpugrad_kernels_{variant}.so"


def build(
    out: Path = LIBRARIES,
    *,
    variants: list[str] | None = None,
    target: str | None = None,
    compiler: list[str] | None = None,
    sanitizers: tuple[str, ...] = (),
    jobs: int | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> list[Built]:
    """Builds the libraries, that of this processor first: it can be used while the others are compiled.

    Args:
        out: Output folder; made if it is missing.
        variants: Variants to build; None for all of the machine's.
        target: Machine to build for, as `VARIANTS` names it; None for this one.
        compiler: Command of the compiler; None finds one.
        sanitizers: Names in `SANITIZERS`; such libraries are for tests.
        jobs: Compilers that run at once; None for one per processor.
        tell: Gets a line about each library as soon as it is there.

    Raises:
        BuildError: There is no compiler, it failed, or there are no variants for the machine.
    """
    known = VARIANTS.get(target or machine(), {})
    if not known:
        raise BuildError(f"found machine {target or machine()}; the kernels know {', '.join(VARIANTS)}")
    unknown = [name for name in variants or () if name not in known]
    if unknown:
        raise BuildError(f"found variant {unknown[0]}; expected one of {', '.join(known)}")
    command = compiler or find_compiler()
    out.mkdir(parents=True, exist_ok=True)
    native = native_variant(target)
    wanted = {name: known[name] for name in sorted(variants or known, key=lambda name: name != native)}
    version = _run([*command, "--version"])
    checks = [flag for name in sanitizers for flag in SANITIZERS[name]]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        makers = [_Library(out, name, [*flags, *checks], command, version) for name, flags in wanted.items()]
        stale = [maker for maker in makers if not maker.is_fresh()]
        with tempfile.TemporaryDirectory(prefix="npugrad-kernels-") as folder:
            for maker in stale:
                maker.start(pool, Path(folder))
            for maker in makers:
                if maker in stale:
                    maker.finish(Path(folder), static=not sanitizers)
                done = "built" if maker in stale else "up to date"
                what = f"{maker.variant}, for this processor" if maker.variant == native else maker.variant
                tell(f"kernels: {what}: {done}, {maker.path}")
    return [Built(maker.variant, maker.path, maker in stale) for maker in makers]


class _Library:
    """One variant being built; a stamp next to the library identifies what it was made from."""

    def __init__(self, out: Path, variant: str, flags: list[str], command: list[str], version: str) -> None:
        self.variant, self.path = variant, out / library_name(variant)
        self._command, self._flags = command, [*FLAGS, *flags]
        self._stamp = out / f".{variant}.stamp"
        key = hashlib.sha256("\0".join([*command, version, *self._flags, *LINK, *STATIC]).encode())
        for path in [EXPORTS, *sorted(SOURCES.glob("*.h")), *sorted(SOURCES.glob("*.cpp"))]:
            key.update(path.name.encode() + b"\0" + path.read_bytes())
        self._key = key.hexdigest()

    def is_fresh(self) -> bool:
        try:
            return self.path.is_file() and self._stamp.read_text() == self._key
        except OSError:
            return False

    def start(self, pool: ThreadPoolExecutor, folder: Path) -> None:
        self._objects = {
            source: folder / f"{self.variant}-{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))
        }
        self._done = [
            pool.submit(_run, [*self._command, *self._flags, "-c", str(source), "-o", str(made)])
            for source, made in self._objects.items()
        ]

    def finish(self, folder: Path, *, static: bool) -> None:
        warnings = "".join(each.result() for each in self._done)
        draft = folder / self.path.name
        # Without the variant's flags: Zig would rebuild its C++ runtime for each variant.
        flags = [flag for flag in self._flags if not flag.startswith("-m")]
        link = [*self._command, *flags, *LINK, f"-Wl,--version-script={EXPORTS}", "-o", str(draft)]
        link += map(str, self._objects.values())
        if not static:
            # A sanitizer's runtime comes with the process that loads the library.
            link.remove("-Wl,-z,defs")
        try:
            _run([*link, *(STATIC if static else ())])
        except BuildError:
            if not static:
                raise
            _run(link)  # a compiler without static runtimes
        sys.stderr.write(warnings)
        # Renamed when complete: a process that starts meanwhile loads either the old one or the new one.
        complete = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        shutil.copyfile(draft, complete)
        complete.chmod(0o755)
        complete.replace(self.path)
        self._stamp.write_text(self._key)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main(arguments: list[str] | None = None) -> int:
    """Builds the libraries and prints what was done."""
    parser = argparse.ArgumentParser(prog="build.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=LIBRARIES, help="folder of the libraries")
    parser.add_argument("--variant", action="append", help="of this machine; all by default")
    parser.add_argument(
        "--target", choices=list(VARIANTS), help="machine to build for; CXX must be its compiler"
    )
    parser.add_argument("--asan", action="store_true", help="with AddressSanitizer, for tests")
    parser.add_argument("--ubsan", action="store_true", help="with UndefinedBehaviorSanitizer, for tests")
    parser.add_argument("--tsan", action="store_true", help="with ThreadSanitizer, for tests")
    parser.add_argument(
        "--optional", action="store_true", help=f"without a compiler, or with {SETTING}=0, do without them"
    )
    options = parser.parse_args(arguments)
    chosen = {"address": options.asan, "undefined": options.ubsan, "thread": options.tsan}
    sanitizers = tuple(name for name, wanted in chosen.items() if wanted)
    wanted = os.environ.get(SETTING, "").strip()
    if options.optional and wanted == "0":
        print(f"kernels: none built: {SETTING}=0")
        return 0
    start = time.monotonic()
    try:
        build(
            options.out,
            variants=options.variant,
            target=options.target,
            sanitizers=sanitizers,
            tell=partial(print, flush=True),
        )
    except BuildError as error:
        if options.optional and wanted != "1" and isinstance(error, NoCompiler):
            print(f"kernels: none built, the CPU backend will run its reference: {error}")
            return 0
        sys.stderr.write(f"kernels: {error}\n")
        return 1
    print(f"kernels: {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
