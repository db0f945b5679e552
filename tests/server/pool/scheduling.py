"""A scheduler in the state that a test begins with, and its commands sorted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from npugrad import Product
from npugrad_server.pool.commands import (
    Command,
    SpawnWorker,
    StartCall,
    WorkerSpec,
)
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.types import PoolSettings

C = TypeVar("C")

SETTINGS = PoolSettings(
    devices=("cpu:0",),
    product=Product.ATLAS_A2,
    input_arena_bytes=0,
    output_arena_bytes=0,
    prefault_bytes=0,
    max_queue_depth=100,
    streams_per_device=1,
    hang_grace_s=10,
    worker_start_timeout_s=60,
    respawn_backoff_s=1,
    respawn_backoff_max_s=5,
    max_respawns=3,
)


def of(kind: type[C], commands: Sequence[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def open_scheduler(
    workers: int = 1,
    *,
    streams: int = 1,
    output_bytes: int = 1024,
    memory: int = 1024,
    one_mode: bool = False,
    device: int | None = None,
    settings: PoolSettings = SETTINGS,
) -> Scheduler:
    scheduler = Scheduler(settings, [WorkerSpec(streams, output_bytes, "host")] * workers, {"host": memory})
    spawned = of(SpawnWorker, scheduler.start(0))
    assert [command.worker for command in spawned] == list(range(workers))
    for command in spawned:
        scheduler.ready(command.worker, command.incarnation, 0, one_mode=one_mode, memory_bytes=device)
    return scheduler


def started(commands: Sequence[Command]) -> list[int]:
    return [command.call for command in of(StartCall, commands)]


def finish(scheduler: Scheduler, start: StartCall, now: float = 0) -> list[Command]:
    """Answers a call and closes it."""
    out = scheduler.answered(start.worker, start.incarnation, start.call, True, now)
    return out + scheduler.close(start.call, now)


def run_all(scheduler: Scheduler, first: Sequence[Command]) -> list[int]:
    """Answers and closes every call that starts, in turn; returns the order of the starts."""
    order, todo = [], list(of(StartCall, first))
    while todo:
        start = todo.pop(0)
        order.append(start.call)
        todo += of(StartCall, finish(scheduler, start))
    return order
