"""Counts, bounds and eventually frees the front process's memory for callers, outside the arenas.

    arrive -> read the message -> arrived -> hold_reply -> run -> answered -> taken: release

A message in transit counts as the largest one allowed, because nobody knows how much of it the transport has;
once it has arrived, it counts at its size until the call is answered. A reply counts from before its call
runs until the transport has taken all of it, and counts twice: gRPC sends a copy and keeps the original. If
there is no room, a message waits a moment, and a call whose reply finds none is refused.

What gRPC takes of a call without anybody reading it is set aside (`front_limits.py`), but a reply counts with
it, because its call has left its place.

How grpc.aio behaves, as tested with 1.85: the batch of a unary reply completes, and with it the task of its
RPC, when the last byte has passed flow control or the stream ends. Until then nothing frees the reply: not
cancelling the task, nor `abort`, nor returning; a status waits behind the bytes. Only the client, or the end
of its connection, can end the stream: a caller that does not take a reply in time loses its connection. So
does one whose stream was given up with a frame in transit.

Slow callers give way once 70 % of the memory is in use, and one tenant gets at most three quarters, so that
others seldom find none.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import Message

from npugrad.codec import CHUNK_BYTES
from npugrad.errors import DeadlineExceeded, ServerBusy
from npugrad_server.rpc.connections import UnixConnections, end_connections
from npugrad_server.rpc.front_limits import FrontLimits as FrontLimits
from npugrad_server.rpc.refusals import RareLog
from npugrad_server.worker.memory import anonymous_bytes, give_back_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from npugrad_server.addresses import Address
    from npugrad_server.pool.tenant import Tenant
    from npugrad_server.rpc.rpc_call import RpcCall

REPLY_COPIES = 2
"""The original in Python, and gRPC's copy."""
_REPLY_OVERHEAD_BYTES = 16 * 1024
"""More than what surrounds the contents of most replies, plus what gRPC keeps of an RPC."""
_PATIENCE_S = 8.0
"""Seconds a message waits for room before its call is refused."""
_PRESSED_MESSAGE_S, _PRESSED_REPLY_S = 2.0, 5.0
"""Seconds a caller has to send its message, or to take its reply, while memory is short."""
_FAREWELL_S, _PRESSED_FAREWELL_S = 5.0, 1.0
"""Seconds the status of a stream may wait behind a frame that is not taken."""
_PRESSED_FROM = 0.7
"""Fraction of the memory in use from which on memory is short."""
_TENANT_PART = 0.75
"""Fraction of the memory that one tenant may have, so that others find some."""
_MOVED_PART = 0.5
"""Fraction of the memory for results that left their device's arena unread: other calls need some as well."""
_IDLE_BYTES, _LOOKS, _LOOK_S = 2**25, 20, 0.5
"""So many bytes that were in use at none of so many looks are given back."""
_TICK_S = 0.5
_ENDED_AT_ONCE = 16
"""Calls that are ended in one go: hundreds of them would hold up everybody's."""
_RETRY_AFTER_S = 0.5


class Waiter(NamedTuple):
    """A message that found no room.

    Attributes:
        call: Its call.
        nbytes: Bytes that it needs.
        since_s: When it arrived, on the monotonic clock.
    """

    call: RpcCall
    nbytes: int
    since_s: float


class FrontMemory:
    """Counts the memory that RPCs hold; used on the event loop only.

    Attributes:
        limits: The limits.
        requests_bytes: Bytes held by messages, including those in transit.
        replies_bytes: Bytes held by replies, from before their calls run, and by results that left an arena.
        moved_bytes: The part of `replies_bytes` that left an arena.
        refused: Calls that found no room, by what it was for: ``"request"``, ``"reply"`` or ``"slot"``.
        dropped: Callers that were too slow, by what they were slow with: ``"request"`` or ``"reply"``.
    """

    def __init__(self, limits: FrontLimits | None = None) -> None:
        self.limits = limits or FrontLimits()
        self._overhead_bytes = REPLY_COPIES * _REPLY_OVERHEAD_BYTES + self.limits.window_bytes
        self.requests_bytes = self.replies_bytes = self.moved_bytes = 0
        self.refused = {"request": 0, "reply": 0, "slot": 0}
        self.dropped = {"request": 0, "reply": 0}
        self._waiting: dict[asyncio.Future[None], Waiter] = {}
        self._held = Counter[str]()
        self._most_of_one = max(int(_TENANT_PART * self.limits.memory_bytes), self.limits.call_bytes)
        self._pressed_until_s, self._is_pressed, self._log = 0.0, False, RareLog()

    @property
    def used_bytes(self) -> int:
        """Bytes held now."""
        return self.requests_bytes + self.replies_bytes

    def arrive(self, call: RpcCall, nbytes: int) -> bool:
        """Takes room for a message to be read; returns False if there is none: then use `wait_for_room`."""
        if self._waiting or not self._has_room(call, nbytes):
            return False
        self._hold(call, nbytes, call.reply_bytes)
        return True

    def held_bytes(self, tenant: Tenant) -> int:
        """Bytes that a tenant's calls hold."""
        return self._held[tenant.name]

    def _has_room(self, call: RpcCall, nbytes: int) -> bool:
        if self.requests_bytes + self.replies_bytes + nbytes > self.limits.memory_bytes:
            return False
        return self._held[call.tenant.name] + nbytes <= self._most_of_one

    def _hold(self, call: RpcCall, request_bytes: int, reply_bytes: int) -> None:
        """The only place where counts change."""
        requests, replies = request_bytes - call.request_bytes, reply_bytes - call.reply_bytes
        self.requests_bytes += requests
        self.replies_bytes += replies
        call.request_bytes, call.reply_bytes = request_bytes, reply_bytes
        held, name = self._held, call.tenant.name
        held[name] += requests + replies
        if not held[name]:
            del held[name]  # there may be any number of tenants

    async def wait_for_room(self, call: RpcCall, nbytes: int) -> None:
        """Takes room for a message once there is some: the tenant that holds least is first, then first come.

        Raises:
            ServerBusy: QUEUE_FULL, there was none within some seconds.
        """
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[room] = Waiter(call, nbytes, time.monotonic())
        self._wake()
        try:
            await room
        finally:
            self._waiting.pop(room, None)

    def arrived(self, call: RpcCall, message: Any) -> None:
        """Counts what was read at its size: a message, or nothing that takes memory."""
        nbytes = len(message) if isinstance(message, bytes) else _message_bytes(message)
        self._hold(call, nbytes, call.reply_bytes)
        call.reading_s = None
        self._wake()

    def hold_reply(self, call: RpcCall, nbytes: int) -> None:
        """Takes room for a reply before it exists.

        Raises:
            ServerBusy: QUEUE_FULL, there is none.
        """
        held = REPLY_COPIES * nbytes + self._overhead_bytes
        if nbytes > self.limits.message_bytes:
            return  # there will be no such reply
        if not self._has_room(call, held):
            raise self._refusal("reply", call, held)
        self._hold(call, call.request_bytes, held)

    def uploaded(self, call: RpcCall, nbytes: int) -> None:
        """All frames of an upload have arrived; the reply will hold one frame at a time, which is less."""
        held = REPLY_COPIES * min(nbytes, CHUNK_BYTES) + self._overhead_bytes
        self._hold(call, 0, held)
        self._wake()

    def move(self, call: RpcCall, nbytes: int) -> bool:
        """Takes room for results to leave their device's arena unread; returns False if there is none."""
        is_much = self.moved_bytes + nbytes > _MOVED_PART * self.limits.memory_bytes
        if is_much or not self._has_room(call, nbytes):
            return False
        self.moved_bytes += nbytes
        self._hold(call, call.request_bytes, call.reply_bytes + nbytes)
        return True

    def forget_moved(self, call: RpcCall, nbytes: int) -> None:
        """Releases the room of moved results that were sent or given up."""
        self.moved_bytes -= nbytes
        self._hold(call, call.request_bytes, call.reply_bytes - nbytes)
        self._wake()

    def answered(self, call: RpcCall, answer: Any) -> None:
        """The handler returned the reply of a unary call; its message no longer counts.

        Raises:
            ServerBusy: QUEUE_FULL, no room was taken for the reply, and there is none.
        """
        if not call.reply_bytes:
            self.hold_reply(call, answer.ByteSize())
        self._hold(call, 0, call.reply_bytes)
        call.answered_s = time.monotonic()

    def failed(self, call: RpcCall) -> None:
        """The call gets a status instead of a reply; in a stream, a frame may still be waiting before it."""
        if call.is_slow is None or not call.reply_bytes:
            self.release(call)
        elif call.answered_s is None:
            call.answered_s = time.monotonic()

    def release(self, call: RpcCall) -> None:
        """The RPC is over, and its reply was taken or given up."""
        self._hold(call, 0, 0)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            room, waiter = min(self._waiting.items(), key=self._share)
            if not room.done():
                if not self._has_room(waiter.call, waiter.nbytes):
                    return
                self._hold(waiter.call, waiter.nbytes, waiter.call.reply_bytes)
                room.set_result(None)
            del self._waiting[room]

    def _share(self, item: tuple[asyncio.Future[None], Waiter]) -> float:
        """What its tenant holds, divided by its weight: nobody waits behind all messages of another."""
        tenant = item[1].call.tenant
        return self._held[tenant.name] / tenant.weight

    def _refusal(self, what: str, call: RpcCall, nbytes: int) -> ServerBusy:
        self.refused[what] += 1
        self._pressed_until_s = time.monotonic() + _PATIENCE_S
        return ServerBusy(
            f"{call.operator or call.method}: no memory for a {what} of {nbytes} bytes now: "
            f"{self.used_bytes} of {self.limits.memory_bytes} bytes are in use, and one tenant gets at most "
            "three quarters (setting front_memory_bytes)",
            retry_after_s=_RETRY_AFTER_S,
            operator=call.operator,
        )

    # ------------------------------------------------------------------------- those that are too slow

    async def watch(self, calls: Callable[[], Iterable[RpcCall]], *addresses: Address) -> None:
        """Ends calls that are too slow, until cancelled.

        Args:
            calls: The RPCs in progress, also those of other memory.
            addresses: The server's own.
        """
        unix = UnixConnections()
        while True:
            await asyncio.sleep(_TICK_S)
            peers = self.tick([call for call in calls() if call.memory is self], time.monotonic())
            paths = {address.path for address in addresses if address.path and str(address) in peers}
            if not paths:
                unix.forget()
            else:
                await asyncio.to_thread(unix.end_unread, paths, time.monotonic(), is_short=self._is_pressed)
            for port in {address.port for address in addresses if not address.path} if peers else ():
                await asyncio.to_thread(end_connections, peers, port)

    def tick(self, calls: Iterable[RpcCall], now_s: float) -> set[str]:
        """Ends messages that take too long, and refuses those that have waited too long for room.

        Args:
            calls: The RPCs in progress.
            now_s: Time on the monotonic clock.

        Returns:
            Peers that did not take a reply in time.
        """
        left = _ENDED_AT_ONCE
        pressed = bool(self._waiting) or now_s < self._pressed_until_s
        pressed = pressed or self.used_bytes > _PRESSED_FROM * self.limits.memory_bytes
        self._is_pressed = pressed
        peers = set()
        for call in calls:
            if call.answered_s is not None:
                if now_s - call.answered_s > self._reply_s(call, pressed):
                    peers.add(call.peer)
                    self._drop("reply", call, now_s - call.answered_s)
            elif not left or call.failure is not None:
                continue
            elif call.is_slow is not None:
                if pressed and call.is_slow():
                    left -= 1
                    self._drop("reply" if call.reply_bytes else "request", call, now_s - call.marks[0][1])
                    call.end(_slow(call))
            elif call.reading_s is not None:
                left -= self._end_late(call, now_s - call.reading_s, pressed)
        left = _ENDED_AT_ONCE  # apart from those above, whose end makes room
        for room, waiter in self._waiting.items():
            if left and not room.done() and now_s - waiter.since_s > _PATIENCE_S:
                room.set_exception(self._refusal("request", waiter.call, waiter.nbytes))
                left -= 1
        return peers

    def _reply_s(self, call: RpcCall, pressed: bool) -> float:
        if call.is_slow is not None:
            return _PRESSED_FAREWELL_S if pressed else _FAREWELL_S
        return _PRESSED_REPLY_S if pressed else self.limits.reply_timeout_s

    def _end_late(self, call: RpcCall, seconds: float, pressed: bool) -> bool:
        if seconds <= (_PRESSED_MESSAGE_S if pressed else self.limits.upload_timeout_s):
            return False
        self._drop("request", call, seconds)
        text = f"{call.method}: the request had not arrived completely after {seconds:.1f} s"
        call.end(
            ServerBusy(f"{text}, and memory is short", retry_after_s=1.0)
            if pressed
            else DeadlineExceeded(text)
        )
        return True

    def _drop(self, what: str, call: RpcCall, seconds: float) -> None:
        if call.is_untaken:
            return  # its connection takes a moment to end
        call.is_untaken = what == "reply"
        self.dropped[what] += 1
        self._log.warn(
            (what, call.tenant.shown),
            f"{what} too slow",
            time.monotonic(),
            method=call.method,
            peer=call.peer,
            request_id=call.request_id,
            held_bytes=call.request_bytes + call.reply_bytes,
            seconds=round(seconds, 3),
        )


def _message_bytes(message: Any) -> int:
    return message.ByteSize() if isinstance(message, Message) else 0


def _slow(call: RpcCall) -> ServerBusy:
    name = call.operator or call.method
    text = f"{name}: the stream is slower than the minimum rate, and memory is short"
    return ServerBusy(text, retry_after_s=1.0, operator=call.operator)


async def keep_giving_back(used_bytes: Callable[[], int]) -> None:
    """Until cancelled, gives freed memory back once more than 32 MiB of it was not needed for 10 s.

    Args:
        used_bytes: Tells how much of it callers use.
    """
    first_bytes = anonymous_bytes()
    while True:
        most_bytes = 0
        for _ in range(_LOOKS):
            await asyncio.sleep(_LOOK_S)
            most_bytes = max(most_bytes, used_bytes())
        if anonymous_bytes() - first_bytes - most_bytes > _IDLE_BYTES:
            await asyncio.to_thread(give_back_freed_memory)
