"""The file to send: whole at any time, bounded, and without secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.bundles import contents

from npugrad_server.acceptance import bundle as bundles
from npugrad_server.acceptance.bundle import Bundle, newest_files
from npugrad_server.acceptance.node import collect, log_folders, shown_environment


def test_it_is_whole_from_the_start_and_after_each_stage(tmp_path: Path) -> None:
    path = tmp_path / "all.tar.gz"
    with Bundle(path) as bundle:
        assert list(contents(path)) == ["seconds.json"]
        bundle.add_text("node/a.txt", "one")
        with bundle.stage("first"):
            pass
        assert contents(path)["node/a.txt"] == b"one"
        with pytest.raises(ZeroDivisionError), bundle.stage("second"):
            raise ZeroDivisionError("by zero")
        stages = json.loads(contents(path)["seconds.json"])
        assert [(stage["stage"], stage["note"]) for stage in stages] == [
            ("first", ""),
            ("second", "ZeroDivisionError: by zero"),
        ]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["all.tar.gz"]


def test_what_ends_the_acceptance_itself_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "all.tgz"
    with pytest.raises(KeyboardInterrupt), Bundle(path):
        raise KeyboardInterrupt("SIGTERM")
    assert b"KeyboardInterrupt: SIGTERM" in contents(path)["crash.txt"]


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), Bundle(tmp_path / "no" / "all.tgz"):
        pytest.fail("it began")


def test_failing_data_are_kept_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "_FAILURE_BYTES", 100)
    monkeypatch.setattr(bundles, "_FAILURES", 3)
    path = tmp_path / "all.tgz"
    half = np.array([1.5, -2], ml_dtypes.bfloat16)
    with Bundle(path) as bundle:
        bundle.keep("a call: 1/2", {"x": np.arange(3.0), "half": half, "none": None})
        bundle.keep("too large", {"x": np.zeros(101, np.uint8)})
        for number in range(3, 6):
            bundle.keep(f"call {number}", {"x": np.zeros(1)})
    found = contents(path)
    names = sorted(name for name in found if name.endswith(".npz"))
    assert names == ["failures/01-a_call_1_2.npz", "failures/03-call_3.npz"]
    (tmp_path / "a.npz").write_bytes(found[names[0]])
    with np.load(tmp_path / "a.npz") as arrays:
        assert set(arrays) == {"x", "half"}
        assert (arrays["half"].view(ml_dtypes.bfloat16) == half).all()
    index = found["failures/index.txt"].decode()
    assert "2 too large: 101 bytes" in index
    assert "half bfloat16 (2,)" in index
    assert "5 call 5: 8 bytes" in index


def test_the_newest_logs_are_taken_with_their_ends_and_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "_LOG_BYTES", 25)
    monkeypatch.setattr(bundles, "_ONE_LOG_BYTES", 10)
    logs, path = tmp_path / "log", tmp_path / "all.tgz"
    (logs / "debug").mkdir(parents=True)
    for age, name in enumerate(("new", "debug/middle", "old", "oldest")):
        (logs / name).write_text(f"{name} " * 10 + "the end of", encoding="ascii")
        os.utime(logs / name, (1000 - age, 1000 - age))
    (logs / "link").symlink_to(path)
    with Bundle(path, [logs, tmp_path / "missing"]):
        pass
    found = {name: content for name, content in contents(path).items() if name.startswith("logs/")}
    assert found == {
        "logs/0/new": b"the end of",
        "logs/0/debug/middle": b"the end of",
        "logs/0/old": b"nd of",
    }
    assert len(newest_files([logs], most=2)) == 2


def test_only_variables_that_matter_are_shown_and_no_secret() -> None:
    shown = list(
        shown_environment(
            {
                "ASCEND_HOME_PATH": "/cann",
                "AWS_SECRET_ACCESS_KEY": "hush",
                "HOME": "/root",
                "NPUGRAD_TLS_KEY": "hush",
                "OMP_NUM_THREADS": "2",
                "PYTHONPATH": "https://me:hush@example.org/x",
                "TORCH_TOKEN": "hush",
            }
        )
    )
    assert shown == [
        "ASCEND_HOME_PATH=/cann",
        "NPUGRAD_TLS_KEY=(hidden)",
        "OMP_NUM_THREADS=2",
        "PYTHONPATH=https://(hidden)@example.org/x",
        "TORCH_TOKEN=(hidden)",
    ]


def test_the_node_is_described_as_far_as_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, opp = tmp_path / "bin" / "npu-smi", tmp_path / "opp"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'dcmi module initialize failed. ret is -8005'\nexit 135\n")
    tool.chmod(0o755)
    kernels = opp / "built-in" / "kernel" / "group_norm_grad"
    kernels.mkdir(parents=True)
    (kernels / "a.o").write_bytes(b"12345")
    (opp / "version.info").write_text("Version=9.1.0\n")
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setenv("ASCEND_OPP_PATH", str(opp))
    monkeypatch.setenv("ASCEND_PROCESS_LOG_PATH", str(tmp_path / "logs"))
    path = tmp_path / "all.tgz"
    with Bundle(path) as bundle:
        collect(bundle)
    found = {name: content.decode() for name, content in contents(path).items()}
    assert "ret is -8005\n\nended with status 135" in found["node/npu-smi.txt"]
    assert "built-in/kernel/group_norm_grad 1 5\n" in found["node/kernels.txt"]
    assert "Version=9.1.0" in found["node/versions.txt"]
    assert "numpy==" in found["node/packages.txt"]
    assert f"ASCEND_OPP_PATH={opp}" in found["node/environment.txt"]
    assert "Python 3." in found["node/system.txt"]
    assert found["node/ldd.txt"]
    assert log_folders()[0] == tmp_path / "logs"
    stages = [stage["stage"] for stage in json.loads(found["seconds.json"])]
    assert sorted(stages) == sorted(name for name in found if name.startswith("node/"))


def test_a_tool_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from npugrad_server.acceptance import node

    tool = tmp_path / "npu-smi"
    tool.write_text("#!/bin/sh\necho begun\nexec sleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(node, "_COMMAND_S", 3.0)
    path = tmp_path / "all.tgz"
    with Bundle(path) as bundle:
        collect(bundle)
    said = contents(path)["node/npu-smi.txt"].decode()
    assert "begun" in said
    assert "did not end within 3 s" in said
