"""One worker process, driven directly, call by call, without the pool's scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # not the builtin before Python 3.11
from typing import TYPE_CHECKING

from npugrad_server.backends.base import RestartPolicy
from npugrad_server.machine import cpu_count
from npugrad_server.pool.process import WorkerProcess
from npugrad_server.worker.protocol import (
    CallDone,
    CallFailed,
    DeviceFailed,
    DeviceReady,
    MemoryFound,
    OpenFailed,
    WorkspaceFound,
)

if TYPE_CHECKING:
    from npugrad_server.acceptance.loop import LoopThread
    from npugrad_server.pool.arena import InputArena, OutputArena
    from npugrad_server.pool.types import PoolSettings
    from npugrad_server.worker.protocol import AskMemory, AskWorkspace, Message, RunCall

WorkerAnswer = CallDone | WorkspaceFound | MemoryFound | CallFailed | DeviceFailed
_END_S = 15.0
"""Seconds the kernel has to end a killed process."""


class DeviceGone(Exception):
    """The device no longer opens, so nothing that needs it can continue."""


class WorkerLink:
    """A worker process of one device, from its start to its end."""

    def __init__(self, loop: LoopThread, inputs: InputArena, settings: PoolSettings, number: int) -> None:
        """Starts the process and has it open its device.

        Args:
            loop: Runs the communication.
            inputs: Arena of the operands.
            settings: Settings of the pool; the first device is opened.
            number: Number of this process among those of the device.
        """
        self._loop = loop
        self._waiting: dict[int, Future[WorkerAnswer]] = {}
        self._opened: Future[DeviceReady] = Future()
        self._ended: Future[str] = Future()
        self._failure: DeviceFailed | None = None
        self._process = WorkerProcess(
            settings.devices[0], number, inputs, settings.output_arena_bytes, cpu_count()
        )

        def begin() -> None:
            self._process.attach(self._received, self._exited)
            self._process.open(settings)

        loop.call(begin)

    @property
    def pid(self) -> int:
        """Process number."""
        return self._process.pid

    @property
    def outputs(self) -> OutputArena:
        """The worker's arena of results."""
        return self._process.outputs

    @property
    def alive(self) -> bool:
        """Whether the process is running and has not reported that its device failed."""
        return self._failure is None and not self._ended.done()

    def wait_ready(self, timeout_s: float) -> DeviceReady:
        """Waits until the device is open.

        Raises:
            DeviceGone: It did not open; the message says why.
        """
        try:
            return self._opened.result(timeout_s)
        except FutureTimeout:
            raise DeviceGone(f"{self._process.device} did not open within {timeout_s:g} s") from None

    def ask(self, message: RunCall | AskWorkspace | AskMemory) -> Future[WorkerAnswer]:
        """Sends a message; the future gets the answer, `DeviceFailed` if the process ended."""
        future: Future[WorkerAnswer] = Future()

        def send() -> None:
            if not self.alive:
                future.set_result(self._lost())
                return
            self._waiting[message.call] = future
            self._process.send(message)

        self._loop.call(send)
        return future

    def abandon(self) -> None:
        """Has the process killed without waiting; pending messages are then soon answered."""
        self._loop.later(self._process.kill)

    def close(self, *, kill: bool = False) -> str:
        """Ends the process, by killing it or closing its socket, and waits for it.

        Returns:
            A readable description of how it ended.

        Raises:
            DeviceGone: The kernel cannot end it.
        """
        self._loop.call(self._process.kill if kill else self._process.hang_up)
        try:
            words = self._ended.result(_END_S)
        except FutureTimeout:
            self._loop.call(self._process.kill)
            words = self._wait_killed()
        self._process.outputs.close()
        return words

    def _wait_killed(self) -> str:
        try:
            return self._ended.result(_END_S)
        except FutureTimeout:
            raise DeviceGone(f"process {self.pid} did not end even after SIGKILL") from None

    # ----------------------------------------------------------------------------------- on the loop's thread

    def _received(self, message: Message) -> None:
        if isinstance(message, DeviceReady):
            self._opened.set_result(message)
        elif isinstance(message, OpenFailed):
            self._opened.set_exception(DeviceGone(f"{self._process.device}: {message.message}"))
        elif isinstance(message, (CallDone, WorkspaceFound, MemoryFound, CallFailed)):
            future = self._waiting.pop(message.call, None)
            if future is not None:
                future.set_result(message)
        elif isinstance(message, DeviceFailed):
            self._failure = message

    def _exited(self, words: str) -> None:
        if not self._opened.done():
            self._opened.set_exception(DeviceGone(f"{self._process.device}: {words}"))
        self._ended.set_result(words)
        for future in self._waiting.values():
            future.set_result(self._lost())
        self._waiting.clear()

    def _lost(self) -> DeviceFailed:
        """Returns the failure that the device reported or, if none, how the process ended."""
        if self._failure is not None:
            return self._failure
        words = self._ended.result() if self._ended.done() else "the worker process ends"
        return DeviceFailed(0, words, 0, RestartPolicy.SOON.value, retry=True, exempt=False)
