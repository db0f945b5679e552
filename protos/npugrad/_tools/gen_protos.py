"""Compile the protos of the contract, byte for byte the same on every machine.

Run by path (``python protos/npugrad/_tools/gen_protos.py [--check]``) in the environment that ``make gen``
keeps in ``.venv-gen``: importing the package would already need the generated files.

The toolchain is pinned to the *oldest* one that supports our Python range, because generated code refuses to
run under a protobuf or grpcio older than its generator: these pins are the runtime floors in
``pyproject.toml``. Change each in a separate commit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {Path("npugrad/v1"): ROOT / "protos"}
"""Folders with protos, by import path, and the root of each."""
PINS = {"grpcio-tools": "1.67.1", "mypy-protobuf": "3.6.0"}
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def require_pins() -> None:
    """Exit with a message if the running environment is not the pinned one.

    Raises:
        SystemExit: A tool's version is not the pinned one; the message names tool, found and expected.
    """
    for name, expected in PINS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "absent"
        if found != expected:
            raise SystemExit(f"gen_protos: {name} is {found}, expected {expected}; run it by `make gen`")


def sources() -> list[Path]:
    """Return the proto files as protoc should name them, sorted: output must not depend on the disk."""
    return sorted(
        path.relative_to(root) for folder, root in FOLDERS.items() for path in (root / folder).glob("*.proto")
    )


def compile_into(target: Path) -> dict[str, bytes]:
    """Compile every proto file below ``target``.

    Args:
        target: An existing folder; files land in ``target/npugrad/v1`` and the like.

    Returns:
        Contents by path, for instance ``npugrad/v1/tensor_pb2.py``.

    Raises:
        SystemExit: protoc refused a file; it has printed the reason itself.
    """
    from grpc_tools import protoc

    scripts = Path(sys.executable).parent
    outputs = [f"--{plugin}_out={target}" for plugin in ("python", "grpc_python")]
    outputs += [f"--{plugin}_out=quiet:{target}" for plugin in ("mypy", "mypy_grpc")]
    plugins = [
        f"--plugin=protoc-gen-{name}={scripts / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")
    ]
    # grpcio-tools ships the well-known types in its own folder.
    includes = [*(f"-I{root}" for root in FOLDERS.values()), f"-I{Path(protoc.__file__).parent / '_proto'}"]
    status = protoc.main(["protoc", *includes, *plugins, *outputs, *map(str, sources())])
    if status != 0:
        raise SystemExit(f"gen_protos: protoc ended with status {status}")
    files = sorted(path for folder in FOLDERS for path in (target / folder).iterdir())
    return {
        path.relative_to(target).as_posix(): as_committed(path.read_bytes())
        for path in files
        if not is_bare_stub(path)
    }


def is_bare_stub(path: Path) -> bool:
    """Tell whether the file is the gRPC half of a proto without a service: imports and nothing else."""
    if not path.name.endswith(("_pb2_grpc.py", "_pb2_grpc.pyi")):
        return False
    python = path.with_suffix(".py").read_text(encoding="utf-8")
    return "Stub(object)" not in python


def as_committed(content: bytes) -> bytes:
    """Return the content with exactly one newline at its end, as the repository requires of text."""
    return content.rstrip() + b"\n"


def committed() -> dict[str, bytes]:
    """Return the generated files in the working tree by path."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for folder, root in FOLDERS.items()
        for path in (root / folder).iterdir()
        if path.name.endswith(SUFFIXES)
    }


def place(name: str) -> Path:
    """Return the path of a generated file in the working tree."""
    return FOLDERS[Path(name).parent] / name


def drift(fresh: dict[str, bytes], present: dict[str, bytes]) -> list[str]:
    """Return one line for each file that is missing, left over or different, sorted by name.

    Args:
        fresh: What the generator makes now.
        present: What the working tree has.
    """
    lines = []
    for name in sorted(fresh.keys() | present.keys()):
        if name not in present:
            lines.append(f"{name}: missing")
        elif name not in fresh:
            lines.append(f"{name}: its .proto is gone")
        elif fresh[name] != present[name]:
            lines.append(f"{name}: differs")
    return lines


def write(fresh: dict[str, bytes], present: dict[str, bytes]) -> None:
    """Bring the working tree to ``fresh``; unchanged files keep their timestamps."""
    for name in present.keys() - fresh.keys():
        place(name).unlink()
    for name, content in fresh.items():
        if present.get(name) != content:
            place(name).write_bytes(content)


def main() -> int:
    """Generate, or with ``--check`` compare.

    Returns:
        0 if all is as it should be, 1 if ``--check`` found a difference.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    parser.add_argument("--requirements", action="store_true", help="print the pins for pip and end")
    arguments = parser.parse_args()
    if arguments.requirements:
        print(*(f"{name}=={pin}" for name, pin in PINS.items()))
        return 0
    require_pins()
    with tempfile.TemporaryDirectory() as folder:
        fresh = compile_into(Path(folder))
    lines = drift(fresh, committed())
    if not arguments.check:
        write(fresh, committed())
    for line in lines:
        print(line)
    if arguments.check and lines:
        print("gen_protos: generated files are not up to date; run `make gen`")
        return 1
    print(f"gen_protos: {len(fresh)} files from {len(sources())} protos, {len(lines)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
