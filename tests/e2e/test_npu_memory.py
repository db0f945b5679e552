"""NPU memory seen from callers: workspaces that do not fit together, or at all. All is SIMULATED."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.calls import TIMEOUT_S, Sample, call_unary, failure_of, sample
from tests.e2e.harness import eventually
from tests.fix_npu import NpuServer, StartNpuServer

from npugrad.agreement import agreement
from npugrad.layout import view

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]

MIB = 2**20
KERNELS = "kernels.aclnnGroupNormBackward"
OWN_MIB = 16
"""Workspace in MiB that the simulated operator asks for before the plan adds some."""
METRICS = ("--metrics-listen", "127.0.0.1:0")
SLOWLY = ";kernel_ms=3000"
"""So that calls meet; put into force when the first, tiny calls of the start are over."""
LESS_SLOWLY = ";kernel_ms=1000"
"""For calls that wait for each other."""


def good_call(running: NpuServer, made: Sample, start: Callable[[], object] = lambda: None) -> Any:
    """A call whose results are within tolerance; what produced them. Once connected, it waits for `start`."""
    with running.process.channel() as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        start()
        result = call_unary(channel, made.record, made.message())
    results = {}
    for name, meta in made.outputs.items():
        data = result.contents[name].data
        assert data is not None
        results[name] = view(meta, data)
    judged = agreement(made.record, made.arrays, made.call.attrs, results)
    assert judged.ok, judged
    return result.info


def together(running: NpuServer, calls: int) -> list[Any]:
    """Calls of two kinds at once, each checked; what produced each of them."""
    # A kind's workspace is known once one call has told it, so equal calls might ask once or twice.
    made = [sample(seed=seed, n=1 + seed % 2) for seed in range(calls)]
    barrier = threading.Barrier(calls, timeout=2 * TIMEOUT_S)
    with ThreadPoolExecutor(calls) as pool:
        return list(pool.map(lambda each: good_call(running, each, barrier.wait), made))


def metrics_of(running: NpuServer) -> dict[str, float]:
    families = text_string_to_metric_families(running.process.page("/metrics")[1])
    samples = [found for family in families for found in family.samples]
    shown = ("npugrad_workspaces", "npugrad_calls_postponed", "npugrad_attempts", "npugrad_device_memory")
    return {
        " ".join([found.name.removeprefix("npugrad_"), found.labels.get("answer", "")]).strip(): found.value
        for found in samples
        if found.name.startswith(shown)
    }


def test_workspaces_that_do_not_fit_together_run_one_after_the_other(
    start_npu_server: StartNpuServer,
) -> None:
    plan = "hbm_mb=128;workspace_mb=60"
    running = start_npu_server("--streams-per-device", "2", *METRICS, plan=plan)
    running.plan(plan + SLOWLY)
    budget = metrics_of(running)["device_memory_bytes"]
    assert 90 * MIB < budget < 100 * MIB
    full = running.report.counters()["errors.207001"]  # of the first calls at its start, one after the other
    first = together(running, 2)
    after_two = metrics_of(running)
    print(f"two calls that nobody knew: {after_two}")
    assert {info.workspace_bytes // MIB for info in first} == {60 + OWN_MIB}
    assert [info.attempts for info in first] == [1, 1]
    # Both asked; one got its workspace, the other came back, waited, and knew what it needs.
    assert after_two["workspaces_asked_total granted"] == 1
    assert after_two["workspaces_asked_total postponed"] == after_two["calls_postponed_total"] == 1
    assert after_two["attempts_total"] == 3

    running.plan(plan + LESS_SLOWLY)
    assert len(together(running, 4)) == 4
    found = metrics_of(running)
    print(f"four more: {found}")
    assert found["attempts_total"] == 7
    for name, value in found.items():
        assert value == after_two[name] or name == "attempts_total", name
    assert found["device_memory_used_bytes"] == 0
    counters = running.report.counters()
    assert counters["max_concurrent_kernels"] == 1
    assert counters["errors.207001"] == full, "the device was asked for more than it has"


def test_workspaces_that_fit_together_run_together(start_npu_server: StartNpuServer) -> None:
    plan = "hbm_mb=256;workspace_mb=60"
    running = start_npu_server("--streams-per-device", "2", *METRICS, plan=plan)
    running.plan(plan + SLOWLY)
    assert len(together(running, 2)) == 2
    found = metrics_of(running)
    assert (found["workspaces_asked_total granted"], found["attempts_total"]) == (2, 2)
    assert running.report.counters()["max_concurrent_kernels"] == 2


def test_a_workspace_that_no_device_has_is_an_error_with_numbers_every_time(
    start_npu_server: StartNpuServer,
) -> None:
    running = start_npu_server(*METRICS, plan="hbm_mb=256")
    kernels = running.report.counters()[KERNELS]
    running.plan("hbm_mb=256;workspace_mb=100000")
    made = sample()
    for _ in range(2):
        with running.process.channel() as channel:
            failure = failure_of(lambda: call_unary(channel, made.record, made.message()))
        assert failure.error.reason == "DEVICE_OUT_OF_MEMORY"
        assert failure.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "bytes of workspace needed by the device's operator; expected at most" in str(failure.error)
    assert metrics_of(running)["workspaces_asked_total refused"] == 2
    assert running.report.counters()[KERNELS] == kernels
    running.plan("hbm_mb=256")
    assert good_call(running, made).workspace_bytes // MIB == OWN_MIB
    assert metrics_of(running)["device_memory_used_bytes"] == 0
    assert running.process.info().devices[0].restarts == 0


def test_a_call_whose_deadline_passes_in_the_first_phase_is_not_launched(
    start_npu_server: StartNpuServer,
) -> None:
    running = start_npu_server(*METRICS)
    kernels = running.report.counters()[KERNELS]
    running.plan("aclnnGroupNormBackwardGetWorkspaceSize:1:slow=1500")
    made = sample()
    with running.process.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        call_unary(channel, made.record, made.message(), timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(
        lambda: metrics_of(running)["device_memory_used_bytes"] == 0, "its memory is free", running.process
    )
    assert running.report.counters()[KERNELS] == kernels
    good_call(running, made)
    assert running.report.counters()[KERNELS] == kernels + 1
    assert running.process.info().devices[0].restarts == 0
