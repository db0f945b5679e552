"""A scheduler that a test drives by hand, and its commands sorted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from npugrad import Product
from npugrad_server.pool.commands import Command, FailCall, SpawnWorker, StartCall, WorkerSpec
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.state import CallState
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
ONCE = "CANN 8.5.0 reads the option once"
"""Why a device cannot be deterministic."""


def of(kind: type[C], commands: Sequence[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def started(commands: Sequence[Command]) -> list[int]:
    return [command.call for command in of(StartCall, commands)]


def refused(commands: Sequence[Command]) -> list[tuple[int, str]]:
    return [(command.call, command.reason) for command in of(FailCall, commands)]


class Driven(Scheduler):
    """A scheduler with what its callers and workers do, in short."""

    def put(self, number: int, now: float = 0, **facts: Any) -> list[int]:
        return started(self.submit(CallState(number, **facts), now))

    def begin(self, number: int, now: float = 0, **facts: Any) -> StartCall:
        (start,) = of(StartCall, self.submit(CallState(number, **facts), now))
        return start

    def end(self, start: StartCall, reason: str = "", now: float = 0, **told: Any) -> list[Command]:
        return self.answered(
            start.worker, start.incarnation, start.call, not reason, now, reason=reason, **told
        )

    def finish(self, start: StartCall, now: float = 0, **told: Any) -> list[Command]:
        return self.end(start, now=now, **told) + self.close(start.call, now)

    def lose(self, worker: int = 0, now: float = 0, why: str = "signal 9", **told: Any) -> list[Command]:
        return self.lost(worker, self.workers[worker].incarnation, why, now, **told)

    def be_ready(
        self,
        worker: int = 0,
        unavailable: Mapping[str, str] | None = None,
        now: float = 0,
        *,
        deterministic: bool | None = None,
        **told: Any,
    ) -> list[Command]:
        return self.ready(
            worker,
            self.workers[worker].incarnation,
            now,
            unavailable=unavailable,
            deterministic=deterministic,
            no_determinism=ONCE if deterministic is False else "",
            **told,
        )

    def be_back(self, worker: int = 0, now: float = 0, **told: Any) -> list[Command]:
        """The next process of a device is started, and has opened it."""
        self.tick(now)
        return self.be_ready(worker, now=now, **told)


def starting_scheduler(
    workers: int = 1,
    streams: int = 1,
    output_bytes: int = 1024,
    memory: int = 1024,
    settings: PoolSettings = SETTINGS,
) -> Driven:
    """One whose devices' first processes were started; none is ready."""
    scheduler = Driven(settings, [WorkerSpec(streams, output_bytes, "host")] * workers, {"host": memory})
    spawned = of(SpawnWorker, scheduler.start(0))
    assert [command.worker for command in spawned] == list(range(workers))
    return scheduler


def open_scheduler(
    workers: int = 1, *, one_mode: bool = False, device: int | None = None, **facts: Any
) -> Driven:
    """One whose devices are all ready, with memory of their own if told how much."""
    scheduler = starting_scheduler(workers, **facts)
    for worker in range(workers):
        scheduler.be_ready(worker, one_mode=one_mode, memory_bytes=device)
    return scheduler
