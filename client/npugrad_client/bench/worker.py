"""A worker process: its own event loop and client, told by its parent when to start and when to stop."""

from __future__ import annotations

import asyncio
import gc
import selectors
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npugrad.errors import NpugradError
from npugrad_client import AsyncClient
from npugrad_client.bench.engine import Cpu, Engine, Progress
from npugrad_client.bench.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from npugrad.call import ExecutionInfo
    from npugrad_client.bench.scenario import Scenario

PROGRESS_S = 0.5


@dataclass(frozen=True)
class Ready:
    """The worker is connected, and each workload was called once."""


@dataclass(frozen=True)
class Failed:
    """The worker cannot do what it is to do."""

    error: Exception


@dataclass(frozen=True)
class Start:
    """The measured part starts at this time of the monotonic clock, which all processes share."""

    epoch_s: float


@dataclass(frozen=True)
class Stop:
    """No more calls are to be sent."""


@dataclass(frozen=True)
class Done:
    """Everything was sent and answered.

    Attributes:
        record: The record as `Record.as_dict` gives it.
        cpu: Time of the processor.
        ended_s: When the last call was answered.
    """

    record: dict[str, Any]
    cpu: Cpu
    ended_s: float


Message = Ready | Failed | Progress | Done


def work(connection: Connection, scenario: Scenario, worker: int, target: str) -> None:
    """Runs one worker to its end; the parent's end of the connection closing ends it as well.

    Args:
        connection: To the parent.
        scenario: What is sent.
        worker: Which of its workers.
        target: Address of the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and says when to stop
    # Not epoll: asyncio rounds its waits up to whole milliseconds, and every call would be late by that.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_work(connection, scenario, worker, target))
    except (NpugradError, ValueError, TypeError) as error:
        _tell(connection, Failed(error))
    finally:
        loop.close()
        connection.close()


async def _work(connection: Connection, scenario: Scenario, worker: int, target: str) -> None:
    # Without retries: a load test counts what went wrong, and sends no call that its schedule does not have.
    async with AsyncClient(target, timeout_s=scenario.timeout_s, retry=None) as client:
        send = _sender(client, scenario)
        for workload in range(len(scenario.workloads)):
            await send(workload)  # connects and warms up; not counted
        gc.collect()
        gc.freeze()  # what is there now stays: no collection needs to look at it
        _tell(connection, Ready())
        await _readable(connection)
        order = _received(connection)
        if isinstance(order, Start):
            record = Record(scenario.window_s)
            await _measure(connection, Engine(scenario, worker, send, record, order.epoch_s))


def _sender(client: AsyncClient, scenario: Scenario) -> Callable[[int], Any]:
    calls = [
        (getattr(client, each.operator), each.arguments(scenario.seed + index))
        for index, each in enumerate(scenario.workloads)
    ]

    async def send(workload: int) -> ExecutionInfo:
        method, arguments = calls[workload]
        info: ExecutionInfo = (await method(**arguments)).info
        return info

    return send


async def _measure(connection: Connection, engine: Engine) -> None:
    loop = asyncio.get_running_loop()

    def on_order() -> None:
        loop.remove_reader(connection.fileno())
        _received(connection)  # Stop, or the parent has gone
        engine.stop()

    loop.add_reader(connection.fileno(), on_order)
    telling = asyncio.create_task(_tell_progress(connection, engine))
    await engine.run()
    telling.cancel()
    loop.remove_reader(connection.fileno())
    _tell(connection, engine.take_progress())
    _tell(connection, Done(engine.record.as_dict(), engine.cpu, engine.ended_s))


async def _tell_progress(connection: Connection, engine: Engine) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        _tell(connection, engine.take_progress())


def _tell(connection: Connection, message: Message) -> None:
    try:
        connection.send(message)
    except OSError:  # the parent has gone; the engine is told by the same connection
        return


def _received(connection: Connection) -> Start | Stop:
    try:
        order = connection.recv()
    except (EOFError, OSError):
        return Stop()
    return order if isinstance(order, Start) else Stop()


async def _readable(connection: Connection) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection.fileno())
