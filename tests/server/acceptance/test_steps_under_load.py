"""The steps that push a device, on worker processes without an NPU: what passes, and what each notices."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.server.acceptance.conftest import SETTINGS, Seen

from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad_server.acceptance.columns import CALLS_PER_S, STAGES, TIME
from npugrad_server.acceptance.extremes import HUGE, MOST_BYTES, LongCall, long_call
from npugrad_server.acceptance.report import StepReport
from npugrad_server.acceptance.rig import BenchSettings, Rig
from npugrad_server.acceptance.runner import run_steps
from npugrad_server.acceptance.step import Step, StepLog
from npugrad_server.acceptance.steps import crash, memory, soak, speed, timeout
from npugrad_server.acceptance.watch import Watch
from npugrad_server.worker.protocol import CallDone

pytestmark = pytest.mark.slow

NAME = "group_norm_backward"


class SmallBench(Rig):
    """A rig of which steps see one operator, the fastest: right results take most of their time."""

    @property
    def operators(self) -> tuple[OpRecord, ...]:
        return (OPERATORS[NAME],)


def settings(device: str) -> BenchSettings:
    return replace(SETTINGS, device=device, soak_s=1.0, start_timeout_s=30.0, release=None)


def report_of(step: Step, device: str) -> StepReport:
    with SmallBench(settings(device)) as rig:
        (report,) = run_steps(rig, [step], Seen())
    return report


def failed(report: StepReport) -> list[str]:
    return [check.name for check in report.failures]


def test_memory_is_not_tried_on_a_device_without_any() -> None:
    report = report_of(memory.STEP, "cpu:0")
    assert (report.outcome, report.error) == ("skipped", "the device has no memory of its own")


@pytest.mark.parametrize("total_gib", [0.125, 1, 16, 32, 64, 128])
def test_calls_grow_from_one_with_room_to_one_that_never_has(total_gib: float) -> None:
    total = int(total_gib * 2**30)
    start = min(total // 16, MOST_BYTES)
    found = list(memory.needs(start, total))
    assert found[0] == start
    assert 2 * total <= found[-1] < 4 * total
    assert found == sorted(found)
    assert all(nbytes <= MOST_BYTES for nbytes in found[:-1]), (
        "kernels that run have fewer than 2^31 elements"
    )
    assert len(found) <= 8


# ----------------------------------------------------------------------------------------------- soak


def test_a_soak_checks_every_result_and_shows_memory_over_time() -> None:
    report = report_of(soak.STEP, "cpu:0")
    assert report.outcome == "passed", report
    over_time, calls = report.tables
    assert over_time.columns[0] == TIME
    assert len(over_time.rows) >= 3
    assert 0.5 < float(over_time.rows[-1][0] or 0) < 30
    ((name, count, wrong),) = calls.rows
    assert (name, wrong) == (NAME, 0)
    assert isinstance(count, int)
    assert count > 20


@pytest.mark.deep
def test_a_soak_with_long_calls_goes_on_until_there_are_samples_enough() -> None:
    report = report_of(soak.STEP, "test:0?ms=800")
    assert [name for name in failed(report) if name.endswith("is flat")] == []


def test_a_soak_on_a_device_that_computes_zeros_fails() -> None:
    report = report_of(soak.STEP, "test:0")
    assert report.outcome == "failed"
    assert "every result is right" in failed(report)
    (check,) = [check for check in report.checks if check.name == "every result is right"]
    assert "outside tolerance" in check.note


def test_a_worker_that_dies_before_the_soak_is_told_by_what_it_died_of() -> None:
    report = report_of(soak.STEP, "test:0?crash=")
    assert failed(report) == ["every result is right", "one worker for all calls"]
    assert "killed by signal 6" in report.failures[0].note
    assert report.error == ""


def flat(mib: list[float]) -> StepLog:
    """What is said of memory that was so much in each second."""
    out = StepLog()
    soak.check_flat(out, "memory", [(float(t), int(value * 2**20)) for t, value in enumerate(mib)])
    return out


def test_memory_that_grows_too_much_is_not_flat() -> None:
    for mib_per_s, ok in ((0.0, True), (0.5, True), (-5.0, True), (1.5, False), (20.0, False)):
        found = flat([300 + mib_per_s * t for t in range(100)])
        assert found.ok == ok, found.checks[0]
    assert flat([100 if t < 30 else 900 for t in range(100)]).ok, "a leap in the warm-up is no growth"
    # As aclnn's cache, which keeps the executors of 10,000 calls a thread.
    filled_late = flat([min(t, 70) * 10 for t in range(100)])
    assert filled_late.ok
    assert "from 7" in filled_late.checks[0].note
    assert not flat([1, 1]).ok, "too few samples"


def test_private_memory_of_a_process_is_what_it_has_for_itself() -> None:
    before = soak.private_bytes(os.getpid())
    taken = bytearray(64 << 20)
    taken[::4096] = b"x" * len(taken[::4096])
    assert soak.private_bytes(os.getpid()) - before > 60 << 20


def test_a_process_that_has_ended_has_no_memory_though_nobody_waited_for_it() -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError, match="has ended"):
        soak.private_bytes(ended.pid)
    assert ended.wait() == 0


# ---------------------------------------------------------------------------------------------- speed


def test_speeds_are_told_for_every_size() -> None:
    report = report_of(speed.STEP, "cpu:0")
    assert report.outcome == "passed", failed(report)
    latency, rates = report.tables
    assert set(STAGES) <= set(latency.columns)
    columns = [name for name in rates.columns if name.startswith(CALLS_PER_S)]
    assert columns == ["calls/s on 1 stream", "calls/s on 2 streams"]
    assert {row[0] for row in latency.rows} == {row[0] for row in rates.rows} == {NAME}
    for row in latency.rows:
        middle, run_s = row[latency.columns.index("median [ms]")], row[latency.columns.index("run [ms]")]
        assert isinstance(middle, float)
        assert isinstance(run_s, float)
        assert 0 < run_s <= middle
    assert all(float(rate or 0) > 0 for row in rates.rows for rate in row[2:])


def test_the_speed_of_wrong_results_is_no_speed() -> None:
    report = report_of(speed.STEP, "test:0")
    assert report.outcome == "failed"
    assert all("first and last results" in name for name in failed(report))


def test_p90_is_the_value_that_nine_of_ten_stay_below() -> None:
    assert speed.p90([float(i) for i in range(1, 102)]) == pytest.approx(91)
    assert speed.p90([7.0]) == 7.0


# -------------------------------------------------------------------------------- calls that take long

LONG_ENOUGH = "test:0?compute=1&ms=300"
"""Its first call is the long one that the step looks for. Growing one takes the CPU seconds."""


@pytest.fixture
def sooner_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is long after a quarter of a second."""
    monkeypatch.setattr(timeout, "_TARGET_S", 0.25)


@pytest.mark.usefixtures("sooner_long")
def test_a_call_past_its_limit_is_told_and_the_device_comes_back() -> None:
    report = report_of(timeout.STEP, f"{LONG_ENOUGH}&timeout=long")
    assert report.outcome == "passed", report
    (replaced,) = [table for table in report.tables if table.title.startswith("Replacing the worker")]
    assert 0 < float(replaced.rows[0][2] or 0) < 60


@pytest.mark.usefixtures("sooner_long")
def test_a_device_that_never_gives_a_call_up_fails() -> None:
    report = report_of(timeout.STEP, "cpu:0")  # the CPU backend knows no limit
    assert "a call longer than its limit is ended" in failed(report)
    assert "through the pool, the caller gets the error" in failed(report)


@pytest.mark.usefixtures("sooner_long")
def test_another_number_than_that_of_a_timeout_fails() -> None:
    report = report_of(timeout.STEP, f"{LONG_ENOUGH}&fault=long")
    assert "a call longer than its limit is ended" in failed(report)


def measured(rig: Rig, *_: object) -> LongCall:
    """A call of a second, which is looked for above."""
    known = long_call(rig.settings.product, HUGE.long[7])
    answer = rig.run_job(known.job).answer
    assert isinstance(answer, CallDone)
    return LongCall(known, answer.run_s)


def test_calls_outlive_the_worker_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash, "find_long_call", measured)
    report = report_of(crash.STEP, "cpu:0")
    assert report.outcome == "passed", report
    assert len([table for table in report.tables if table.title.startswith("Replacing")]) == 2
    (again,) = [check for check in report.checks if "is run again" in check.name]
    assert again.found == "its right result, at try 2"


def test_a_device_that_does_not_come_back_is_noticed() -> None:
    out = StepLog()
    later = {"respawn_backoff_s": 60.0, "respawn_backoff_max_s": 60.0}
    with Rig(settings("test:0")) as rig, rig.pool(max_respawns=0, **later) as device:
        watch = Watch(device)
        pid = device.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        watch.check_back(out, "killed")
    assert [(check.ok, check.found.endswith("-> down")) for check in out.checks] == [(False, True)]
    assert not Path(f"/proc/{pid}").exists()


def test_a_device_that_stays_is_not_back() -> None:
    out = StepLog()
    with Rig(settings("test:0")) as rig, rig.pool() as device:
        device.start_limit_s = 0.2
        Watch(device).check_back(out, "nothing happened")
    assert [(check.ok, check.found) for check in out.checks] == [(False, "ready")]
