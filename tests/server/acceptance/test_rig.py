"""The rig with real worker processes; on a CPU, because what it does does not depend on the device."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from npugrad import get_operator
from npugrad_server.acceptance.job import Job, Ran, make_job
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


def test_a_call_comes_back_right_with_the_workers_own_answer(rig: Rig) -> None:
    ran = rig.run(RECORD, JOB.call, JOB.arrays)
    assert is_right(JOB, ran)
    assert set(ran.outputs) == {"grad_input", "grad_gamma", "grad_beta"}
    assert isinstance(ran.answer, CallDone)
    assert ran.answer.run_s > 0


def test_strided_and_expanded_operands_arrive_as_they_are(rig: Rig) -> None:
    for record in rig.operators:
        sample = next(s for s in rig.samples(record) if s.name == "strided")
        job = make_job(record, sample.call)
        assert is_right(job, rig.run_job(job)), record.name


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


def test_a_call_that_fits_no_arena_is_refused_and_takes_nothing(make_bench: Callable[[str], Rig]) -> None:
    rig = make_bench("cpu:0")
    with pytest.raises(MemoryError, match="group_norm_backward"):
        rig.run_job(make_job(RECORD, RECORD.build(n=1, c=64, hxw=2**18, group=1)))
    assert (rig._operands.used_bytes, rig._results.used_bytes) == (0, 0)
    assert is_right(JOB, rig.run_job(JOB))


def test_a_device_that_does_not_open_is_gone(make_bench: Callable[[str], Rig]) -> None:
    rig = make_bench("npu:0")  # these tests run where there is no CANN
    with pytest.raises(DeviceGone, match="npu:0: "):
        rig.start()
    assert not rig.alive


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
