"""When the commands compile the kernels again; make only prints what it would do."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
BUILD = "server/kernels/build.py --optional"


def commands(target: str, environment: Path, *options: str) -> str:
    """What make would run, with one folder as the virtual environment of every kind."""
    command = ["make", "-n", *options, target, f"VENV={environment}", f"VENV_NPU={environment}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def touch(path: Path, seconds_ago: float) -> None:
    """Makes a file as old as that."""
    path.touch()
    then = time.time() - seconds_ago
    os.utime(path, (then, then))


@pytest.mark.parametrize("target", ["new-operator", "gen", "chart"])
def test_generators_wait_for_neither_torch_nor_kernels_and_need_nothing_where_all_is_there(
    target: str, tmp_path: Path
) -> None:
    found = commands(target, tmp_path / "fresh")
    assert "NPUGRAD_BUILD_KERNELS=0" in found
    assert "'.[tools]'" in found
    assert "torch==" not in found
    touch(tmp_path / ".stamp", 0)
    assert "pip install" not in commands(target, tmp_path, f"VENV_GEN={tmp_path}")


@pytest.mark.parametrize("target", ["test", "demo", "bench", "bench-kernels", "test-npu"])
def test_kernels_are_built_again_when_their_sources_are_newer(target: str, tmp_path: Path) -> None:
    touch(tmp_path / ".stamp", 0)
    touch(tmp_path / ".kernels", 0)
    assert BUILD not in commands(target, tmp_path)
    touch(tmp_path / ".kernels", 20 * 365 * 24 * 3600)
    found = commands(target, tmp_path)
    assert f"{tmp_path}/bin/python {BUILD}" in found
    assert "pip install" not in found, "an edit of the kernels alone sets up no environment"


def test_every_file_that_the_builder_looks_at_counts_as_a_source(tmp_path: Path) -> None:
    touch(tmp_path / ".stamp", 0)
    touch(tmp_path / ".kernels", -3600)
    sources = [path for end in ("h", "cpp", "map") for path in ROOT.glob(f"server/kernels/*.{end}")]
    for path in [*sources, ROOT / "server" / "kernels" / "build.py"]:
        edited = str(path.relative_to(ROOT))
        assert BUILD in commands("test", tmp_path, "-W", edited), edited


def test_a_new_environment_alone_does_not_make_the_kernels_stale(tmp_path: Path) -> None:
    touch(tmp_path / ".kernels", 0)
    touch(tmp_path / ".stamp", -3600)
    assert BUILD not in commands("test", tmp_path)


def test_clean_removes_the_libraries() -> None:
    assert "server/npugrad_server/backends/cpu/lib" in commands("clean", Path("build/none"))
