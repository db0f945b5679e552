"""The channel to a server on an event loop: what `_transport` does, without blocking the loop.

No step on the loop is longer than the copy of one chunk: larger calls are streamed, and their frames are
made and read one at a time, straight from the operands and into the results.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from npugrad_client._channels import (
    LARGEST_UNARY_BYTES,
    REFUSAL_WAIT_S,
    STREAM_FROM_BYTES,
    Stubs,
    channel_options,
    check_target,
    closed,
    grpc_timeout,
)
from npugrad_client._frames import read_frames_async, read_response, request_frames_async, unary_request
from npugrad_client.errors import Cancelled, translate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_client._call import Answer, Prepared


class AsyncTransport:
    """One channel to one target, opened by the first call in the loop of that call.

    Concurrency: every method may be called by any number of tasks of one loop at once. A transport whose
    loop has ended, as that of `asyncio.run` does, opens another channel in the next one.
    """

    def __init__(self, target: str, stream_from_bytes: int = STREAM_FROM_BYTES) -> None:
        """Remembers the target; raises TypeError or ValueError for what is none."""
        check_target(target)
        self.target = target
        self._stream_from_bytes = min(stream_from_bytes, LARGEST_UNARY_BYTES)
        self._is_closed = False
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._channel: Any = None
        self._open_stubs: Stubs | None = None

    async def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        self._is_closed = True
        channel, self._channel, self._open_stubs = self._channel, None, None
        if channel is not None and self._home == (os.getpid(), asyncio.get_running_loop()):
            await channel.close(grace=None)

    async def ask(self, service: str, request: Any, timeout_s: float | None) -> Any:
        """One of the small services: `validate`, `server_info` or `list_operators`; errors as in `run`."""
        with self._calling(service, timeout_s) as timeout:
            return await self._stubs().services[service](request, timeout=timeout)

    async def run(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        """Runs a call, streamed or not by its size; cancelling the task cancels the call.

        Raises:
            NpugradError: What the server answered, or that it did not; its message names the target.
            RuntimeError: The client is closed, or belongs to another running loop.
        """
        send = self._streamed if prepared.nbytes >= self._stream_from_bytes else self._unary
        with self._calling(prepared.spec.name, timeout_s) as timeout:
            return await send(prepared, timeout)

    def _was_closed(self) -> bool:
        return self._is_closed

    def _stubs(self) -> Stubs:
        """The stubs of this process and loop; grpc's channels belong to one of each."""
        home = (os.getpid(), asyncio.get_running_loop())
        if self._open_stubs is None or self._home != home:
            if self._home is not None and self._home[0] == home[0] and self._home[1].is_running():
                raise RuntimeError(
                    f"found the client for {self.target} in use by another event loop; expected one "
                    "AsyncClient for each loop"
                )
            self._home = home
            self._channel = grpc.aio.insecure_channel(self.target, options=channel_options(self.target))
            self._open_stubs = Stubs(self._channel)
        return self._open_stubs

    @contextmanager
    def _calling(self, what: str, timeout_s: float | None) -> Iterator[float | None]:
        """Looks at client and timeout before a call, and turns what grpc raises into errors of ours."""
        if self._was_closed():
            raise closed(self.target)
        timeout = grpc_timeout(timeout_s, what)
        try:
            yield timeout
        except grpc.RpcError as error:
            raise translate(error, what, self.target, timeout_s) from None
        except asyncio.CancelledError:
            if self._was_closed() and not _is_cancelled():
                raise Cancelled(f"{what}: {self.target}: the client was closed") from None
            raise

    async def _unary(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        method = self._stubs().unary(prepared.spec)
        return read_response(prepared, await method(unary_request(prepared), timeout=timeout_s))

    async def _streamed(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        ended = asyncio.Event()

        async def is_answered() -> bool:
            try:
                await asyncio.wait_for(ended.wait(), REFUSAL_WAIT_S)
            except asyncio.TimeoutError:  # the builtin one from Python 3.11 on
                return False
            return True

        frames = request_frames_async(prepared, is_answered)
        stream = self._stubs().execute(frames, timeout=timeout_s)
        stream.add_done_callback(lambda _: ended.set())
        try:
            return await read_frames_async(prepared, stream)
        finally:
            stream.cancel()  # no effect after a complete answer; frees the stream when ours was refused


def _is_cancelled() -> bool:
    """Whether somebody cancelled the current task; Python 3.10 cannot tell."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return bool(cancelling and cancelling())
