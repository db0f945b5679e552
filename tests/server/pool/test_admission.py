from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from tests.server.pool.pools import altered, make_job
from tests.server.pool.scheduling import open_scheduler

from npugrad import OPERATORS, Product, TensorMeta
from npugrad.errors import CallTooLarge, DeadlineExceeded, ServerBusy
from npugrad.validation import validate_call
from npugrad_server.pool.admission import AdmissionControl, check_fits, demand_of
from npugrad_server.pool.forecast import Forecast
from npugrad_server.pool.regions import ALIGNMENT
from npugrad_server.pool.run_times import STALE_S, work_size_of
from npugrad_server.pool.state import CallState
from npugrad_server.pool.tenant import Tenant
from npugrad_server.pool.types import PoolSettings

SETTINGS = PoolSettings(
    devices=("cpu:0", "cpu:1"),
    product=Product.ATLAS_A2,
    input_arena_bytes=2048,
    output_arena_bytes=1000,
    prefault_bytes=0,
    max_queue_depth=5,
    streams_per_device=2,
    hang_grace_s=1,
    worker_start_timeout_s=1,
    respawn_backoff_s=1,
    respawn_backoff_max_s=1,
    max_respawns=1,
)


def test_bytes_are_exact_and_every_tensor_is_aligned() -> None:
    planned = make_job(n=2, c=6, hxw=5, group=3, with_gamma=False, output_mask=(True, False, True)).planned
    demand = demand_of(planned)
    assert demand.inputs.offsets == {"grad_out": 0, "input": 256, "mean": 512, "rstd": 576}
    assert demand.inputs.nbytes == 640
    assert demand.outputs.offsets == {"grad_input": 0, "grad_beta": 256}
    assert demand.outputs.nbytes == 320
    assert demand.memory_bytes == 0
    assert all(offset % ALIGNMENT == 0 for offset in demand.inputs.offsets.values())


def test_an_expanded_operand_travels_small_and_counts_whole_on_the_device() -> None:
    planned = make_job().planned
    expanded = TensorMeta("float32", (2**20, 2**20), strides=(0, 0))
    demand = demand_of(altered(planned, call=planned.plan.call.with_inputs(grad_out=expanded)))
    assert demand.inputs.offsets["input"] == ALIGNMENT
    assert demand.memory_bytes == 2**42


def test_an_operand_that_is_not_used_takes_no_memory_and_has_a_limit_all_the_same() -> None:
    planned = altered(make_job(n=2, c=6, hxw=5, group=3).planned, unused=frozenset({"input"}))
    demand = demand_of(planned)
    assert "input" not in demand.inputs.offsets
    assert (demand.memory_bytes, demand.unused_bytes) == (0, 4 * 2 * 6 * 5)
    assert (
        demand_of(planned, own_memory=True).device_bytes
        == demand_of(make_job().planned, own_memory=True).device_bytes
    )


@pytest.mark.parametrize(
    ("setting", "limits"),
    [
        ("input_arena_bytes", {"input_arena_bytes": 2**20, "memory_bytes": 0}),
        ("device_memory_bytes", {"input_arena_bytes": 2**10, "memory_bytes": 2**20}),
    ],
)
def test_an_operand_that_is_not_used_may_have_what_a_kept_or_a_copied_one_may(
    setting: str, limits: dict[str, int]
) -> None:
    """Contiguous it needed the arena alone, and expanded the memory of copies, when it was still kept."""
    planned = altered(make_job(n=2, c=6, hxw=5, group=3).planned, unused=frozenset({"input"}))
    demand = replace(demand_of(planned), unused_bytes=2**20)
    check_fits("group_norm_backward", demand, **limits, output_arena_bytes=2**20)
    too_much = replace(demand, unused_bytes=2**20 + 1)
    with pytest.raises(CallTooLarge, match=rf"not used; expected at most {2**20} \(setting {setting}"):
        check_fits("group_norm_backward", too_much, **limits, output_arena_bytes=2**20)


def test_an_offset_makes_a_copy_necessary_and_is_counted() -> None:
    planned = make_job().planned
    shifted = TensorMeta("float32", (2, 3), storage_offset=100)
    demand = demand_of(altered(planned, call=planned.plan.call.with_inputs(mean=shifted)))
    assert demand.memory_bytes == 24


def test_channels_that_come_last_are_moved_for_operands_and_results() -> None:
    record = OPERATORS["grid_sampler_3d_backward"]
    call = record.build(n=2, c=3, d=4, h=5, w=6, od=2, oh=3, ow=4)
    call = call.with_inputs(
        input=TensorMeta("float32", (2, 4, 5, 6, 3), "NDHWC"),
        grad_output=TensorMeta("float32", (2, 2, 3, 4, 3), "NDHWC"),
    )
    assert validate_call(record, call).status == 0
    planned = altered(make_job().planned, record=record, call=call, outputs=record.infer(call))
    assert demand_of(planned).memory_bytes == 4 * 3 * (2 * 2 * 4 * 5 * 6 + 2 * 2 * 3 * 4)
    # A device with memory of its own takes operands as they lie.
    assert demand_of(planned, own_memory=True).memory_bytes == 4 * 3 * 2 * 4 * 5 * 6


def test_a_verification_needs_the_results_once_more_in_float64() -> None:
    planned = make_job(dtype="float16", verify=True, n=2, c=6, hxw=4).planned
    assert demand_of(planned).memory_bytes == 8 * (2 * 6 * 4 + 6 + 6)


def test_a_device_with_memory_of_its_own_takes_strides_and_holds_the_tensors() -> None:
    planned = make_job().planned
    expanded = altered(
        planned, call=planned.plan.call.with_inputs(mean=TensorMeta("float32", (2, 3), strides=(0, 0)))
    )
    assert demand_of(expanded).memory_bytes == 24
    demand = demand_of(expanded, own_memory=True)
    assert (demand.memory_bytes, demand.device_bytes > 0) == (0, True)
    assert demand.workspace_key is not None
    assert (demand_of(expanded).device_bytes, demand_of(expanded).workspace_key) == (0, None)


def test_tensors_that_no_device_has_room_for_are_refused_once_that_is_known() -> None:
    demand = demand_of(make_job().planned, own_memory=True)
    limits = {"input_arena_bytes": 1 << 20, "output_arena_bytes": 1 << 20, "memory_bytes": 1 << 20}
    check_fits("op", demand, **limits)
    check_fits("op", demand, **limits, device_bytes=demand.device_bytes)
    with pytest.raises(
        CallTooLarge, match=r"op: found \d+ bytes of tensors on the device; expected at most 9 "
    ):
        check_fits("op", demand, **limits, device_bytes=9)


def test_what_fits_exactly_is_let_in() -> None:
    demand = demand_of(make_job(verify=True).planned)
    limits: dict[str, int] = {
        "input_arena_bytes": demand.inputs.nbytes,
        "output_arena_bytes": demand.outputs.nbytes,
        "memory_bytes": demand.memory_bytes,
    }
    check_fits("op", demand, **limits)
    for setting, limit in limits.items():
        with pytest.raises(
            CallTooLarge, match=rf"op: found {limit} bytes of .*at most {limit - 1} \(setting"
        ):
            check_fits("op", demand, **{**limits, setting: limit - 1})


def refused(
    admission: AdmissionControl,
    planned: Any,
    waiting: int,
    forecast: Forecast | None = None,
    now: float | None = None,
) -> float:
    now = time.monotonic() if now is None else now
    with pytest.raises(ServerBusy) as caught:
        admission.reserve(planned, waiting, forecast or open_scheduler().forecast, now)
    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_memory_that_comes_back_can_be_taken_again() -> None:
    admission, planned = AdmissionControl(SETTINGS, 0), make_job(n=2, c=6, hxw=10).planned
    forecast = open_scheduler().forecast
    demand, region, _ = admission.reserve(planned, 0, forecast, time.monotonic())
    assert region.nbytes == demand.inputs.nbytes == admission.operands.used_bytes > 1024
    refused(admission, planned, 0)
    admission.operands.free(region)
    admission.reserve(planned, 0, forecast, time.monotonic())


def test_a_part_of_an_arena_that_cannot_be_aligned_is_not_promised() -> None:
    admission, planned = (
        AdmissionControl(SETTINGS, 0),
        make_job(n=3, c=6, hxw=12, output_mask=(True, False, False)).planned,
    )
    assert admission.output_bytes == 960
    forecast = open_scheduler().forecast
    admission.reserve(planned, 0, forecast, time.monotonic())  # 864 bytes, which take 896
    with pytest.raises(CallTooLarge, match="at most 832"):
        AdmissionControl(replace(SETTINGS, output_arena_bytes=880), 0).reserve(
            planned, 0, forecast, time.monotonic()
        )


def test_a_caller_is_asked_to_wait_until_its_tenants_turn() -> None:
    """All callers were asked to wait for the calls of all of them."""
    admission, planned, scheduler = AdmissionControl(SETTINGS, 0), make_job().planned, open_scheduler()
    now = time.monotonic()
    assert refused(admission, planned, 5, scheduler.forecast, now) == 0.1
    for number in range(21):
        scheduler.submit(state(planned, number, expected_s=1.0, tenant=Tenant("other")), now)
    assert refused(admission, planned, 5, scheduler.forecast, now) == pytest.approx(1, rel=0.1)
    for number in range(21, 26):
        scheduler.submit(state(planned, number, expected_s=1.0), now)
    assert refused(admission, planned, 5, scheduler.forecast, now) == pytest.approx(1 + 5 + 5, rel=0.1)
    for number in range(26, 126):
        scheduler.submit(state(planned, number, expected_s=1.0), now)
    assert refused(admission, planned, 5, scheduler.forecast, now) == 30.0


def state(planned: Any, number: int, **facts: Any) -> CallState:
    return CallState(number, operator=planned.plan.record.name, **facts)


def test_a_call_that_would_miss_its_deadline_is_told_so_when_it_comes() -> None:
    admission, scheduler = AdmissionControl(SETTINGS, 0), open_scheduler()
    now = time.monotonic()
    planned, later = (replace(make_job().planned, deadline_s=now + left_s) for left_s in (0.5, 3))
    work = work_size_of(planned)
    admission.reserve(planned, 0, scheduler.forecast, now)  # nothing is known of such calls
    for _ in range(100):
        scheduler.forecast.run_times.learn(0, work, 1.0, now)
    found = (
        r"group_norm_backward: deadline: found 1\.05 s predicted, 0 s of waiting and 1\.05 s of running; "
        r"expected at most the 0\.5 s that are left"
    )
    with pytest.raises(ServerBusy, match=found) as caught:
        admission.reserve(planned, 0, scheduler.forecast, now)
    assert caught.value.reason == "WOULD_MISS_DEADLINE"
    assert caught.value.retry_after_s is None, "no wait helps"
    admission.reserve(later, 0, scheduler.forecast, now)
    for number in range(9):
        scheduler.submit(state(planned, number, expected_s=1.0), now)
    with pytest.raises(ServerBusy, match=r"11\.\d+ s of waiting and 1\.05 s of running") as caught:
        admission.reserve(later, 0, scheduler.forecast, now)
    assert caught.value.retry_after_s == pytest.approx(9, rel=0.1)
    admission.reserve(make_job().planned, 0, scheduler.forecast, now)
    assert admission.operands.used_bytes > 0


def test_a_deadline_that_has_passed_is_told_so() -> None:
    planned = make_job(timeout_s=-1).planned
    assert planned.deadline_s is not None
    with pytest.raises(DeadlineExceeded, match="the deadline passed 1 s before the call arrived"):
        AdmissionControl(SETTINGS, 0).reserve(planned, 0, open_scheduler().forecast, planned.deadline_s + 1)


def test_one_call_is_let_in_when_nobody_has_looked_for_long() -> None:
    admission, forecast, planned = (
        AdmissionControl(SETTINGS, 0),
        open_scheduler().forecast,
        make_job().planned,
    )
    now = time.monotonic()
    late = replace(planned, deadline_s=now + 1)
    for _ in range(3):
        forecast.run_times.learn(0, work_size_of(planned), 100.0, now - 2 * STALE_S)
    _, region, prediction = admission.reserve(late, 0, forecast, now)
    assert prediction.is_probe
    admission.operands.free(region)
    with pytest.raises(ServerBusy):
        admission.reserve(late, 0, forecast, now)
