"""Channels to the servers on an event loop: does what `_transport` does, without blocking the loop.

No step on the loop takes longer than copying 2 MiB: larger calls are streamed, and their frames are made and
read one at a time, directly from the operands and into the results.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, cast

import grpc

from npugrad.registry import REGISTRY, Registry
from npugrad_client._channels import REFUSAL_WAIT_S, Stubs, check_fork, closed
from npugrad_client._frames import read_frames_async, request_frames_async, server_stages
from npugrad_client._older import lacking, lacks_operator, version_question
from npugrad_client._picker import Picker
from npugrad_client._progress import reported_async
from npugrad_client._retry import Launch, RetryBudget
from npugrad_client._rpcs import VERSION, Call, Query, begin, note_too_large
from npugrad_client._transport import open_channel
from npugrad_client.errors import Cancelled, ClientUnusable, NpugradError, translate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from npugrad.v1.backward_pb2 import ExecuteResponse
    from npugrad_client._attempt import Attempt
    from npugrad_client._call import Answer, Prepared
    from npugrad_client._channels import Settings
    from npugrad_client._clock import CallClock
    from npugrad_client._retry import RetrySchedule
    from npugrad_client._rpcs import Rpc

_WRITE_ENDED = "Internal error from Core"
_STATUS_WAITS, _STATUS_WAIT_S = 10, 0.5
"""How often, and how long each time, to wait for the status of a stream that is known to have ended.

grpc's core already has the status then, and delivers it within a few turns of the loop, a few milliseconds in
all. The wait is limited, so that a bug in grpc cannot block a call forever, and split, because a stalled loop
uses up no more than one of the waits.
"""
_OPEN: weakref.WeakSet[_Home] = weakref.WeakSet()
"""Homes with open channels: a forked process that inherits one cannot use asynchronous channels."""


class _Home:
    """The channels of one process and one loop, to which grpc binds them."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop, registry: Registry) -> None:
        self.process, self.loop = os.getpid(), loop
        self._settings, self._registry = settings, registry
        self._tls = settings.tls
        self._stubs: dict[int, Stubs] = {}
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()
        self.closing = asyncio.Event()

    def stubs(self, server: int) -> Stubs:
        """Returns the stubs of a server's channel, opened at the first call and after certificates change.

        A replaced channel closes when the last call that uses its stubs is over.
        """
        found = self._stubs.get(server)
        if found is None or (self._tls is not None and found.pem is not self._tls.current()):
            found = self._stubs[server] = open_channel(grpc.aio, self._settings, server, self._registry)
            self._channels.add(found.channel)
            _OPEN.add(self)
        return found

    def give_up(self, server: int, stubs: Stubs | None) -> None:
        """Opens a new channel for the next call, if the given one is still used; calls on it go on."""
        if stubs is not None and self._stubs.get(server) is stubs:
            del self._stubs[server]

    async def close(self) -> None:
        self.closing.set()
        self._stubs = {}
        for channel in list(self._channels):
            await channel.close(grace=None)
        _OPEN.discard(self)


class AsyncTransport:
    """Channels to one or several servers, opened by the first call in its loop.

    Concurrency: every method may be called by any number of tasks of one loop at once. After its loop has
    ended, as with `asyncio.run`, a transport opens new channels in the next one.
    """

    def __init__(self, settings: Settings, registry: Registry = REGISTRY) -> None:
        """Stores the settings; nothing is opened before the first call."""
        self._settings, self._registry = settings, registry
        self._stream_from_bytes = [settings.stream_from_bytes] * len(settings.targets)
        self._picker = Picker(len(settings.targets))
        self._budget = RetryBudget(settings.retry)
        self._is_closed = False
        self._home: _Home | None = None

    async def close(self) -> None:
        """Closes the channels; calls in flight are cancelled."""
        self._is_closed = True
        home, self._home = self._home, None
        if home is not None and (home.process, home.loop) == (os.getpid(), asyncio.get_running_loop()):
            await home.close()

    async def ask(self, service: str, request: Any, timeout_s: float | None) -> Any:
        """Queries `validate`, `server_info` or `list_operators`; errors as in `run`."""
        return (await self._follow(Query(service, request), timeout_s))[0]

    async def run(
        self, prepared: Prepared, timeout_s: float | None, clock: CallClock, progress: Any = False
    ) -> Answer:
        """Runs a call, streamed or not by its size; cancelling the task cancels the call.

        Raises:
            NpugradError: The server answered with an error or not at all; the message names the target.
            ClientUnusable: The client is closed, or belongs to another running loop.
            WrongType: `progress` has the wrong type.
        """
        call = Call(prepared, self._settings, clock)
        if progress:
            answer, tries = await reported_async(call, progress, lambda: self._follow(call, timeout_s))
        else:
            answer, tries = await self._follow(call, timeout_s)
        return cast("Answer", answer if tries == 1 else answer.after(tries))

    def _here(self) -> _Home:
        """The channels of this process and loop."""
        if self._was_closed():
            raise closed(self._settings.name)
        process, loop, home = os.getpid(), asyncio.get_running_loop(), self._home
        if home is not None and (home.process, home.loop) == (process, loop):
            return home
        if home is not None and home.process == process and home.loop.is_running():
            raise ClientUnusable(
                f"the client for {self._settings.name} is in use by another event loop; make one "
                "AsyncClient for each loop"
            )
        check_fork()
        if any(other.process != process for other in list(_OPEN)):
            raise ClientUnusable(
                "this process was forked while an AsyncClient was open, so gRPC's asynchronous side would "
                "crash; close the client before the fork, start the process with spawn, "
                "or use a Client"
            )
        self._home = _Home(self._settings, loop, self._registry)
        return self._home

    def _was_closed(self) -> bool:
        return self._is_closed

    async def _follow(self, rpc: Rpc, timeout_s: float | None) -> tuple[Any, int]:
        """Follows a schedule to its end; returns the answer and the number of tries."""
        home = self._here()
        schedule = begin(self._settings, self._budget, self._picker, rpc.what, timeout_s)
        is_alone = self._settings.retry.hedge_after_s is None
        try:
            return await (self._alone if is_alone else self._race)(home, schedule, rpc), schedule.tries
        finally:
            schedule.abandon(time.monotonic())

    async def _alone(self, home: _Home, schedule: RetrySchedule, rpc: Rpc) -> Any:
        """Makes one try after the other, in this task."""
        while True:
            step = schedule.next(time.monotonic())
            if not isinstance(step, Launch):
                await self._pause(home, rpc.what, step.until)
                continue
            try:
                answer = await self._try(home, step, rpc)
            except NpugradError as error:
                schedule.failed(step.number, error, time.monotonic())
            else:
                schedule.answered(step.number, time.monotonic())
                return answer

    async def _pause(self, home: _Home, what: str, until: float | None) -> None:
        pause_s = max(0.0, (until or 0.0) - time.monotonic())
        with suppress(asyncio.TimeoutError):  # the builtin one from Python 3.11 on
            await asyncio.wait_for(home.closing.wait(), pause_s)
        if self._was_closed():
            raise Cancelled(f"{what}: {self._settings.name}: the client was closed before the next try")

    async def _race(self, home: _Home, schedule: RetrySchedule, rpc: Rpc) -> Any:
        """Makes tries that may overlap, each in its own task; cancels the losers."""
        flying: dict[asyncio.Task[Any], int] = {}
        try:
            while True:
                step = schedule.next(time.monotonic())
                if isinstance(step, Launch):
                    flying[asyncio.ensure_future(self._try(home, step, rpc))] = step.number
                    continue
                if not flying:
                    await self._pause(home, rpc.what, step.until)
                    continue
                wait_s = None if step.until is None else max(0.0, step.until - time.monotonic())
                ended, _ = await asyncio.wait(flying, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(ended, key=_is_failed):  # an answer wins over failures at the same time
                    number = flying.pop(task)
                    error = task.exception()
                    if error is None:
                        schedule.answered(number, time.monotonic())
                        return task.result()
                    if not isinstance(error, NpugradError):
                        raise error
                    if schedule.failed(number, error, time.monotonic()):
                        break
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    async def _try(self, home: _Home, step: Launch, rpc: Rpc) -> Any:
        attempt = self._settings.attempt(rpc.what, rpc.operator, step)
        attempt.is_streamed = rpc.is_too_large or rpc.nbytes >= self._stream_from_bytes[step.server]
        if rpc.clock is not None:
            rpc.clock.begin_try(attempt)
        if self._was_closed():
            raise closed(self._settings.name)
        try:
            return await self._carry(home, step.server, rpc, attempt)
        except NpugradError as error:
            attempt.fail(error)
            note_too_large(rpc, error, self._stream_from_bytes, step.server)
            if not lacks_operator(error, attempt):
                raise
            refusal = error.with_traceback(None)
        info, question = None, version_question(attempt)
        with suppress(NpugradError):
            info = await self._carry(home, step.server, VERSION, question)
        raise lacking(refusal, attempt, info)

    async def _carry(self, home: _Home, server: int, rpc: Rpc, attempt: Attempt) -> Any:
        """Sends an RPC to a server and reads the reply; translates grpc's exceptions to ours."""
        try:
            stubs = home.stubs(server)
            attempt.carried_by(stubs)
            if attempt.is_streamed and isinstance(rpc, Call):
                return await _streamed(stubs, rpc.streamed(), attempt, rpc.clock)
            request = rpc.encode()
            attempt.packed_s = time.monotonic()
            reply = await rpc.method(stubs)(request, timeout=attempt.timeout_s, metadata=attempt.metadata)
            attempt.received_s = time.monotonic()
            attempt.hear()
            return rpc.read(reply, attempt)
        except grpc.RpcError as error:
            translated = translate(error, attempt, is_ours=self._was_closed(), records=self._registry.records)
            home.give_up(server, attempt.silent(translated))
            raise translated from None
        except asyncio.CancelledError:
            if self._was_closed() and not _is_cancelled():
                raise Cancelled(f"{attempt.what}: {attempt.target}: the client was closed") from None
            raise
        finally:
            attempt.stubs = None  # what remains of a try keeps no channel open


class _Stream:
    """The replies of a stream, and the status with which the server ended it.

    If a stream ends while it is being written, grpc.aio replaces the status by an internal error, sometimes
    before the status arrives and sometimes after, so that a refusal would look like a lost server. Each of
    the two runs the done callbacks, so they see both.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._status: grpc.aio.AioRpcError | None = None
        self.ended, self._told = asyncio.Event(), asyncio.Event()
        stream.add_done_callback(self._note)

    def _note(self, stream: Any) -> None:
        self.ended.set()
        parts = (stream.code(), stream.initial_metadata(), stream.trailing_metadata(), stream.details())
        status = grpc.aio.AioRpcError(*(_at_once(part) for part in parts))
        if not _is_write_ended(status):
            self._status = status
            self._told.set()

    async def replies(self) -> AsyncGenerator[ExecuteResponse, None]:
        """Yields the frames; raises `grpc.RpcError` unless the server ended the stream successfully."""
        try:
            async for frame in self._stream:
                yield frame
        except grpc.aio.AioRpcError as error:
            if _is_write_ended(error):
                await self._wait_for_status()
            status = self._status or error
        else:
            return
        if status.code() is not grpc.StatusCode.OK:
            raise status

    async def _wait_for_status(self) -> None:
        for _ in range(_STATUS_WAITS):
            with suppress(asyncio.TimeoutError):  # the builtin one from Python 3.11 on
                await asyncio.wait_for(self._told.wait(), _STATUS_WAIT_S)
                return

    async def trailing_metadata(self) -> Any:
        return await self._stream.trailing_metadata()

    def cancel(self) -> None:
        self._stream.cancel()


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that need not wait; grpc offers no other way to the status."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("found a status that has to be waited for; expected the one of an ended stream")


def _is_write_ended(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _WRITE_ENDED


async def _streamed(stubs: Stubs, prepared: Prepared, attempt: Attempt, clock: CallClock | None) -> Answer:
    async def is_answered() -> bool:
        try:
            await asyncio.wait_for(stream.ended.wait(), REFUSAL_WAIT_S)
        except asyncio.TimeoutError:  # the builtin one from Python 3.11 on
            return False
        return True

    frames = request_frames_async(prepared, is_answered, attempt)
    stream = _Stream(stubs.execute(frames, timeout=attempt.timeout_s, metadata=attempt.metadata))
    try:
        async with aclosing(stream.replies()) as replies:
            answer = await read_frames_async(prepared, replies, attempt, clock)
        attempt.stages = server_stages(await stream.trailing_metadata())
    finally:
        stream.cancel()  # no effect after a complete answer; frees the stream otherwise
    prepared.note_streamed()
    return answer


def _is_failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


def _is_cancelled() -> bool:
    """Whether somebody cancelled the current task; Python 3.10 cannot tell."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return bool(cancelling and cancelling())
