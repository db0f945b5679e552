"""The command as people see it: where there is no NPU, while it runs, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.server.acceptance.conftest import SETTINGS
from typer.testing import CliRunner

from npugrad_server.acceptance.command import AcceptanceOptions, run_and_report
from npugrad_server.acceptance.console import AcceptanceConsole, failure_line
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
def test_all_steps_that_pass_are_accepted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = AcceptanceOptions(0, tmp_path / "out.json", (GOOD,))
    assert run_and_report(options, SETTINGS, Report("0.1.0", "now", False))
    shown = capfd.readouterr().out
    assert "ACCEPTED IN PART: 1 of 1 steps passed; a whole acceptance has 11" in shown
    assert "SIMULATED" not in shown
    assert "SIMULATED" not in (tmp_path / "out.html").read_text()


def test_what_is_left_out_is_said_and_makes_it_a_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = AcceptanceOptions(0, tmp_path / "out.json", (replace(BAD, number=1),))
    run_and_report(options, SETTINGS, Report("0.1.0", "now", False, left_out=("all <sizes>",)))
    assert "left out: all <sizes>" in capfd.readouterr().out
    assert "Left out: all &lt;sizes&gt;" in (tmp_path / "out.html").read_text()


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


def test_a_check_in_one_line() -> None:
    assert failure_line(StepCheck("a", False, "1", "2")) == "a: found 2; expected 1"


_ON_A_TERMINAL = """
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from tests.server.acceptance.test_command import BAD, GOOD, REPORT, SETTINGS
from npugrad_server.acceptance.command import AcceptanceOptions, run_and_report
run_and_report(AcceptanceOptions(0, Path(sys.argv[1]), (GOOD, BAD)), SETTINGS, REPORT)
"""


@pytest.mark.slow
def test_on_a_terminal_there_is_a_live_line(tmp_path: Path) -> None:
    output, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", _ON_A_TERMINAL, str(tmp_path / "out.json")]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal says that the other side has gone
            while piece := os.read(output, 4096):
                shown += piece
    os.close(output)
    text = shown.decode()
    assert process.returncode == 0, text
    assert "\x1b[?25l" in text  # the cursor is hidden while the line lives
    assert "PASSED" in text
    assert "words of a library" not in text


def test_the_process_that_steers_never_imports_torch() -> None:
    code = "import sys, npugrad_server.cli; sys.exit('torch' in sys.modules or 'torch_npu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
