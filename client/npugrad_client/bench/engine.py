"""Sends the calls of one worker: open loop by a schedule, or closed loop one after the other.

In an open loop, a call's latency counts from its intended start, so that a server that stalls does not hide
the calls that would have been made meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npugrad_client.bench.schedule import closed_mix, schedule
from npugrad_client.bench.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from npugrad.call import ExecutionInfo
    from npugrad_client.bench.record import Record
    from npugrad_client.bench.scenario import Scenario

    Send = Callable[[int, int], Awaitable[ExecutionInfo]]

_HEARTBEAT_S = 0.02
_NAP_S = 0.25
"""How long a sleeping sender takes at most to notice that it must stop."""
_LEAST_GRACE_S, _GRACE = 5.0, 0.1
"""How long a late sender goes on after the end: at least in seconds, and as a share of the duration.

So a process that the system stops for a second or two still makes every call of a short run.
"""
_IDLE_S = 0.02
"""How often a caller of a closed loop checks whether its turn has come."""


@dataclass
class LoadProgress:
    """What happened since the last report, for the live view.

    Attributes:
        intended: Calls that were to be sent.
        answered: Calls that succeeded.
        failed: Calls that failed.
        dropped: Calls that were not sent.
        in_flight: Calls in flight now.
        latency: Latencies from the intended start.
    """

    intended: int = 0
    answered: int = 0
    failed: int = 0
    dropped: int = 0
    in_flight: int = 0
    latency: Sketch = field(default_factory=Sketch)


@dataclass
class Cpu:
    """CPU time in the measured part.

    Attributes:
        wall_s: Seconds that passed.
        thread_s: CPU seconds of the event loop's thread.
        process_s: CPU seconds of all threads.
    """

    wall_s: float = 0.0
    thread_s: float = 0.0
    process_s: float = 0.0

    @property
    def loop_share(self) -> float:
        """Share of the time in which the event loop's thread ran."""
        return self.thread_s / self.wall_s if self.wall_s > 0 else 0.0


class Engine:
    """One worker's calls, on the running event loop.

    Args:
        scenario: What is sent.
        worker: Index of the worker.
        send: Sends one call of a workload to a server, given by their indices, and returns the call's info.
        record: Where calls are counted.
        epoch_s: When the measured part starts, on the clock of the event loop, the monotonic one.
        servers: Names of the servers; calls go to them in turn.

    Attributes:
        record: Where calls are counted.
        cpu: CPU time in the measured part.
        ended_s: When the last call was answered, in seconds from the start of the measured part.
    """

    def __init__(
        self,
        scenario: Scenario,
        worker: int,
        send: Send,
        record: Record,
        epoch_s: float,
        servers: Sequence[str] = ("",),
    ) -> None:
        self._scenario, self._worker, self._send = scenario, worker, send
        self.record, self._epoch_s = record, epoch_s
        self._clock = asyncio.get_running_loop().time
        # Calls are counted by server only if there are several.
        self._servers = tuple(servers) if len(servers) > 1 else ("",)
        self._turns = itertools.count(worker)
        self._names = [each.name for each in scenario.workloads]
        self._limit = _part(scenario.max_in_flight, worker, scenario.workers)
        # A closed loop may have fewer callers than workers; those without one send nothing.
        senders = (
            min(scenario.workers, math.ceil(scenario.top_level)) if scenario.is_closed else scenario.workers
        )
        self._calls_left = _part(scenario.max_calls, worker, senders)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._progress = LoadProgress()
        self._in_flight = 0
        self.cpu = Cpu()
        self.ended_s = 0.0

    def stop(self) -> None:
        """Stops sending; calls in flight end normally."""
        self._stopped.set()
        self.record.end(self._now())

    def abandon(self) -> None:
        """Stops sending, and cancels calls in flight."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    def take_progress(self) -> LoadProgress:
        """Returns what happened since it was last taken."""
        taken, self._progress = self._progress, LoadProgress()
        taken.in_flight = self._in_flight
        return taken

    async def run(self) -> None:
        """Sends everything and waits for the answers."""
        watch = asyncio.create_task(self._watch())
        await self._sleep_until(-self._scenario.warm_up_s)
        await (self._closed() if self._scenario.is_closed else self._open())
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.ended_s = self._now()
        watch.cancel()
        self.record.close()

    def _now(self) -> float:
        return self._clock() - self._epoch_s

    async def _sleep_until(self, at_s: float) -> None:
        # In pieces rather than on an event: a timer for each call is cheap, a wait with a timeout is not.
        while (left_s := at_s - self._now()) > 0 and not self._stopped.is_set():  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, _NAP_S))

    # ---------------------------------------------------------------------------- open loop

    async def _open(self) -> None:
        duration_s = self._scenario.duration_s
        last_s = duration_s + max(_LEAST_GRACE_S, _GRACE * duration_s)
        for at_s, workload in schedule(self._scenario, self._worker):
            if at_s > self._now():
                await self._sleep_until(at_s)
            else:
                await asyncio.sleep(0)  # behind schedule: answers must still be read
            if self._stopped.is_set():
                return
            if (now := self._now()) > last_s:  # it cannot catch up; the record says so
                self.record.unsent_s = now - at_s
                return
            self._start(at_s, workload)
        if not self._scenario.max_calls:
            await self._sleep_until(self._scenario.duration_s)

    def _start(self, at_s: float, workload: int) -> None:
        self._count_intended(at_s, workload)
        if len(self._tasks) >= self._limit:
            self.record.dropped(self._names[workload], at_s)
            self._progress.dropped += 1
            return
        task = asyncio.create_task(self._call(at_s, workload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _count_intended(self, at_s: float, workload: int) -> None:
        self.record.intended(self._names[workload], at_s)
        self._progress.intended += 1

    # -------------------------------------------------------------------------- closed loop

    async def _closed(self) -> None:
        most = math.ceil(self._scenario.top_level)
        mine = range(self._worker, most, self._scenario.workers)
        if self._scenario.max_calls:
            mine = mine[: self._calls_left]  # a caller that never has a call is none
        self._tasks = {asyncio.create_task(self._caller(number)) for number in mine}

    async def _caller(self, number: int) -> None:
        """Makes the calls of one caller, each after the answer to the one before."""
        mix = closed_mix(self._scenario, number)
        while not self._stopped.is_set() and (now := self._now()) < self._scenario.duration_s:
            if number >= round(self._scenario.level(now)):
                await asyncio.sleep(_IDLE_S)
                continue
            if self._scenario.max_calls:
                if not self._calls_left:
                    self.record.end(now)  # fewer callers go on from here
                    return
                self._calls_left -= 1
            workload = next(mix)
            self._count_intended(now, workload)
            await self._call(now, workload)

    # ---------------------------------------------------------------------------- one call

    async def _call(self, at_s: float, workload: int) -> None:
        started_s = self._now()
        name, record = self._names[workload], self.record
        turn = next(self._turns) % len(self._servers)
        server = self._servers[turn]
        record.sent(at_s, started_s, server)
        self._in_flight += 1
        try:
            info = await self._send(workload, turn)
        except Exception as error:  # counts any error: a task that died would hide it
            record.failed(name, at_s, getattr(error, "reason", "") or type(error).__name__, server)
            self._progress.failed += 1
            return
        finally:
            self._in_flight -= 1
        ended_s = self._now()
        record.answered(name, at_s, started_s, ended_s, info, server)
        self._progress.answered += 1
        self._progress.latency.add(ended_s - at_s)

    async def _watch(self) -> None:
        """Measures how late the event loop is, and how much CPU time it takes."""
        await self._sleep_until(0.0)
        start = self._clock(), time.thread_time(), time.process_time()
        while True:
            due_s = self._clock() + _HEARTBEAT_S
            await asyncio.sleep(_HEARTBEAT_S)
            self.record.loop_lag.add(self._clock() - due_s)
            if self._now() < self._scenario.duration_s and not self._stopped.is_set():
                now = self._clock(), time.thread_time(), time.process_time()
                self.cpu = Cpu(*(b - a for a, b in zip(start, now, strict=True)))


def _part(whole: int, worker: int, workers: int) -> int:
    """This worker's share of a number."""
    return whole // workers + (1 if worker < whole % workers else 0)
