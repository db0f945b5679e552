"""The worker processes of all devices: starts and ends them on demand, and passes on their messages."""

from __future__ import annotations

import asyncio
import errno
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Barrier, Event
from typing import TYPE_CHECKING, Protocol

from npugrad_server.backends.base import REFERENCE, RestartPolicy
from npugrad_server.machine import cpu_count
from npugrad_server.pool.commands import Failure
from npugrad_server.pool.heartbeat import Heartbeat
from npugrad_server.pool.process import WorkerProcess
from npugrad_server.worker.canary_messages import CanaryRun
from npugrad_server.worker.protocol import (
    CallDeferred,
    CallDone,
    CallFailed,
    CallUnknown,
    DeviceFailed,
    DeviceOpening,
    DeviceReady,
    NeedWorkspace,
    OpenFailed,
    WorkspaceFound,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_server.devices import DeviceName
    from npugrad_server.pool.arena import Arena, InputArena, OutputArena
    from npugrad_server.pool.types import PoolSettings
    from npugrad_server.worker.protocol import Message

_log = logging.getLogger(__name__)

_THREADS = 2
_HANG_UP_S = 2.0
"""Seconds a worker has to end by itself when the pool closes."""
_KILL_S = 10.0
"""Seconds to wait for the kernel to end a killed worker."""


class Events(Protocol):
    """Receiver of the events of workers; every method is called on the event loop."""

    def worker_ready(self, worker: int, incarnation: int, ready: DeviceReady) -> None:
        """A process has opened its device."""

    def worker_answered(self, worker: int, incarnation: int, answer: CallDone | CallFailed) -> None:
        """A process has answered a call."""

    def worker_needs_workspace(self, worker: int, incarnation: int, need: NeedWorkspace) -> None:
        """A process needs more workspace for a call than is set aside."""

    def worker_deferred(self, worker: int, incarnation: int, answer: CallDeferred) -> None:
        """A process has given a call back because there is no room for its workspace."""

    def worker_missed_plan(self, worker: int, call: int) -> None:
        """A process lacks the plan of a call."""

    def worker_found_workspace(self, worker: int, incarnation: int, answer: WorkspaceFound) -> None:
        """A process has reported how much workspace a call would need."""

    def worker_ran_canary(self, worker: int, incarnation: int, answer: CanaryRun) -> None:
        """A process has run a canary."""

    def worker_failing(self, worker: int, incarnation: int, failure: Failure) -> None:
        """A process has reported that its device failed or did not open, and is about to end."""

    def worker_opening(self, worker: int, incarnation: int, stage: str) -> None:
        """A process has reached another stage of opening its device."""

    def worker_lost(self, worker: int, incarnation: int, reason: str, *, host: bool = False) -> None:
        """A process has ended or, if `host` is true, could not be started because of the host."""


@dataclass
class Device:
    """One device of the fleet.

    Attributes:
        name: Its name.
        process: Its worker; None while there is none.
        info: What its last ready worker reported about it.
        spawning: Process being started, in a thread.
    """

    name: DeviceName
    process: WorkerProcess | None = None
    info: DeviceReady | None = None
    spawning: asyncio.Future[WorkerProcess] | None = None


class Fleet:
    """Owns every worker process and the threads that start them and pre-fault memory."""

    def __init__(
        self, settings: PoolSettings, names: list[DeviceName], inputs: InputArena, events: Events
    ) -> None:
        """Starts nothing yet.

        Args:
            settings: Sizes.
            names: The devices.
            inputs: Arena of the operands.
            events: Receives the events.
        """
        self.devices = [Device(name) for name in names]
        self.names = tuple(name.name for name in names)
        self._settings = settings
        self._inputs = inputs
        self._events = events
        self._closing = self._closed = False
        self._stop = Event()
        self._background: set[asyncio.Future[None]] = set()
        self._executor = _make_executor()
        hosted = sum(device.name.kind != "npu" for device in self.devices)
        self._threads = max(1, cpu_count() // max(1, hosted))
        self._heartbeat = Heartbeat(settings.heartbeat_timeout_s, self._silent)

    # ------------------------------------------------------------------------------------------ start and end

    def spawn(self, worker: int, incarnation: int, canary_rounds: int = 1) -> None:
        """Starts a process in a thread; `worker_ready` or `worker_lost` follows.

        Args:
            worker: Its device.
            incarnation: Its number.
            canary_rounds: How many times every canary must be right before it is ready.
        """
        device = self.devices[worker]
        start = partial(
            WorkerProcess,
            str(device.name),
            incarnation,
            self._inputs,
            self._settings.output_arena_bytes,
            self._threads,
            print_fd=self._settings.print_fd,
            module=self._settings.worker_module,
            cann=self._settings.cann,
        )
        device.spawning = self.start(start)
        device.spawning.add_done_callback(
            lambda future: self._spawned(worker, incarnation, future, canary_rounds)
        )

    def start(self, start: Callable[[], WorkerProcess]) -> asyncio.Future[WorkerProcess]:
        """Starts a process in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._executor, start)

    def _spawned(
        self, worker: int, incarnation: int, future: asyncio.Future[WorkerProcess], canary_rounds: int
    ) -> None:
        device = self.devices[worker]
        device.spawning = None
        try:
            process = future.result()
        except Exception as error:
            self._not_started(worker, incarnation, error)
            return
        try:
            process.attach(
                partial(self._received, worker, process),
                partial(self._exited, worker, process),
                partial(self._ended, worker, process),
            )
        except RuntimeError as error:
            process.discard()
            self._not_started(worker, incarnation, error)
            return
        device.process = process
        if self._closing:
            process.hang_up()
            return
        process.open(self._settings, canary_rounds)
        self.prefault(process.outputs)

    def _not_started(self, worker: int, incarnation: int, error: Exception) -> None:
        """Reports a failed start: the host had no descriptor, memory, process or thread left."""
        self._events.worker_lost(worker, incarnation, f"its worker process did not start: {error}", host=True)

    def kill(self, worker: int, incarnation: int) -> None:
        """Kills a process; `worker_lost` follows once it has been waited for."""
        device = self.devices[worker]
        if device.process is not None and device.process.incarnation == incarnation:
            device.process.kill()
        elif device.spawning is not None:
            device.spawning.add_done_callback(lambda _: self.kill(worker, incarnation))

    def process(self, worker: int) -> WorkerProcess:
        """Returns the process of a worker.

        Raises:
            RuntimeError: There is none.
        """
        process = self.devices[worker].process
        if process is None:
            raise RuntimeError(f"{self.devices[worker].name}: has no process")
        return process

    def tell(self, worker: int, incarnation: int, message: Message) -> None:
        """Sends a message to a process, if it still exists."""
        process = self.devices[worker].process
        if process is not None and process.incarnation == incarnation:
            process.send(message)

    def prefault(self, arena: Arena) -> None:
        """Backs the start of an arena with memory, in a thread."""
        work = partial(arena.prefault, self._settings.prefault_bytes, self._stop)
        self._in_thread(work).add_done_callback(_log_failure)

    def let_go(self, arena: OutputArena) -> None:
        """Removes a user of an output arena; the last one frees its memory, in a thread."""
        if not arena.release():
            return
        if self._closed:
            arena.close()
        else:
            self._in_thread(arena.close)

    def _in_thread(self, work: Callable[[], None]) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._background.add(future)
        future.add_done_callback(self._background.discard)
        return future

    # --------------------------------------------------------------------------------- messages from workers

    def _received(  # noqa: C901 -- one branch for each kind of message
        self, worker: int, process: WorkerProcess, message: Message
    ) -> None:
        self._heartbeat.heard(process)
        if isinstance(message, DeviceReady):
            self.devices[worker].info = message
            level = logging.WARNING if message.backend == REFERENCE else logging.INFO
            _log.log(level, "%s: %s, %s", self.names[worker], message.backend, message.description)
            if not self._closing:
                self._heartbeat.watch(process)
            self._events.worker_ready(worker, process.incarnation, message)
        elif isinstance(message, DeviceOpening):
            self._events.worker_opening(worker, process.incarnation, message.stage)
        elif isinstance(message, (CallDone, CallFailed)):
            process.plans.end(message.call)
            self._events.worker_answered(worker, process.incarnation, message)
        elif isinstance(message, NeedWorkspace):
            self._events.worker_needs_workspace(worker, process.incarnation, message)
        elif isinstance(message, CallUnknown):
            self._events.worker_missed_plan(worker, message.call)
        elif isinstance(message, CallDeferred):
            process.plans.end(message.call)
            self._events.worker_deferred(worker, process.incarnation, message)
        elif isinstance(message, CanaryRun):
            self._events.worker_ran_canary(worker, process.incarnation, message)
        elif isinstance(message, WorkspaceFound):
            self._events.worker_found_workspace(worker, process.incarnation, message)
        elif isinstance(message, (OpenFailed, DeviceFailed)):
            self._events.worker_failing(worker, process.incarnation, _failure(message))

    def _silent(self, process: WorkerProcess) -> None:
        worker = next(i for i, device in enumerate(self.devices) if device.process is process)
        reason = f"the worker did not answer for {self._settings.heartbeat_timeout_s:g} s"
        self._events.worker_failing(worker, process.incarnation, Failure(reason, silent=True))

    def _ended(self, worker: int, process: WorkerProcess, reason: str) -> None:
        """Reports that a process takes no more calls, though its descendants may still be running."""
        if not self._closing:
            failure = Failure(reason, killed=process.was_killed)
            self._events.worker_failing(worker, process.incarnation, failure)

    def _exited(self, worker: int, process: WorkerProcess, reason: str) -> None:
        device = self.devices[worker]
        device.process = None
        self._heartbeat.forget(process)
        if not self._closing:
            _log.warning("%s: %s", device.name.name, reason)
        self._events.worker_lost(worker, process.incarnation, reason)
        self.let_go(process.outputs)

    # ------------------------------------------------------------------------------------------------- close

    async def close(self) -> None:
        """Ends every process, first by hanging up, and waits for processes and threads."""
        self._closing = True
        self._stop.set()
        self._heartbeat.stop()
        await asyncio.gather(
            *(d.spawning for d in self.devices if d.spawning is not None), return_exceptions=True
        )
        processes = [device.process for device in self.devices if device.process is not None]
        for process in processes:
            process.hang_up()
        await self._wait_for(processes, _HANG_UP_S)
        for process in processes:
            process.kill()
        await self.wait_for(processes)
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
        self._closed = True
        self._executor.shutdown()

    async def wait_for(self, processes: list[WorkerProcess]) -> None:
        """Waits until killed processes have ended."""
        await self._wait_for(processes, _KILL_S)
        for process in processes:
            if not process.exited.is_set():
                _log.error("%s: process %d did not end even after SIGKILL", process.device, process.pid)

    @staticmethod
    async def _wait_for(processes: list[WorkerProcess], timeout_s: float) -> None:
        waits = [asyncio.ensure_future(process.exited.wait()) for process in processes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()


def _failure(message: OpenFailed | DeviceFailed) -> Failure:
    restart_policy = RestartPolicy(message.restart_policy)
    if isinstance(message, OpenFailed):
        return Failure(message.message, restart_policy, wrong=message.wrong)
    return Failure(
        message.message, restart_policy, message.call, message.code or None, message.retry, message.exempt
    )


def _make_executor() -> ThreadPoolExecutor:
    """Makes an executor and starts all its threads: a failure to start one later would silently lose work.

    Raises:
        OSError: There is no thread left.
    """
    executor, all_there = ThreadPoolExecutor(_THREADS, "npugrad-pool"), Barrier(_THREADS)
    try:
        for _ in range(_THREADS):
            executor.submit(all_there.wait)
    except RuntimeError as error:
        all_there.abort()
        executor.shutdown()
        raise OSError(errno.EAGAIN, str(error)) from error
    return executor


def _log_failure(future: asyncio.Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        _log.warning("an arena could not be prefaulted: %s", error)
