"""Calls with known results, on real worker processes of simulated and CPU devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from npugrad.ops import get_operator
from npugrad.products import Product
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.known import KnownJob, in_flight, known
from npugrad_server.acceptance.rig import BenchSettings, Rig
from npugrad_server.worker.protocol import CallDone

NORM = get_operator("group_norm_backward")


def bench_on(device: str) -> Rig:
    return Rig(BenchSettings(device, Product.ATLAS_A2, arena_bytes=64 << 20))


def norm(name: str = "norm", seed: int = 0, **options: object) -> KnownJob:
    return known(name, make_job(NORM, NORM.build(), seed, **options))


@pytest.fixture
def cpu() -> Iterator[Rig]:
    with bench_on("cpu:0") as rig:
        yield rig


def test_a_right_result_has_no_complaint(cpu: Rig) -> None:
    job = norm()
    assert job.complaint(cpu.run_job(job.job)) == ""


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
        ("crash=x", "the worker ended: the worker process was killed by signal 9 (SIGKILL)"),
    ],
)
def test_an_answer_without_results_is_told_in_words(option: str, words: str) -> None:
    job = norm(label="x")
    with bench_on(f"test:0?{option}") as rig:
        assert job.complaint(rig.run_job(job.job)) == words


def test_outputs_that_were_not_asked_for_are_a_complaint() -> None:
    job = norm()
    golden = {name: np.zeros(1, np.float32) for name in ("grad_input", "other")}
    assert job.wrong(golden).startswith("found outputs ['grad_input', 'other']")


def test_a_call_that_wants_nothing_has_nothing_to_be_wrong(cpu: Rig) -> None:
    job = known("none", make_job(NORM, NORM.build(output_mask=(False, False, False))))
    assert job.golden == {}
    assert job.complaint(cpu.run_job(job.job)) == ""


def test_jobs_in_flight_come_back_in_order_and_leave_nothing_behind(cpu: Rig) -> None:
    jobs = [norm(str(seed), seed) for seed in range(9)]
    found = [(job.name, job.complaint(ran)) for job, ran in in_flight(cpu, jobs, 4)]
    assert found == [(str(seed), "") for seed in range(9)]
    for _, ran in in_flight(cpu, jobs, 4):
        assert isinstance(ran.answer, CallDone)
        break
    assert cpu._operands.used_bytes == 0
