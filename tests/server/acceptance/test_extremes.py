"""Calls that take much of the device: their sizes on both sides, and that their results are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad.ops._grid_sampler_2d_backward_workloads import long_call as expanded
from npugrad.products import Product
from npugrad.validation import validate_call
from npugrad_server.acceptance import extremes
from npugrad_server.acceptance.extremes import (
    HUGE,
    RECORD,
    find_long_call,
    large_call,
    long_call,
)
from npugrad_server.acceptance.job import Job, Ran
from npugrad_server.acceptance.known import KnownJob, known
from npugrad_server.acceptance.rig import BenchSettings, Rig
from npugrad_server.acceptance.step import StepLog, StepSkipped
from npugrad_server.acl.layout import arrange
from npugrad_server.pool.admission import demand_of
from npugrad_server.worker.protocol import CallDone

PRODUCTS = list(Product)
HOST_BYTES = 64 * 1024


def device_bytes(job: Job) -> int:
    return arrange(job.record, job.call).nbytes


@given(nbytes=st.integers(1, 2**40), product=st.sampled_from(PRODUCTS))
def test_a_large_call_takes_device_memory_and_none_of_the_host(nbytes: int, product: Product) -> None:
    job = large_call(product, nbytes)
    assert device_bytes(job) >= nbytes
    demand = demand_of(job.planned())
    images = job.call.tensor("input").shape[0]
    assert demand.inputs.nbytes <= HOST_BYTES
    assert demand.outputs.nbytes <= 8 * images + HOST_BYTES, "8 bytes for each image of 4 MiB"


@pytest.mark.parametrize("product", PRODUCTS)
def test_both_are_legal_calls(product: Product) -> None:
    for call in (large_call(product, 2**36).call, *(long_call(product, size).job.call for size in HUGE.long)):
        assert validate_call(RECORD, call).violations == ()


@pytest.mark.parametrize("size", [(1, 1, 5), (2, 3, 8)])
def test_the_result_of_a_long_call_is_that_of_the_reference(size: tuple[int, int, int]) -> None:
    made = long_call(Product.ATLAS_A2, expanded(*size))
    reference = known("same", made.job)
    assert np.array_equal(reference.golden["input_grad"], made.golden["input_grad"])


def test_sums_of_long_calls_are_exact_in_float32() -> None:
    for size in HUGE.long:
        points = size.sizes["oh"] * size.sizes["ow"]
        total = np.float32(points) * np.float32(2.0**-24)
        assert float(total) == long_call(Product.ATLAS_A2, size).golden["input_grad"][0, 0, 0, 0]
        assert points <= 2**24


def test_operands_in_memory_are_what_the_call_says() -> None:
    job = long_call(Product.ATLAS_A2, expanded(1, 2, 4)).job
    for name, value in (("grad_output", 2.0**-24), ("grid", -1.0)):
        memory = bytearray(job.call.tensor(name).content_bytes)
        assert len(memory) == 4
        job.write(name, memoryview(memory))
        assert np.frombuffer(memory, np.float32)[0] == value


def bench_on(device: str, **options: object) -> Rig:
    return Rig(BenchSettings(device, Product.ATLAS_A2, arena_bytes=64 << 20, **options))  # type: ignore[arg-type]


def test_a_call_grows_until_it_is_long_enough() -> None:
    out = StepLog()
    with bench_on("cpu:0") as rig:
        found = find_long_call(rig, out, target_s=0.1, least_s=0.01)
        assert found.known.complaint(rig.run_job(found.known.job)) == ""
    assert found.run_s >= 0.1
    assert out.ok
    (table,) = out.tables
    assert [row[2] for row in table.rows] == ["result"] * len(table.rows)
    assert table.rows[-1][1] == found.run_s


def test_the_time_of_a_long_call_is_that_of_its_fastest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as a run is too short, a longer call is tried."""
    times = iter([0.5, 0.05, 0.5, 0.2, 0.3])
    sizes: list[str] = []

    def grown(_: Rig, tried: KnownJob) -> Ran:
        sizes.append(tried.name)
        return Ran({}, CallDone(0, 0.0, next(times), 0.0, 0, "test"))

    monkeypatch.setattr(extremes, "_grown", grown)
    with bench_on("test:0") as rig:
        found = find_long_call(rig, StepLog(), target_s=0.1, least_s=0.01)
    assert found.run_s == 0.2
    assert [sizes.count(size) for size in dict.fromkeys(sizes)] == [2, 3]


def test_wrong_sums_are_noticed() -> None:
    out = StepLog()
    with bench_on("test:0?ms=20") as rig:  # it answers with zeros
        find_long_call(rig, out, target_s=0.01, least_s=0.01)
    assert [check.name for check in out.checks if not check.ok] == ["the long calls are right"]


def test_without_a_call_that_is_long_enough_there_is_nothing_to_be_cut() -> None:
    out = StepLog()
    with bench_on("test:0?oom=growing") as rig, pytest.raises(StepSkipped, match=r"runs for 0\.5 s"):
        find_long_call(rig, out, target_s=1.0, least_s=0.5)
    assert "DEVICE_OUT_OF_MEMORY" in str(out.tables[0].rows[-1][2])
