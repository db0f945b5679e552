from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from npugrad import Product
from npugrad.errors import CallTooLarge, ServerBusy
from npugrad_server.pool.gate import Gate
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


def refused(gate: Gate, planned: Any, waiting: int, running: int = 0) -> float:
    with pytest.raises(ServerBusy) as caught:
        gate.reserve(planned, waiting, running)
    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_memory_that_comes_back_can_be_taken_again(job: Any) -> None:
    gate, planned = Gate(SETTINGS, 0), job(n=2, c=6, hxw=10).planned
    demand, region = gate.reserve(planned, 0, 0)
    assert region.nbytes == demand.inputs.nbytes == gate.operands.used_bytes > 1024
    refused(gate, planned, 0)
    gate.operands.free(region)
    gate.reserve(planned, 0, 0)


def test_a_part_of_an_arena_that_cannot_be_aligned_is_not_promised(job: Any) -> None:
    gate, planned = Gate(SETTINGS, 0), job(n=3, c=6, hxw=12, output_mask=(True, False, False)).planned
    assert gate.output_bytes == 960
    gate.reserve(planned, 0, 0)  # 864 bytes, which take 896
    with pytest.raises(CallTooLarge, match="at most 832"):
        Gate(replace(SETTINGS, output_arena_bytes=880), 0).reserve(planned, 0, 0)


def test_a_caller_is_asked_to_wait_as_long_as_the_calls_ahead_take(job: Any) -> None:
    gate, planned = Gate(SETTINGS, 0), job().planned
    assert refused(gate, planned, 5) == 0.1
    for _ in range(200):
        gate.note(2.0)
    assert refused(gate, planned, 5, running=4) == pytest.approx(2.0 * 10 / 4, rel=1e-3)
    assert refused(gate, planned, 10_000) == 30.0
