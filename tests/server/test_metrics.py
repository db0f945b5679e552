from __future__ import annotations

import asyncio
import logging
import os

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from npugrad.call import CallOptions, ExecutionInfo
from npugrad.ops import get_operator
from npugrad.products import Product
from npugrad_server.logs import MAX_BACKLOG_LINES, LogBacklog
from npugrad_server.metrics import Metrics
from npugrad_server.pool import DeviceState, DeviceStatus, PlannedCall, PoolStats


class Figures:
    """A pool's figures."""

    def __init__(self) -> None:
        self.loop_was_running = False
        self.tenants: dict[str, tuple[int, int]] = {}

    def stats(self) -> PoolStats:
        self.loop_was_running = asyncio.get_running_loop().is_running()
        return PoolStats(
            3, 2, 40, 35, 1000, 500, 1, 2000, 4000, queued_s=1.5, longest_wait_s=0.5, tenants=self.tenants
        )

    def devices(self) -> tuple[DeviceStatus, ...]:
        return (
            DeviceStatus("cpu:0", "cpu", "", False, DeviceState.READY, 0, "", os.getpid(), 8000, 3000),
            DeviceStatus("cpu:1", "cpu", "", False, DeviceState.DOWN, 4, "gone"),
        )


def planned() -> PlannedCall:
    record = get_operator("group_norm_backward")
    call = record.build()
    return PlannedCall.alone(record, call, record.infer(call), CallOptions(), "r", None)


def test_page_shows_the_pool_as_its_loop_sees_it() -> None:
    async def run() -> str:
        metrics, figures = Metrics("1.2.3", "atlas-a2"), Figures()
        metrics.show_pool(figures, asyncio.get_running_loop())
        page = await asyncio.to_thread(generate_latest, metrics.registry)
        assert figures.loop_was_running
        return page.decode()

    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(asyncio.run(run()))
        for s in family.samples
    }
    assert samples["npugrad_build_info", ("product", "atlas-a2"), ("version", "1.2.3")] == 1
    for name, value in {
        "queue_depth": 3, "running_calls": 2, "uploads": 1, "input_arena_used_bytes": 1000,
        "input_arena_bytes": 2000, "output_arena_used_bytes": 500, "output_arena_bytes": 4000,
        "queued_seconds": 1.5, "longest_wait_seconds": 0.5, "draining": 0,
    }.items():  # fmt: skip
        assert samples[(f"npugrad_{name}",)] == value
    assert samples["npugrad_device_state", ("device", "cpu:1"), ("state", "down")] == 1
    assert samples["npugrad_worker_resident_bytes", ("device", "cpu:0")] > 2**20
    what = ("backend", "cpu"), ("description", ""), ("device", "cpu:0"), ("simulated", "false")
    assert samples[("npugrad_device_info", *what)] == 1
    wrong = ("device", "cpu:0"), ("operator", "group_norm_backward")
    assert samples[("npugrad_device_mismatches_total", *wrong)] == 0
    assert samples[("process_resident_memory_bytes",)] > 2**20
    assert samples["npugrad_device_state", ("device", "cpu:1"), ("state", "ready")] == 0
    assert samples["npugrad_worker_restarts_total", ("device", "cpu:1")] == 4
    assert samples["npugrad_device_memory_bytes", ("device", "cpu:0")] == 8000
    assert samples["npugrad_device_memory_used_bytes", ("device", "cpu:0")] == 3000
    assert ("npugrad_device_memory_bytes", ("device", "cpu:1")) not in samples
    assert samples["npugrad_workers_lost_total", ("device", "cpu:0")] == 0


def test_tenants_are_shown_by_name_and_stay_once_they_were() -> None:
    async def run() -> tuple[Metrics, list[bytes]]:
        metrics, figures = Metrics("1", "atlas-a2"), Figures()
        metrics.show_pool(figures, asyncio.get_running_loop())
        pages = []
        for figures.tenants in ({"vision": (3, 500), "other": (1, 20)}, {"vision": (0, 100)}):
            pages.append(await asyncio.to_thread(generate_latest, metrics.registry))
        return metrics, pages

    _, pages = asyncio.run(run())
    for page, vision, other in ((pages[0], (3, 500), (1, 20)), (pages[1], (0, 100), (0, 0))):
        for tenant, (waiting, nbytes) in (("vision", vision), ("other", other)):
            assert f'npugrad_tenant_waiting_calls{{tenant="{tenant}"}} {waiting:.1f}' in page.decode()
            assert f'npugrad_tenant_inflight_bytes{{tenant="{tenant}"}} {nbytes:.1f}' in page.decode()


def test_what_the_pool_tells_is_counted() -> None:
    metrics, call = Metrics("1", "atlas-a2"), planned()
    info = ExecutionInfo(
        "cpu",
        "cpu:0",
        Product.ATLAS_A2,
        queued_s=1,
        copy_in_s=2,
        run_s=3,
        copy_out_s=4,
        predicted_run_s=6.0,
    )
    metrics.call_accepted(call)
    metrics.call_started(call, "cpu:0", 1, 0.5)
    metrics.worker_lost("cpu:0", "killed")
    metrics.call_requeued(call, "cpu:0")
    metrics.call_redirected(call, "cpu:0", "DEVICE_BUSY")
    metrics.workspace_asked("cpu:0", "granted")
    metrics.call_postponed(call, "cpu:0")
    metrics.call_started(call, "cpu:0", 2, 0.5)
    metrics.call_finished(call, "OK", 10.0, info)
    metrics.call_finished(call, "WORKER_LOST", 10.0, None)
    metrics.device_changed(Figures().devices()[1])
    value = metrics.registry.get_sample_value
    assert value("npugrad_accepted_calls_total", {"operator": call.plan.record.name}) == 1
    assert value("npugrad_attempts_total", {"device": "cpu:0"}) == 2
    assert value("npugrad_workers_lost_total", {"device": "cpu:0"}) == 1
    assert value("npugrad_calls_rerun_total", {"device": "cpu:0"}) == 1
    redirected = {"device": "cpu:0", "reason": "DEVICE_BUSY"}
    assert value("npugrad_calls_redirected_total", redirected) == 1
    assert value("npugrad_workspaces_asked_total", {"device": "cpu:0", "answer": "granted"}) == 1
    assert value("npugrad_calls_postponed_total", {"device": "cpu:0"}) == 1
    assert value("npugrad_device_transitions_total", {"device": "cpu:1", "state": "down"}) == 1
    assert value("npugrad_run_time_ratio_sum", {"operator": call.plan.record.name, "device": "cpu:0"}) == 1.5
    assert value("npugrad_tenant_device_seconds_total", {"tenant": "other"}) == 9
    stages = {"queued": 1, "copy_in": 2, "run": 3, "copy_out": 4}
    for stage, seconds in stages.items():
        labels = {"operator": call.plan.record.name, "device": "cpu:0", "stage": stage}
        assert value("npugrad_stage_seconds_sum", labels) == seconds
        assert value("npugrad_stage_seconds_count", labels) == 1


def test_lines_that_the_log_lost_are_counted() -> None:
    metrics = Metrics("1", "atlas-a2")
    before = metrics.registry.get_sample_value("npugrad_log_lines_dropped_total")
    assert before is not None
    backlog = LogBacklog()
    for _ in range(MAX_BACKLOG_LINES + 3):
        backlog.put((logging.INFO, 0.0, "call", dict, ()), logging.INFO)
    assert metrics.registry.get_sample_value("npugrad_log_lines_dropped_total") == before + 3


def test_every_name_starts_with_ours_and_tells_its_unit() -> None:
    metrics = Metrics("1", "atlas-a2")
    families = list(metrics.registry.collect())
    assert len(families) > 8
    for family in families:
        assert family.name.startswith(("npugrad_", "process_"))
        assert family.documentation.endswith(".")
        if "second" in family.documentation.lower():
            assert family.name.endswith("_seconds")
