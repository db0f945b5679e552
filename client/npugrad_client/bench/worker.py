"""Worker process with its own event loop and client, started and stopped by its parent."""

from __future__ import annotations

import asyncio
import gc
import itertools
import selectors
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npugrad.errors import NpugradError
from npugrad_client import AsyncClient
from npugrad_client.bench.engine import Cpu, Engine, LoadProgress
from npugrad_client.bench.interrupts import ENDING
from npugrad_client.bench.record import Record
from npugrad_client.bench.schedule import planned_end_s

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from multiprocessing.connection import Connection

    from npugrad.call import ExecutionInfo
    from npugrad_client._tls import Servers
    from npugrad_client.bench.scenario import Scenario

PROGRESS_S = 0.5
_CONNECT_S = 10.0
"""Minimum deadline of the calls that connect."""


@dataclass(frozen=True)
class Ready:
    """The worker is connected, and each workload was called once."""


@dataclass(frozen=True)
class Failed:
    """The worker cannot do its work."""

    error: Exception


@dataclass(frozen=True)
class Start:
    """The measured part starts at this time of the monotonic clock, which all processes share."""

    epoch_s: float


@dataclass(frozen=True)
class Stop:
    """The worker must send no more calls."""


@dataclass(frozen=True)
class Gone:
    """Nobody waits for results any more: the parent has closed its end of the connection, or died."""


@dataclass(frozen=True)
class Done:
    """Everything was sent and answered.

    Attributes:
        record: The record as `Record.as_dict` gives it.
        cpu: CPU time.
        ended_s: When the last call was answered.
    """

    record: dict[str, Any]
    cpu: Cpu
    ended_s: float


Message = Ready | Failed | LoadProgress | Done


def work(connection: Connection, scenario: Scenario, worker: int, servers: Servers) -> None:
    """Runs one worker to its end; it also ends when the parent closes the connection.

    Args:
        connection: To the parent.
        scenario: What is sent.
        worker: Index of the worker.
        servers: Where its calls go.
    """
    for number in ENDING:  # the parent gets them too, and tells the worker to stop
        signal.signal(number, signal.SIG_IGN)
    # Not epoll: asyncio rounds its waits up to whole milliseconds, and every call would be late by that.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_work(connection, scenario, worker, servers))
    except (NpugradError, ValueError, TypeError, OSError) as error:
        _tell(connection, Failed(error))
    except MemoryError:
        _tell(connection, Failed(ValueError("the operands do not fit into memory")))
    finally:
        loop.close()
        connection.close()


async def _work(connection: Connection, scenario: Scenario, worker: int, servers: Servers) -> None:
    # Without retries: a load test counts failures, and sends no call that is not on its schedule. One client
    # per server, not one for all, so that each gets its share whatever the others do.
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(target, retry=None, tls=servers.tls))
            for target in servers.targets
        ]
        send = _sender(clients, scenario)
        if not await _unless_gone(connection, _connect(send, scenario, len(clients))):
            return
        gc.collect()
        gc.freeze()  # these objects stay: no collection needs to visit them
        _tell(connection, Ready())
        await _readable(connection)
        order = _received(connection)
        if isinstance(order, Start):
            record = Record(scenario.window_s, is_closed=scenario.is_closed, end_s=planned_end_s(scenario))
            engine = Engine(scenario, worker, send, record, order.epoch_s, servers.targets)
            await _measure(connection, engine)


async def _connect(send: Callable[..., Any], scenario: Scenario, servers: int) -> None:
    """Connects and warms up, which may take longer than a call; not counted."""
    for workload, server in itertools.product(range(len(scenario.workloads)), range(servers)):
        await send(workload, server, max(scenario.timeout_s, _CONNECT_S))


async def _unless_gone(connection: Connection, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` was done before the parent was gone; the parent sends nothing until it is done."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_readable(connection))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()  # raises its exception
        return working.done()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def _sender(clients: Sequence[AsyncClient], scenario: Scenario) -> Callable[..., Any]:
    calls = [
        ([getattr(client, each.operator) for client in clients], each.arguments(scenario.seed + index))
        for index, each in enumerate(scenario.workloads)
    ]

    async def send(workload: int, server: int, timeout_s: float = scenario.timeout_s) -> ExecutionInfo:
        methods, arguments = calls[workload]
        info: ExecutionInfo = (await methods[server](**arguments, timeout_s=timeout_s)).info
        return info

    return send


async def _measure(connection: Connection, engine: Engine) -> None:
    loop = asyncio.get_running_loop()

    def on_order() -> None:
        if isinstance(_received(connection), Gone):
            loop.remove_reader(connection.fileno())
            engine.abandon()
        else:
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
    except OSError:  # the parent is gone; the engine learns it from the same connection
        return


def _received(connection: Connection) -> Start | Stop | Gone:
    try:
        order = connection.recv()
    except (EOFError, OSError):
        return Gone()
    return order if isinstance(order, Start) else Stop()


async def _readable(connection: Connection) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection.fileno())
