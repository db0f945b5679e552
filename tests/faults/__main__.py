"""`python -m tests.faults`: what the tests notice of 60 faults, planted one at a time in this checkout.

For each fault it runs the tests of `make test` in the files that import the changed module, with ``-x``; if
they notice nothing, `make test` as a whole, then `make test-all`, and `make test-npu` for what drives an NPU.
A test that fails without the fault too has noticed nothing. Whole runs take hours: ``--stage importing`` does
without them. Results go to ``build/faults.json``, and later runs continue there.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = {"protos": "npugrad", "server": "npugrad_server", "client": "npugrad_client"}
_LIBRARIES = ROOT / "server" / "npugrad_server" / "backends" / "cpu" / "lib"
_RESULTS = ROOT / "build" / "faults.json"
_NPU = re.compile(r"server/npugrad_server/(acl|backends/npu)/")
STAGES = ("importing", "test", "all", "npu")
_SHORT = ("-m", "not deep and not large and not bench and not npu_sim", "--hypothesis-profile", "quick")
_WHOLE = ("--ignore", "tests/faults")
"""Its own tests notice each fault: its place is no longer there."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@dataclass(frozen=True)
class Fault:
    """A mistake.

    Attributes:
        name: What it is called.
        area: The file that tells of it: contract, server, client, kernels or deployment.
        file: What it changes, from the root of the repository.
        old: What stands there once.
        new: What it puts there.
        harm: What goes wrong.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    harm: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Has it in the checkout for a block; kernels are compiled, and theirs are put back."""
        path = ROOT / self.file
        text = path.read_text("utf-8")
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.name}: found {text.count(self.old)} places in {self.file}; expected 1")
        with _kept(_LIBRARIES) if self.area == "kernels" else tempfile.TemporaryDirectory():
            path.write_text(text.replace(self.old, self.new), "utf-8")
            try:
                if self.file.startswith("server/kernels/"):
                    subprocess.run([sys.executable, "server/kernels/build.py"], cwd=ROOT, check=True)
                yield
            finally:
                path.write_text(text, "utf-8")


@contextmanager
def _kept(folder: Path) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as copies:
        copy = shutil.copytree(folder, Path(copies) / "copy")
        try:
            yield
        finally:
            shutil.rmtree(folder)
            shutil.copytree(copy, folder)


def faults() -> list[Fault]:
    """All of them, in the order of their files."""
    return [
        Fault(area=path.stem, **fault)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for fault in tomllib.loads(path.read_text("utf-8"))["fault"]
    ]


# ------------------------------------------------------------------------------------ which tests


def importing(file: str) -> list[list[str]]:
    """Test files to run one list after the other: those named after a module, then those that import it.

    Where none imports it, those are taken that import what does.
    """
    folder, _, rest = file.partition("/")
    package = _SOURCES.get(folder, "")
    if not file.endswith(".py") or not rest.startswith(package):
        # Kernels have a folder of tests, and so has all that is deployed.
        return [[f"tests/{'server/kernels' if folder == 'server' else 'deploy'}"]]
    searched, wanted, found = set[str](), {_module(rest)}, set[str]()
    while wanted and not found:
        found = {test for test in _imports("tests") if _imports("tests")[test] & wanted}
        searched |= wanted
        wanted = {
            _module(path.partition("/")[2])
            for source in _SOURCES
            for path, imported in _imports(source).items()
            if imported & wanted
        } - searched
    stem = Path(file).stem.strip("_")
    named = {test for test in _imports("tests") if re.fullmatch(rf"test_{stem}(_\w+)?", Path(test).stem)}
    return [sorted(tests) for tests in (named, found - named) if tests]


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def _imports(folder: str) -> dict[str, set[str]]:
    """Modules that each file imports; of the tests, only files of tests."""
    pattern = "test_*.py" if folder == "tests" else "*.py"
    return {str(path.relative_to(ROOT)): _imported(path) for path in ROOT.glob(f"{folder}/**/{pattern}")}


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


# ------------------------------------------------------------------------------------ what they say


def noticed(fault: Fault, stages: Sequence[str], past: Mapping[str, str]) -> dict[str, str]:
    """The test that fails because of a fault, by stage; empty where none does. Ends at the first."""
    found = dict(past)
    for stage in stages:
        if any(found.values()) or stage in found or (stage == "npu" and not _NPU.match(fault.file)):
            continue
        runs = importing(fault.file) if stage == "importing" else [[]]
        with fault.planted():
            failed = next(filter(None, (_failed(stage, _arguments(stage, tests)) for tests in runs)), "")
        is_by_chance = failed.startswith("tests/") and _failed(stage, ["-m", "not bench", failed])
        found[stage] = "" if is_by_chance else failed
    return found


def _arguments(stage: str, tests: Sequence[str]) -> list[str]:
    at_once = ["-n", "3" if stage == "npu" else "4", "--dist", "worksteal"]
    return {
        "importing": [*_SHORT, *(at_once if len(tests) > 10 else []), *tests],
        "test": [*_WHOLE, *_SHORT, *at_once],
        "all": [*_WHOLE, *at_once],
        "npu": [*_WHOLE, "-m", "npu_sim", *at_once],
    }[stage]


def _failed(stage: str, arguments: Sequence[str]) -> str:
    """The first test that fails in a run; the exit code of one that ends without such a test."""
    python = ROOT / ".venv-npu/bin/python" if stage == "npu" else sys.executable
    done = subprocess.run(
        [python, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {done.returncode}"


def main() -> int:
    """Plants them, and prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults; all without")
    parser.add_argument("--stage", choices=STAGES, default=STAGES[-1], help="the last one to try")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stages = STAGES[: STAGES.index(arguments.stage) + 1]
    results = json.loads(_RESULTS.read_text("utf-8")) if _RESULTS.exists() else {}
    for fault in faults():
        if arguments.names and fault.name not in arguments.names:
            continue
        results[fault.name] = noticed(fault, stages, results.get(fault.name, {}))
        _RESULTS.parent.mkdir(exist_ok=True)
        _RESULTS.write_text(json.dumps(results, indent=1), "utf-8")
        by = [f"{stage}: {test}" for stage, test in results[fault.name].items() if test]
        print(f"{fault.area}\t{fault.name}\t{by[0] if by else 'not noticed'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
