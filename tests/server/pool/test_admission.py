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
from npugrad_server.pool import PlannedCall
from npugrad_server.pool.admission import AdmissionControl, Demand, check_fits, demand_of
from npugrad_server.pool.forecast import Prediction
from npugrad_server.pool.regions import ALIGNMENT, Region
from npugrad_server.pool.run_times import STALE_S, work_size_of
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


LIMITS = {"input_arena_bytes": 1 << 20, "output_arena_bytes": 1 << 20, "memory_bytes": 1 << 20}


def with_meta(planned: PlannedCall, **metas: TensorMeta) -> PlannedCall:
    return altered(planned, call=planned.plan.call.with_inputs(**metas))


# ------------------------------------------------------------------------------------------- what calls need


def test_bytes_are_exact_and_every_tensor_is_aligned() -> None:
    job = make_job(n=2, c=6, hxw=5, group=3, with_gamma=False, output_mask=(True, False, True))
    demand = demand_of(job.planned)
    assert demand.inputs.offsets == {"grad_out": 0, "input": 256, "mean": 512, "rstd": 576}
    assert demand.inputs.nbytes == 640
    assert demand.outputs.offsets == {"grad_input": 0, "grad_beta": 256}
    assert demand.outputs.nbytes == 320
    assert demand.memory_bytes == 0
    assert all(offset % ALIGNMENT == 0 for offset in demand.inputs.offsets.values())


def test_what_is_copied_on_the_host_is_counted() -> None:
    planned = make_job().planned
    shifted = with_meta(planned, mean=TensorMeta("float32", (2, 3), storage_offset=100))
    assert demand_of(shifted).memory_bytes == 24
    verified = make_job(dtype="float16", verify=True, n=2, c=6, hxw=4).planned
    assert demand_of(verified).memory_bytes == 8 * (2 * 6 * 4 + 6 + 6), "its results once more in float64"
    expanded = demand_of(with_meta(planned, grad_out=TensorMeta("float32", (2**20, 2**20), strides=(0, 0))))
    assert expanded.inputs.offsets["input"] == ALIGNMENT, "it travels small, and counts whole on the device"
    assert expanded.memory_bytes == 2**42


def test_a_device_with_memory_of_its_own_takes_strides_and_holds_the_tensors() -> None:
    expanded = with_meta(make_job().planned, mean=TensorMeta("float32", (2, 3), strides=(0, 0)))
    on_host, demand = demand_of(expanded), demand_of(expanded, own_memory=True)
    assert (on_host.memory_bytes, on_host.device_bytes, on_host.workspace_key) == (24, 0, None)
    assert (demand.memory_bytes, demand.device_bytes > 0) == (0, True)
    assert demand.workspace_key is not None


def test_an_operand_that_is_not_used_takes_no_memory_and_has_the_limit_of_a_kept_or_a_copied_one() -> None:
    """Contiguous it needed the arena alone, and expanded the memory of copies, when it was still kept."""
    planned = altered(make_job(n=2, c=6, hxw=5, group=3).planned, unused=frozenset({"input"}))
    demand = demand_of(planned)
    assert "input" not in demand.inputs.offsets
    assert (demand.memory_bytes, demand.unused_bytes) == (0, 4 * 2 * 6 * 5)
    usual = demand_of(make_job().planned, own_memory=True)
    assert demand_of(planned, own_memory=True).device_bytes == usual.device_bytes
    for setting, limits in (
        ("input_arena_bytes", {"input_arena_bytes": 2**20, "memory_bytes": 0}),
        ("device_memory_bytes", {"input_arena_bytes": 2**10, "memory_bytes": 2**20}),
    ):
        check_fits("op", replace(demand, unused_bytes=2**20), **limits, output_arena_bytes=2**20)
        too_much = replace(demand, unused_bytes=2**20 + 1)
        with pytest.raises(CallTooLarge, match=rf"not used; expected at most {2**20} \(setting {setting}"):
            check_fits("op", too_much, **limits, output_arena_bytes=2**20)


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


def test_what_fits_exactly_is_let_in() -> None:
    demand = demand_of(make_job(verify=True).planned)
    limits: dict[str, int] = {
        "input_arena_bytes": demand.inputs.nbytes,
        "output_arena_bytes": demand.outputs.nbytes,
        "memory_bytes": demand.memory_bytes,
    }
    check_fits("op", demand, **limits)
    for setting, limit in limits.items():
        told = rf"op: found {limit} bytes of .*at most {limit - 1} \(setting"
        with pytest.raises(CallTooLarge, match=told):
            check_fits("op", demand, **{**limits, setting: limit - 1})
    own = demand_of(make_job().planned, own_memory=True)
    check_fits("op", own, **LIMITS)
    check_fits("op", own, **LIMITS, device_bytes=own.device_bytes)
    told = r"op: found \d+ bytes of tensors on the device; expected at most 9 "
    with pytest.raises(CallTooLarge, match=told):
        check_fits("op", own, **LIMITS, device_bytes=9)


# ------------------------------------------------------------------------------------------- who is let in


class Door:
    """Admission control and a scheduler, on a clock that stands still."""

    def __init__(self, **changes: Any) -> None:
        self.admission = AdmissionControl(replace(SETTINGS, **changes), 0)
        self.scheduler = open_scheduler()
        self.now = time.monotonic()
        self.forecast = self.scheduler.forecast

    def reserve(self, planned: PlannedCall, waiting: int = 0) -> tuple[Demand, Region, Prediction]:
        return self.admission.reserve(planned, waiting, self.forecast, self.now)

    def refused(self, planned: PlannedCall, waiting: int = 0) -> float:
        """When a call may come again for which there is no room."""
        with pytest.raises(ServerBusy) as caught:
            self.reserve(planned, waiting)
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.retry_after_s is not None
        return caught.value.retry_after_s

    def queue(self, numbers: range, **facts: Any) -> None:
        """Calls that are expected to run for a second come, and wait."""
        for number in numbers:
            self.scheduler.put(number, self.now, operator="group_norm_backward", expected_s=1.0, **facts)


def test_memory_that_comes_back_can_be_taken_again() -> None:
    door, planned = Door(), make_job(n=2, c=6, hxw=10).planned
    demand, region, _ = door.reserve(planned)
    assert region.nbytes == demand.inputs.nbytes == door.admission.operands.used_bytes > 1024
    door.refused(planned)
    door.admission.operands.free(region)
    door.reserve(planned)


def test_a_part_of_an_arena_that_cannot_be_aligned_is_not_promised() -> None:
    planned = make_job(n=3, c=6, hxw=12, output_mask=(True, False, False)).planned
    assert Door().admission.output_bytes == 960
    Door().reserve(planned)  # 864 bytes, which take 896
    with pytest.raises(CallTooLarge, match="at most 832"):
        Door(output_arena_bytes=880).reserve(planned)


def test_a_caller_is_asked_to_wait_until_its_tenants_turn() -> None:
    """All callers were asked to wait for the calls of all of them."""
    door, planned = Door(), make_job().planned
    assert door.refused(planned, 5) == 0.1
    door.queue(range(21), tenant=Tenant("other"))
    assert door.refused(planned, 5) == pytest.approx(1, rel=0.1)
    door.queue(range(21, 26))
    assert door.refused(planned, 5) == pytest.approx(1 + 5 + 5, rel=0.1)
    door.queue(range(26, 126))
    assert door.refused(planned, 5) == 30.0


def test_a_call_that_would_miss_its_deadline_is_told_so_when_it_comes() -> None:
    door = Door()
    soon, later = (replace(make_job().planned, deadline_s=door.now + left_s) for left_s in (0.5, 3))
    door.reserve(soon)  # nothing is known of such calls
    for _ in range(100):
        door.forecast.run_times.learn(0, work_size_of(soon), 1.0, door.now)
    found = (
        r"group_norm_backward: deadline: found 1\.05 s predicted, 0 s of waiting and 1\.05 s of running; "
        r"expected at most the 0\.5 s that are left"
    )
    with pytest.raises(ServerBusy, match=found) as caught:
        door.reserve(soon)
    assert caught.value.reason == "WOULD_MISS_DEADLINE"
    assert caught.value.retry_after_s is None, "no wait helps"
    door.reserve(later)
    door.queue(range(9))
    with pytest.raises(ServerBusy, match=r"11\.\d+ s of waiting and 1\.05 s of running") as caught:
        door.reserve(later)
    assert caught.value.retry_after_s == pytest.approx(9, rel=0.1)
    door.reserve(make_job().planned)
    assert door.admission.operands.used_bytes > 0
    door.now += 4
    with pytest.raises(DeadlineExceeded, match="the deadline passed 1 s before the call arrived"):
        door.reserve(later)


def test_one_call_is_let_in_when_nobody_has_looked_for_long() -> None:
    door, planned = Door(), make_job().planned
    late = replace(planned, deadline_s=door.now + 1)
    for _ in range(3):
        door.forecast.run_times.learn(0, work_size_of(planned), 100.0, door.now - 2 * STALE_S)
    _, region, prediction = door.reserve(late)
    assert prediction.is_probe
    door.admission.operands.free(region)
    with pytest.raises(ServerBusy):
        door.reserve(late)
