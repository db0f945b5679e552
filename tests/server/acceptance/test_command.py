"""The command as people see it: where there is no NPU, while it runs, and what it leaves behind.

The file to send is whole at any time, bounded, and without secrets.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sys
import tarfile
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.bundles import contents
from tests.server.acceptance.conftest import SETTINGS
from typer.testing import CliRunner

from npugrad_server.acceptance import bundle as bundles
from npugrad_server.acceptance import node
from npugrad_server.acceptance.bundle import Bundle, newest_files
from npugrad_server.acceptance.command import AcceptanceOptions, run_and_report
from npugrad_server.acceptance.console import AcceptanceConsole, failure_line
from npugrad_server.acceptance.node import collect, log_folders, shown_environment
from npugrad_server.acceptance.report import Report, StepCheck, StepReport
from npugrad_server.acceptance.rig import Rig
from npugrad_server.acceptance.step import Step, StepLog
from npugrad_server.acceptance.steps import STEPS
from npugrad_server.cli import FAILED, USAGE, app

run = CliRunner().invoke
REPORT = Report("0.1.0", "2026-01-02T03:04:05+00:00", True, {"chip": "Ascend910B2"})


@pytest.mark.slow
def test_without_cann_it_says_what_check_says_and_shows_how_far_it_came(tmp_path: Path) -> None:
    path, bundle = tmp_path / "out.json", tmp_path / "all.tgz"
    result = run(app, ["acceptance", "--steps", "0,2", "--report", str(path), "--bundle", str(bundle)])
    assert result.exit_code == FAILED
    said = [line for line in result.stdout.splitlines() if line.startswith("FAIL ")]
    assert said == [
        line for line in run(app, ["check", "--devices", "npu:0"]).stdout.splitlines() if "FAIL" in line
    ]
    assert any("npu:" in line for line in said)
    ladder, other = Report.from_json(path.read_text()).steps
    (failure,) = ladder.failures
    assert failure.name == "load the runtime"
    assert "libascendcl.so cannot be loaded" in failure.found
    assert (other.outcome, "devices: found npu:0" in other.error) == ("skipped", True)
    with tarfile.open(bundle) as archive:
        assert {"all/report.json", "all/report.html", "all/node/packages.txt"} <= set(archive.getnames())


def test_the_list_has_every_step_with_its_sentence() -> None:
    result = run(app, ["acceptance", "--list"])
    assert result.exit_code == 0
    for step in STEPS:
        assert f"{step.number:2}  {step.key} " in result.stdout
        assert step.about in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 115


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "1,eleven"], "found step 'eleven'"),
        (["--product", "atlas-a9"], "found 'atlas-a9'"),
        (["--soak-s", "0"], "'--soak-s'"),
        (["--device", "cpu:0"], "found 'cpu:0'; expected a number such as 0, or npu:0"),
        (["--streams", "99"], "'--streams'"),
        (["--bundle", "all.zip"], "found 'all.zip'; expected a name that ends with .tar.gz or .tgz"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(arguments: list[str], complaint: str) -> None:
    result = run(app, ["acceptance", *arguments])
    assert result.exit_code == USAGE
    assert complaint in result.output


def ask_pid(rig: Rig, out: StepLog) -> None:
    out.progress(0, 2, "asking")
    out.check("the worker has a number", rig.pid > 0, "one", "one")
    out.table("numbers", ("x",), [(1,)])
    os.write(2, b"words of a library\n")


def fail(rig: Rig, out: StepLog) -> None:
    out.check("the sky is green", False, "green", "blue", "today")


GOOD = Step(1, "good", "A good step", "It passes.", ask_pid)
BAD = Step(2, "bad", "A bad step", "It fails.", fail, needs_device=False)


@pytest.mark.slow
def test_reports_are_written_and_the_verdict_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = AcceptanceOptions(0, tmp_path / "out.json", (GOOD, BAD))
    assert not run_and_report(options, SETTINGS, REPORT)
    shown, errors = capfd.readouterr()
    assert shown.count("##") > 50
    assert shown.count("SIMULATED: CANN is the simulation") == 2
    assert "chip  Ascend910B2" in shown
    assert " 1  A good step: PASSED, 1 of 1 checks ok" in shown
    assert "NOT OK  the sky is green: found blue; expected green (today)" in shown
    assert "NOT ACCEPTED, SIMULATED: 1 of 2 steps passed" in shown
    assert errors == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json", "out.log"]
    assert (tmp_path / "out.log").read_text() == "words of a library\n"
    report = Report.from_json((tmp_path / "out.json").read_text())
    assert [step.outcome for step in report.steps] == ["passed", "failed"]
    assert (report.ok, report.simulated) == (False, True)
    page = (tmp_path / "out.html").read_text()
    assert "SIMULATED" in page
    assert "the sky is green" in page


@pytest.mark.slow
def test_all_steps_that_pass_are_accepted_and_what_is_left_out_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = AcceptanceOptions(0, tmp_path / "out.json", (GOOD,))
    assert run_and_report(options, SETTINGS, Report("0.1.0", "now", False, left_out=("all <sizes>",)))
    shown, page = capfd.readouterr().out, (tmp_path / "out.html").read_text()
    assert "ACCEPTED IN PART: 1 of 1 steps passed; a whole acceptance has 11" in shown
    assert "SIMULATED" not in shown + page
    assert "left out: all <sizes>" in shown
    assert "Left out: all &lt;sizes&gt;" in page


def test_a_folder_that_is_missing_is_told_before_anything_runs(tmp_path: Path) -> None:
    def never(rig: Rig, out: StepLog) -> None:
        pytest.fail("a step ran")

    options = AcceptanceOptions(0, tmp_path / "no" / "out.json", (Step(1, "a", "A", "A.", never),))
    with pytest.raises(OSError, match="No such file"):
        run_and_report(options, SETTINGS, REPORT)


def test_a_long_list_of_failures_is_cut(capfd: pytest.CaptureFixture[str]) -> None:
    checks = tuple(StepCheck(f"check {number}", False, "1", "2") for number in range(30))
    step = StepReport(1, "a", "A", "failed", 1.0, checks, error="")
    with AcceptanceConsole() as console:
        console.say_end(Report("0.1.0", "now", False, {}, (step,)), [Path("out.json")])
    shown = capfd.readouterr().out
    assert shown.count("found 2; expected 1") == 20
    assert "and 10 more, see the report" in shown
    assert "NOT ACCEPTED: 0 of 1 steps passed" in shown
    assert failure_line(StepCheck("a", False, "1", "2")) == "a: found 2; expected 1"


@pytest.mark.slow
def test_on_a_terminal_there_is_a_live_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, terminal = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # how a terminal says that the other side has gone
            while piece := os.read(output, 4096):
                shown.extend(piece)

    reader, errors = threading.Thread(target=read), os.dup(2)
    reader.start()
    os.dup2(terminal, 2)
    try:
        with open(terminal, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            monkeypatch.setenv("TERM", "xterm")
            run_and_report(AcceptanceOptions(0, tmp_path / "out.json", (GOOD, BAD)), SETTINGS, REPORT)
    finally:
        os.dup2(errors, 2)
        os.close(errors)
    reader.join()
    os.close(output)
    text = shown.decode()
    assert "\x1b[?25l" in text  # the cursor is hidden while the line lives
    assert "PASSED" in text
    assert "words of a library" not in text


# --------------------------------------------------------------------------------------- the bundle


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
    environment = {
        "ASCEND_HOME_PATH": "/cann",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "HOME": "/root",
        "NPUGRAD_TLS_KEY": "hush",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": "https://me:hush@example.org/x",
        "TORCH_TOKEN": "hush",
    }
    assert list(shown_environment(environment)) == [
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
