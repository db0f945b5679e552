"""The unsent part of a streamed reply, which leaves its device's arena when others wait for room there.

Results stay in the output arena of their device until the client has taken them, which may take long or never
happen. While nobody needs the room, that costs nothing. Otherwise the rest of the reply is copied into front
memory, as far as there is room, and the call's bytes in both arenas are given back.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import threading
from typing import TYPE_CHECKING, Any

from npugrad.codec import CHUNK_BYTES
from npugrad.errors import ServerBusy
from npugrad.frames import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from npugrad_server.pool import Ticket
    from npugrad_server.rpc.rpc_call import RpcCall

_RETRY_AFTER_S = 1.0


class UnsentReply:
    """The unsent frames of one reply; a context manager around sending them.

    Concurrency: for the task that sends them; `give_way` is called by others on the same loop.
    """

    def __init__(
        self,
        frames: Iterator[Any],
        nbytes: int,
        ticket: Ticket,
        call: RpcCall,
        end_if_slow: Callable[[ServerBusy], bool],
    ) -> None:
        """Nothing is sent yet.

        Args:
            frames: All frames; their chunks are views of the arena.
            nbytes: Length of all chunks.
            ticket: The call; closed once its results have left the arena.
            call: The RPC; its memory counts what leaves the arena.
            end_if_slow: Ends the call with an error if its client is slow; returns whether it did.
        """
        self._frames, self._nbytes, self._ticket = frames, nbytes, ticket
        self._call, self._end_if_slow = call, end_if_slow
        self._moved_bytes = 0
        self._moving: asyncio.Task[None] | None = None

    def __enter__(self) -> UnsentReply:
        """From now on, others may need its room."""
        self._ticket.give_way = self.give_way
        return self

    def __exit__(self, *error: object) -> None:
        """The reply was sent or given up."""
        self._ticket.give_way = None
        if self._moving is not None:
            self._moving.cancel()
            asyncio.get_running_loop().run_in_executor(None, self._copy.close)
        if self._moved_bytes:
            self._call.memory.forget_moved(self._call, self._moved_bytes)

    async def next(self) -> Any:
        """The next frame; None after the last one."""
        if self._moving is not None:
            await self._moving
        frame = next(self._frames, None)
        if isinstance(frame, Chunk):
            self._nbytes -= len(frame.data)
        return frame

    def give_way(self, _: float = math.inf) -> bool:
        """Others wait for its room; returns whether it will be free soon."""
        if self._moving is not None:
            return True
        if self._call.memory.move(self._call, self._nbytes):
            self._moved_bytes = self._nbytes
            self._copy = _Copy(self._nbytes)
            self._moving = asyncio.ensure_future(self._move())
            return True
        planned = self._ticket.planned
        text = f"{planned.plan.record.name}: found its results unread while other calls wait for memory"
        return self._end_if_slow(
            ServerBusy(text, retry_after_s=_RETRY_AFTER_S, operator=planned.plan.record.name)
        )

    async def _move(self) -> None:
        self._frames = iter(await asyncio.to_thread(self._copy.of, self._frames))
        self._ticket.close()


class _Copy:
    """Separate memory for the contents of frames.

    It is not on the heap: there the memory of a large reply is returned whenever something behind it is
    freed, by whoever frees that, which blocks the event loop for as long as hundreds of MiB take.

    Concurrency: `of` and `close` are for threads other than the event loop's.
    """

    def __init__(self, nbytes: int) -> None:
        """Maps this many bytes, none of which is backed yet."""
        self._map = mmap.mmap(-1, max(1, nbytes))
        self._views: list[memoryview] = []
        self._lock, self._is_over = threading.Lock(), False

    def of(self, frames: Iterator[Any]) -> list[Any]:
        """Copies the frames' contents here and returns the frames; not all of them once it is closed."""
        copied, end = [], 0
        for frame in frames:
            with self._lock:
                if self._is_over:
                    break
                if isinstance(frame, Chunk):
                    start, end = end, end + len(frame.data)
                    view = memoryview(self._map)[start:end]
                    view[:] = frame.data
                    self._views.append(view)
                    copied.append(Chunk(frame.operand, frame.offset, view))
                else:
                    copied.append(frame)
        return copied

    def close(self) -> None:
        """Releases the memory in steps, because that holds the interpreter lock; no frame may be in use."""
        with self._lock:
            self._is_over = True
        for view in self._views:
            view.release()
        for start in range(0, len(self._map), CHUNK_BYTES):
            self._map.madvise(mmap.MADV_DONTNEED, start, min(CHUNK_BYTES, len(self._map) - start))
        self._map.close()
