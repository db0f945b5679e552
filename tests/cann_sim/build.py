"""Builds the simulated CANN: `python -m tests.cann_sim.build OUT_DIR` takes some seconds with g++.

OUT_DIR then looks like an installed toolkit (`lib64`, `opp`, `runtime`, `compiler`). The command prints the
environment variables that make torch_npu, and anything else that asks for CANN, use it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from tests.cann_sim import stubs
from tests.pages import Facts

from npugrad.ops import OPERATORS
from npugrad.releases import CannRelease

Layout = Literal["split", "single", "both"]

SOURCES = Path(__file__).parent / "src"
DEFAULT_CANN = "9.1.0"
FIRST_CANN_WITH = {
    "CANN_SIM_HAS_CANN_VERSION": CannRelease.parse("8.1.RC1"),
    "CANN_SIM_HAS_VERSION_STR": CannRelease.parse("8.5.0.alpha001"),
}
"""Releases from which on the runtime has a function, by what the build defines to have it."""
ARITHMETIC = "CANN_SIM_ARITHMETIC"
"""Variable with the socket of the process that computes for generated operators."""
JOBS = 2
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-pthread")

# Libraries that torch_npu needs to find, though nothing in them is used.
_EMPTY_LIBRARIES = ("hccl", "ge_runner", "graph", "acl_tdt_channel")
# What the first lines of an operator's source say of where it is.
_PLACE = re.compile(r"^// In libopapi_(\w+)(?:, from CANN (\S+) on)?\.$", re.MULTILINE)
# Phase 2 of an operator, in its source.
_LAUNCH = re.compile(r"int (aclnn\w+)\(void\* workspace")
# Names of the vendor's C functions, among what a library of torch_npu leaves undefined.
_VENDOR_FUNCTION = re.compile(r"(acl|rt[A-Z]|Msprof|Hccl|Hcom|Prof|tdt|Adx)\w+")


@dataclass(frozen=True)
class Installation:
    """A built simulator.

    Attributes:
        home: Its folder, in the place of the toolkit's.
        warnings: What the compiler had to say.
        arithmetic: Socket of the process that computes for generated operators; see `arithmetic.py`.
    """

    home: Path
    warnings: str = ""
    arithmetic: Path | None = None

    @property
    def libraries(self) -> Path:
        """Folder of the shared libraries."""
        return self.home / "lib64"

    @property
    def operator_sources(self) -> list[Path]:
        """Sources of operators, the generated ones last."""
        return [*_sources("opapi"), *sorted(self.home.glob("generated/*.cpp"))]

    def environment(self, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables that select it; what `inherited` has in LD_LIBRARY_PATH stays behind it."""
        others = (os.environ if inherited is None else inherited).get("LD_LIBRARY_PATH", "")
        return {
            "ASCEND_HOME_PATH": str(self.home),
            "ASCEND_OPP_PATH": str(self.home / "opp"),
            "LD_LIBRARY_PATH": f"{self.libraries}:{others}" if others else str(self.libraries),
            # Else a plain `import torch` fails wherever torch_npu is installed without CANN.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            **({ARITHMETIC: str(self.arithmetic)} if self.arithmetic else {}),
        }


def build(
    out: Path,
    *,
    layout: Layout = "split",
    cann: str = DEFAULT_CANN,
    torch_npu: Path | None = None,
    objects: Path | None = None,
    generate: Collection[str] | None = None,
) -> Installation:
    """Builds one installation.

    Args:
        out: Folder of the installation; what lies there of an older one is replaced.
        layout: `split` has libopapi_nn, _cv and _transformer, `single` has libopapi alone, `both` has all.
        cann: Release it plays; functions that it does not have yet are missing, as in the real one.
        torch_npu: Folder of the installed package whose undefined functions become traps; None finds it in
            this interpreter, and leaves traps out if it is not there.
        objects: Folder of compiled files, to share between installations; None keeps them in `out`.
        generate: Functions to generate from their pages, in place of their sources here if they have any;
            None for those that are served and have none.

    Raises:
        RuntimeError: The compiler failed; the message is its own.
    """
    libraries = out / "lib64"
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir(parents=True)
    _write_version_files(out, cann)
    compiler = _Compiler(objects or out / "obj", libraries)
    _build_runtime(compiler, cann, torch_npu or find_torch_npu())
    _build_operators(compiler, layout, cann, generated_pages(cann, generate))
    return Installation(out, compiler.warnings)


def installed(
    folder: Path,
    layout: Layout = "split",
    cann: str = DEFAULT_CANN,
    generate: Collection[str] | None = None,
) -> Installation:
    """One that is built unless these sources were before, below a folder that processes and runs share."""
    key = hashlib.sha256(Path(__file__).read_bytes() + str(find_torch_npu()).encode())
    for path in sorted(SOURCES.glob("*/*")):
        key.update(path.read_bytes())
    key.update("".join(map(stubs.phases, generated_pages(cann, generate))).encode())
    home = folder / f"{layout}-{cann}-{key.hexdigest()[:16]}"
    told = home / "warnings"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".installing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            told.write_text(build(home, layout=layout, cann=cann, objects=folder, generate=generate).warnings)
    return Installation(home, told.read_text())


@cache
def written_here() -> frozenset[str]:
    """Functions that have a source here; those of other operators are generated."""
    return frozenset().union(*map(_operators_in, _sources("opapi")))


def find_torch_npu() -> Path | None:
    """Folder of the installed torch_npu; found without importing it, which needs the libraries built here."""
    spec = importlib.util.find_spec("torch_npu")
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def vendor_functions(torch_npu: Path) -> set[str]:
    """The C functions of CANN that the libraries of torch_npu expect the dynamic linker to find."""
    wanted: set[str] = set()
    for library in (*torch_npu.glob("_C*.so"), *torch_npu.glob("lib/lib*.so")):
        # It links libraries of a further product, and is loaded by nothing we use.
        if library.name != "libop_plugin_atb.so":
            wanted |= {
                name for name in _symbols(library, "--undefined-only") if _VENDOR_FUNCTION.fullmatch(name)
            }
    return wanted


def _build_runtime(compiler: _Compiler, cann: str, torch_npu: Path | None) -> None:
    model = _sources("model")
    ascendcl = [path for path in _sources("ascendcl") if path.stem != "op_compiler_api"]
    op_compiler = [SOURCES / "ascendcl" / "op_compiler_api.cpp"]
    nnopbase = _sources("nnopbase")
    defines = {
        "version": [f'-DCANN_SIM_VERSION="{cann}"'],
        "version_api": [f"-D{name}" for name, first in FIRST_CANN_WITH.items() if _is_since(cann, first)],
    }
    built = compiler.compile([*model, *ascendcl, *op_compiler, *nnopbase], defines)
    wanted = vendor_functions(torch_npu) if torch_npu else set()
    modelled = set().union(*(_symbols(path, "--defined-only") for path in built.values()))
    traps = compiler.compile([_write_traps(compiler.libraries.parent, wanted - modelled)])
    compiler.link("cann_sim", [built[path] for path in model])
    compiler.link("ascendcl", [*(built[path] for path in ascendcl), *traps.values()], ["cann_sim"])
    compiler.link("acl_op_compiler", [built[path] for path in op_compiler], ["ascendcl", "cann_sim"])
    compiler.link("nnopbase", [built[path] for path in nnopbase], ["cann_sim"])
    for name in _EMPTY_LIBRARIES:
        compiler.link(name, [])


def generated_pages(cann: str, generate: Collection[str] | None = None) -> list[Facts]:
    """Pages of the functions to generate; KeyError for one that has none."""
    pages = stubs.pages_of(cann)
    if generate is not None:
        return [pages[name] for name in generate]
    served = (record.aclnn_name for record in OPERATORS.values())
    return [pages[name] for name in served if name in pages and name not in written_here()]


def _operators_in(source: Path) -> set[str]:
    return set(_LAUNCH.findall(source.read_text()))


def _build_operators(compiler: _Compiler, layout: Layout, cann: str, pages: Collection[Facts]) -> None:
    replaced = {page.name for page in pages}
    sources = [path for path in _sources("opapi") if not _operators_in(path) & replaced]
    options = {path.stem: ["-O3"] for path in sources}  # long loops, for vectors
    generated = stubs.write(pages, compiler.libraries.parent / "generated")
    options |= {path.stem: [f"-I{SOURCES}"] for path in generated}
    sources += generated
    built = compiler.compile(sources, options)
    sets: dict[str, list[Path]] = {}
    for source, made in built.items():
        place = _PLACE.search(source.read_text())
        assert place, f"{source}: found no line such as // In libopapi_nn."
        parts = sets.setdefault(place[1], [])
        if place[2] is None or _is_since(cann, CannRelease.parse(place[2])):
            parts.append(made)
    if layout != "single":
        for name, parts in sets.items():
            compiler.link(f"opapi_{name}", parts, ["nnopbase", "cann_sim"])
    if layout != "split":
        compiler.link("opapi", [part for parts in sets.values() for part in parts], ["nnopbase", "cann_sim"])


def _sources(folder: str) -> list[Path]:
    return sorted((SOURCES / folder).glob("*.cpp"))


def _symbols(path: Path, which: str) -> set[str]:
    """Names in a symbol table, of an object or a shared library, without versions."""
    table = [] if path.suffix == ".o" else ["--dynamic"]
    listing = _run(["nm", *table, which, "--format=just-symbols", str(path)])
    return {name for name in listing.split() if "@" not in name}


def _write_traps(folder: Path, names: Iterable[str]) -> Path:
    """A function for each name that ends the process: an error code would let callers go on with nonsense."""
    lines = ['extern "C" [[noreturn]] void cann_sim_trap(const char* function);', 'extern "C" {']
    lines += [f'void {name}() {{ cann_sim_trap("{name}"); }}' for name in sorted(names)]
    path = folder / "traps.cpp"
    path.write_text("\n".join([*lines, "}", ""]))
    return path


def _is_since(cann: str, first: CannRelease) -> bool:
    return CannRelease.parse(cann) >= first


def _write_version_files(out: Path, cann: str) -> None:
    """As installers write them: components have numbers of their own beside the release."""
    for folder in ("opp", "runtime", "compiler"):
        (out / folder).mkdir(parents=True, exist_ok=True)
        (out / folder / "version.info").write_text(f"Version=7.7.0.1.238\nversion_dir={cann}\n")
    toolkit = out / f"{platform.machine()}-linux"
    toolkit.mkdir(exist_ok=True)
    (toolkit / "ascend_toolkit_install.info").write_text(
        f"package_name=Ascend-cann-toolkit\nversion={cann}\narch={platform.machine()}\nos=linux\n"
    )


class _Compiler:
    """Compiles what has changed, some files at a time, and links."""

    def __init__(self, objects: Path, libraries: Path) -> None:
        objects.mkdir(parents=True, exist_ok=True)
        self.objects = objects
        self.libraries = libraries
        self.warnings = ""
        headers = sorted(SOURCES.glob("*/*.h"))
        self._headers = b"".join(path.read_bytes() for path in headers)

    def compile(
        self, sources: Iterable[Path], defines: Mapping[str, list[str]] | None = None
    ) -> dict[Path, Path]:
        """Object file of each source."""
        paths, extra = list(sources), defines or {}
        # One process compiles; those that run tests beside it wait, and find everything there.
        with (self.objects / ".lock").open("w") as lock, ThreadPoolExecutor(JOBS) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)
            objects = pool.map(lambda path: self._compile(path, extra.get(path.stem, [])), paths)
            return dict(zip(paths, objects, strict=True))

    def _compile(self, source: Path, defines: list[str]) -> Path:
        key = hashlib.sha256(self._headers + source.read_bytes() + "".join((*_FLAGS, *defines)).encode())
        compiled = self.objects / f"{source.stem}-{key.hexdigest()[:16]}.o"
        if not compiled.exists():
            # Renamed when complete, so that builds that share the folder never see half of it.
            draft = compiled.with_suffix(f".{os.getpid()}")
            self.warnings += _run(["g++", *_FLAGS, *defines, "-c", str(source), "-o", str(draft)])
            draft.rename(compiled)
        return compiled

    def link(self, name: str, parts: Iterable[Path], needs: Iterable[str] = ()) -> None:
        """Makes a shared library that finds its neighbours by itself."""
        library = f"lib{name}.so"
        command = ["g++", "-shared", "-pthread", "-Wl,-z,defs", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        command += [f"-Wl,-soname,{library}", "-o", str(self.libraries / library), *map(str, parts)]
        command += [f"-L{self.libraries}", *(f"-l{need}" for need in needs)]
        self.warnings += _run(command)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout + done.stderr


def main(arguments: list[str] | None = None) -> int:
    """Builds one installation and prints its environment."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cann_sim.build", description=__doc__.splitlines()[0]
    )
    parser.add_argument("out", type=Path, help="folder of the installation")
    parser.add_argument("--layout", choices=get_args(Layout), default="split")
    parser.add_argument("--cann", default=DEFAULT_CANN, help="release to play, with the functions it has")
    parser.add_argument("--torch-npu", type=Path, help="folder of an installed torch_npu, for the traps")
    parser.add_argument(
        "--generate",
        nargs="*",
        metavar="NAME",
        help="functions to generate from their pages, or all; by default those that are served",
    )
    parser.add_argument("--objects", type=Path, help="folder of compiled files; OUT_DIR/obj by default")
    options = parser.parse_args(arguments)
    made = build(
        options.out.resolve(),
        layout=options.layout,
        cann=options.cann,
        torch_npu=options.torch_npu,
        objects=options.objects and options.objects.resolve(),
        generate=stubs.pages_of(options.cann) if options.generate == ["all"] else options.generate,
    )
    sys.stderr.write(made.warnings)
    for name, value in made.environment().items():
        print(f"export {name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
