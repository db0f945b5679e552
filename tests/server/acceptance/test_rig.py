"""The rig and calls with known results, with real worker processes of simulated and CPU devices."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.server.acceptance.conftest import bench_on

from npugrad import get_operator
from npugrad_server.acceptance.job import Job, Ran, make_job
from npugrad_server.acceptance.known import KnownJob, in_flight, known
from npugrad_server.acceptance.link import DeviceGone
from npugrad_server.acceptance.numerics import compare_with_reference
from npugrad_server.acceptance.rig import Rig
from npugrad_server.pool import DeviceState
from npugrad_server.worker.protocol import CallDone, CallFailed, DeviceFailed, WorkspaceFound

pytestmark = pytest.mark.slow

RECORD = get_operator("group_norm_backward")
JOB = make_job(RECORD, RECORD.build())


def is_right(job: Job, ran: Ran) -> bool:
    return isinstance(ran.answer, CallDone) and compare_with_reference(job, ran.outputs).ok


def norm(name: str = "norm", seed: int = 0, **options: Any) -> KnownJob:
    return known(name, make_job(RECORD, RECORD.build(), seed, **options))


def test_a_call_comes_back_right_with_the_workers_own_answer(rig: Rig) -> None:
    ran = rig.run(RECORD, JOB.call, JOB.arrays)
    assert is_right(JOB, ran)
    assert set(ran.outputs) == {"grad_input", "grad_gamma", "grad_beta"}
    assert isinstance(ran.answer, CallDone)
    assert ran.answer.run_s > 0


def test_strided_and_expanded_operands_arrive_as_they_are(rig: Rig) -> None:
    for name in (RECORD.name, "multi_scale_deformable_attention_grad"):
        record = get_operator(name)
        sample = next(s for s in rig.samples(record) if s.name == "strided")
        job = make_job(record, sample.call)
        assert is_right(job, rig.run_job(job)), name


def test_many_calls_are_answered_in_their_order_and_leave_no_memory_taken(rig: Rig) -> None:
    jobs = [make_job(RECORD, RECORD.build(n=n), seed=n) for n in range(1, 30)]
    found = rig.run_many(iter(jobs))
    assert [ran.outputs["grad_input"].shape[0] for ran in found] == list(range(1, 30))
    assert all(is_right(job, ran) for job, ran in zip(jobs, found, strict=True))
    assert (rig._operands.used_bytes, rig._results.used_bytes) == (0, 0)


def test_a_refused_call_is_an_answer(rig: Rig) -> None:
    record = get_operator("multi_scale_deformable_attention_grad")
    job = make_job(record, record.build())
    wrong = replace(job, call=job.call.with_inputs(value=None), outputs=record.infer(job.call))
    ran = rig.run_job(wrong)
    assert isinstance(ran.answer, CallFailed)
    assert ran.outputs == {}
    assert is_right(JOB, rig.run_job(JOB))


def test_a_cpu_cannot_tell_a_workspace(rig: Rig) -> None:
    answer = rig.plan(RECORD, JOB.call)
    assert isinstance(answer, WorkspaceFound)
    assert answer.workspace_bytes is None


def test_a_worker_that_is_killed_answers_with_how_it_ended_until_it_is_started_anew(rig: Rig) -> None:
    rig.start()
    pid = rig.pid
    os.kill(pid, signal.SIGKILL)
    answer = rig.run_job(JOB).answer
    assert isinstance(answer, DeviceFailed)
    assert "SIGKILL" in rig.run_job(JOB).answer.message  # type: ignore[union-attr]
    assert not rig.alive
    assert rig.start() > 0
    assert rig.pid != pid
    assert is_right(JOB, rig.run_job(JOB))


def test_start_takes_the_worker_that_is_there_unless_other_settings_are_wanted(rig: Rig) -> None:
    rig.start()
    pid = rig.pid
    assert rig.start() == 0
    assert rig.start(run_limit_s=100.0) > 0
    changed = rig.pid
    assert changed != pid
    assert rig.start(run_limit_s=100.0) == 0
    rig.start()
    assert rig.pid not in (pid, changed)


def test_stop_ends_the_process(rig: Rig) -> None:
    pid = rig.pid
    assert "status 0" in rig.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert rig.stop() == ""


def test_a_call_that_fits_no_arena_is_refused_and_takes_nothing() -> None:
    with bench_on("cpu:0", arena_bytes=1 << 20) as rig:
        with pytest.raises(MemoryError, match="group_norm_backward"):
            rig.run_job(make_job(RECORD, RECORD.build(n=1, c=64, hxw=2**12, group=1)))
        assert (rig._operands.used_bytes, rig._results.used_bytes) == (0, 0)
        assert is_right(JOB, rig.run_job(JOB))


def test_a_device_that_does_not_open_is_gone(absent: Rig) -> None:
    with pytest.raises(DeviceGone, match="npu:0: "):
        absent.start()
    assert not absent.alive


def test_the_pool_replaces_a_killed_worker(rig: Rig) -> None:
    with rig.pool(respawn_backoff_s=0.01) as device:
        outputs, info = device.run(JOB)
        assert compare_with_reference(JOB, outputs).ok
        assert info.attempts == 1
        pid = device.status().pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        status = device.wait(lambda s: s.state is DeviceState.READY and s.pid not in (None, pid), 30)
        assert (status.state, status.restarts) == (DeviceState.READY, 1)
        assert status.pid != pid
        device.run(JOB)
    assert rig.start() > 0  # the rig's own worker ended before the pool's began


def test_waiting_for_what_does_not_come_ends_in_time(rig: Rig) -> None:
    with rig.pool() as device:
        assert device.wait(lambda status: status.state is DeviceState.DOWN, 0.05).state is DeviceState.READY


# -------------------------------------------------------------------------------------- known results


def test_what_is_right_has_no_complaint_whatever_was_wanted(rig: Rig) -> None:
    job = norm()
    assert job.complaint(rig.run_job(job.job)) == ""
    nothing = known("none", make_job(RECORD, RECORD.build(output_mask=(False, False, False))))
    assert nothing.golden == {}
    assert nothing.complaint(rig.run_job(nothing.job)) == ""
    golden = {name: np.zeros(1, np.float32) for name in ("grad_input", "other")}
    assert job.wrong(golden).startswith("found outputs ['grad_input', 'other']")


def test_a_wrong_result_is_named_with_its_output() -> None:
    job = norm(label="flip")
    with bench_on("test:0?compute=1&corrupt=flip") as rig:
        complaint = job.complaint(rig.run_job(job.job))
    assert complaint.startswith("grad_input: outside tolerance")
    assert "grad_gamma" not in complaint


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("oom=x", "DEVICE_OUT_OF_MEMORY: group_norm_backward: the device has no memory for the call now"),
        ("fault=x", "the worker ended with 507015: test device: run returned 507015"),
        ("crash=x", "the worker ended: the worker process was killed by signal 6 (SIGABRT)"),
    ],
)
def test_an_answer_without_results_is_told_in_words(option: str, words: str) -> None:
    job = norm(label="x")
    with bench_on(f"test:0?{option}") as rig:
        assert job.complaint(rig.run_job(job.job)) == words


def test_jobs_in_flight_come_back_in_order_and_leave_nothing_behind(rig: Rig) -> None:
    jobs = [norm(str(seed), seed) for seed in range(9)]
    found = [(job.name, job.complaint(ran)) for job, ran in in_flight(rig, jobs, 4)]
    assert found == [(str(seed), "") for seed in range(9)]
    for _, ran in in_flight(rig, jobs, 4):
        assert isinstance(ran.answer, CallDone)
        break
    assert rig._operands.used_bytes == 0
