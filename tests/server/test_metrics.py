from __future__ import annotations

import asyncio
import logging
import os
import re
from itertools import product
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from npugrad.call import CallOptions, ExecutionInfo
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.timeline import SERVER_STAGES
from npugrad_server.logs import MAX_BACKLOG_LINES, LogBacklog
from npugrad_server.metrics import Metrics
from npugrad_server.pool import DeviceState, DeviceStatus, PlannedCall, PoolStats

ROOT = Path(__file__).resolve().parents[2]


class Figures:
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


def planned(operator: str = "group_norm_backward") -> PlannedCall:
    record = get_operator(operator)
    call = record.build()
    return PlannedCall.alone(record, call, record.infer(call), CallOptions(), "r", None)


async def pages(figures: Figures, *tenants: dict[str, tuple[int, int]]) -> list[str]:
    """The page of a pool, while it has these tenants one after the other."""
    metrics, found = Metrics("1.2.3", "atlas-a2"), []
    metrics.show_pool(figures, asyncio.get_running_loop())
    for figures.tenants in tenants:
        found.append((await asyncio.to_thread(generate_latest, metrics.registry)).decode())
    assert figures.loop_was_running
    return found


async def test_page_shows_the_pool_as_its_loop_sees_it() -> None:
    (page,) = await pages(Figures(), {})
    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }
    assert samples["npugrad_build_info", ("product", "atlas-a2"), ("version", "1.2.3")] == 1
    for name, value in {
        "queue_depth": 3, "running_calls": 2, "uploads": 1, "input_arena_used_bytes": 1000,
        "input_arena_bytes": 2000, "output_arena_used_bytes": 500, "output_arena_bytes": 4000,
        "queued_seconds": 1.5, "longest_wait_seconds": 0.5, "draining": 0,
    }.items():  # fmt: skip
        assert samples[(f"npugrad_{name}",)] == value
    first, second = ("device", "cpu:0"), ("device", "cpu:1")
    assert samples["npugrad_device_state", second, ("state", "down")] == 1
    assert samples["npugrad_device_state", second, ("state", "ready")] == 0
    assert samples["npugrad_worker_resident_bytes", first] > 2**20
    what = ("backend", "cpu"), ("description", ""), first, ("simulated", "false")
    assert samples[("npugrad_device_info", *what)] == 1
    assert samples["npugrad_device_mismatches_total", first, ("operator", "group_norm_backward")] == 0
    assert samples[("process_resident_memory_bytes",)] > 2**20
    assert samples["npugrad_worker_restarts_total", second] == 4
    assert samples["npugrad_device_memory_bytes", first] == 8000
    assert samples["npugrad_device_memory_used_bytes", first] == 3000
    assert ("npugrad_device_memory_bytes", second) not in samples
    assert samples["npugrad_workers_lost_total", first] == 0


async def test_tenants_are_shown_by_name_and_stay_once_they_were() -> None:
    both, one = {"vision": (3, 500), "other": (1, 20)}, {"vision": (0, 100)}
    for page, expected in zip(
        await pages(Figures(), both, one), (both, one | {"other": (0, 0)}), strict=True
    ):
        for tenant, (waiting, nbytes) in expected.items():
            assert f'npugrad_tenant_waiting_calls{{tenant="{tenant}"}} {waiting:.1f}' in page
            assert f'npugrad_tenant_inflight_bytes{{tenant="{tenant}"}} {nbytes:.1f}' in page


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
    operator, device = {"operator": call.plan.record.name}, {"device": "cpu:0"}
    for name, labels, expected in (
        ("accepted_calls_total", operator, 1),
        ("attempts_total", device, 2),
        ("workers_lost_total", device, 1),
        ("calls_rerun_total", device, 1),
        ("calls_redirected_total", {**device, "reason": "DEVICE_BUSY"}, 1),
        ("workspaces_asked_total", {**device, "answer": "granted"}, 1),
        ("calls_postponed_total", device, 1),
        ("device_transitions_total", {"device": "cpu:1", "state": "down"}, 1),
        ("run_time_ratio_sum", {**operator, **device}, 1.5),
        ("tenant_device_seconds_total", {"tenant": "other"}, 9),
    ):
        assert value(f"npugrad_{name}", labels) == expected, name
    for stage, seconds in {"queued": 1, "copy_in": 2, "run": 3, "copy_out": 4}.items():
        labels = {**operator, **device, "stage": stage}
        assert value("npugrad_stage_seconds_sum", labels) == seconds
        assert value("npugrad_stage_seconds_count", labels) == 1


async def test_a_page_has_the_samples_that_the_reference_tells_and_few_enough() -> None:
    """As many devices as given have run as many operators, in one message and as a stream.

    A page has what was used, and grows with it; the bound is for six operators, half of those there are.
    """

    async def samples(operators: int, devices: int) -> int:
        metrics = Metrics("1", "atlas-a2")
        metrics.show_pool(Figures(), asyncio.get_running_loop())
        marks = [("", 0.0), *((stage, 1.0) for stage in SERVER_STAGES)]
        for record, device in product(list(OPERATORS.values())[:operators], ("cpu:0", "cpu:1")[:devices]):
            call, info = (
                planned(record.name),
                ExecutionInfo("cpu", device, Product.ATLAS_A2, predicted_run_s=1),
            )
            metrics.call_accepted(call)
            metrics.call_finished(call, "OK", 1.0, info)
            metrics.stages_passed(record.name, device, marks)
            metrics.bytes_moved(record.name, 1, 1)
            for method in (record.rpc, "Execute"):
                metrics.call_arrived(method)
                metrics.call_answered(method, record.name, "OK", "OK", device, 1.0, tenant="other")
        page = await asyncio.to_thread(generate_latest, metrics.registry)
        return len(re.findall(rb"^\w", page, re.MULTILINE))

    assert await samples(6, 2) < 800
    one, of_pair = await samples(1, 1), await samples(1, 2) - await samples(1, 1)
    of_operator = await samples(2, 1) - one - of_pair
    text = (ROOT / "docs/reference/metrics.md").read_text("utf-8")
    assert f"{of_operator} samples for each operator" in text
    assert f"{of_pair} for each operator and device" in text


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
