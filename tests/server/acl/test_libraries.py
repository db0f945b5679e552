"""Which libraries are taken, and what is said when they are not there.

Small libraries stand for CANN's: each operator library exports a function that tells which one it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.interpreter import printed

pytestmark = pytest.mark.npu_sim

RUNTIME = ("libascendcl.so", "libnnopbase.so")
SPLIT = ("libopapi_nn.so", "libopapi_cv.so", "libopapi_transformer.so")
PROGRAM = """
import json, sys
from ctypes import c_int32
from npugrad_server.acl.libraries import Cann, LibraryError, SymbolMissing, origin
from npugrad_server.acl.symbols import Symbol
try:
    cann = Cann()
except LibraryError as error:
    json.dump({"error": str(error)}, sys.stdout)
else:
    names = ("which", "nowhere", "custom")
    bound = cann.operator([Symbol(name, c_int32, (), since="12.5") for name in names])
    found = {"layout": cann.layout, "libraries": list(cann.libraries), "simulated": cann.simulated}
    found["attempts"] = [str(attempt) for attempt in cann.attempts]
    found["which"] = bound["which"]() if bound.has("which") else None
    found["origin"] = origin(bound["which"])
    found["custom"] = bound.has("custom")
    try:
        bound["nowhere"]()
    except SymbolMissing as error:
        found["missing"] = str(error)
    json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="session")
def compile_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, Sequence[str]], Path]:
    """Give a function that makes a library with functions that return 0, or the number after a colon."""
    if not shutil.which("gcc"):
        pytest.skip("needs a C compiler")

    def make(path: Path, functions: Sequence[str]) -> Path:
        source = tmp_path_factory.mktemp("source") / "library.c"
        named = [name.partition(":") for name in functions]
        source.write_text(
            "".join(f"int {name}(void) {{ return {number or 0}; }}\n" for name, _, number in named)
        )
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        return path

    return make


@pytest.fixture
def home(tmp_path: Path, compile_library: Callable[[Path, Sequence[str]], Path]) -> Path:
    """Give a folder like a toolkit's, with the runtime's libraries."""
    from npugrad_server.acl.symbols import RUNTIME as RUNTIME_SYMBOLS
    from npugrad_server.acl.symbols import TENSORS

    folder = tmp_path / "lib64"
    folder.mkdir()
    compile_library(folder / RUNTIME[0], [s.name for s in RUNTIME_SYMBOLS if not s.optional])
    compile_library(folder / RUNTIME[1], [s.name for s in TENSORS])
    return tmp_path


def resolve(home: Path | None, **variables: str) -> dict[str, Any]:
    """What a process finds whose environment names this CANN."""
    kept = ("PATH", "PYTHONPATH", "HOME")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    if home is not None:
        environment["ASCEND_HOME_PATH"] = str(home)
    found: dict[str, Any] = json.loads(printed(PROGRAM, env={**environment, **variables}, timeout_s=300))
    return found


Compile = "Callable[[Path, Sequence[str]], Path]"


def test_the_split_set_is_preferred_and_nothing_is_mixed_into_it(home: Path, compile_library: Any) -> None:
    libraries = home / "lib64"
    compile_library(libraries / "libopapi.so", ["which:9", "nowhere", "custom"])
    compile_library(libraries / "libcust_opapi.so", ["custom", "nowhere"])
    compile_library(libraries / SPLIT[0], ["unrelated"])
    compile_library(libraries / SPLIT[1], ["which:2"])
    found = resolve(home)
    assert (found["layout"], found["libraries"], found["which"]) == ("split", list(SPLIT[:2]), 2)
    assert Path(found["origin"]).name == SPLIT[1]
    assert found["custom"] is False
    assert found["missing"] == "nowhere is not in libopapi_nn.so, libopapi_cv.so; expected CANN 12.5 or newer"
    assert any(a.startswith(f"{libraries}/{SPLIT[2]}: ") for a in found["attempts"])
    assert not found["simulated"]


def test_one_library_serves_where_the_split_set_does_not_begin(home: Path, compile_library: Any) -> None:
    """Parts of a set without its first library are of another installation."""
    compile_library(home / "lib64" / SPLIT[1], ["which:2"])
    compile_library(home / "lib64" / "libopapi.so", ["which:9"])
    found = resolve(home)
    assert (found["layout"], found["libraries"], found["which"]) == ("single", ["libopapi.so"], 9)


def test_an_older_layout_is_the_last_choice(home: Path, compile_library: Any) -> None:
    compile_library(home / "lib64" / "libaclnn_ops_train.so", ["which:5"])
    found = resolve(home)
    assert (found["layout"], found["which"]) == ("by purpose", 5)


def test_the_loaders_own_search_comes_first(home: Path, compile_library: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    compile_library(home / "lib64" / "libopapi.so", ["which:9"])
    compile_library(other / "libopapi.so", ["which:10"])
    assert resolve(home, LD_LIBRARY_PATH=str(other))["which"] == 10


def test_an_add_on_alone_is_no_cann(home: Path, compile_library: Any) -> None:
    compile_library(home / "lib64" / "libcust_opapi.so", ["which:1"])
    error = resolve(home)["error"]
    assert "no operator library: libopapi_nn.so or libopapi.so or libaclnn_ops_train.so" in error
    assert "libcust_opapi" not in error


def test_all_that_was_tried_is_told_with_the_reason(home: Path, compile_library: Any) -> None:
    (home / "lib64" / RUNTIME[0]).write_bytes(b"no library at all")
    error = resolve(home)["error"]
    assert "libascendcl.so cannot be loaded" in error
    assert "libascendcl.so: cannot open shared object file" in error
    assert f"{home}/lib64/libascendcl.so: file too short" in error or "invalid ELF header" in error
    assert f"ASCEND_HOME_PATH={home}" in error
    assert "set_env.sh" in error


def test_no_cann_at_all(tmp_path: Path) -> None:
    error = resolve(None)["error"]
    assert "ASCEND_HOME_PATH=not set, ASCEND_TOOLKIT_HOME=not set" in error


def test_a_runtime_without_a_needed_function_is_refused(home: Path, compile_library: Any) -> None:
    compile_library(home / "lib64" / RUNTIME[0], ["aclInit"])
    compile_library(home / "lib64" / "libopapi.so", ["which:9"])
    error = resolve(home)["error"]
    assert "aclrtMemcpyAsync is not in libascendcl.so; expected CANN 8.0 or newer" in error
    assert "aclInit is not" not in error
    assert "aclsysGetVersionStr" not in error
