"""What callers make the front process hold outside of the arenas: counted, bounded, and given up in the end.

    arrive -> read the message -> arrived -> hold_reply -> run -> answered -> taken: release

A message that is on its way counts as the largest one there may be, for nobody knows how much of it the
transport has; once it is there it counts as what it is, until the call is answered. A reply counts from
before its call runs until the transport took all of it, twice: gRPC sends a copy, and keeps the original
beside it. There is room for all of that, or the call waits a moment (a message) or is refused (a reply).

What is true of grpc.aio, tried with 1.85: the batch of a unary reply completes, and with it the task of its
RPC ends, when the last byte has passed flow control, or the stream ends. Until then nothing frees the reply:
not cancelling the task, nor `abort`, nor returning; a status waits behind the bytes. Only the client can end
the stream, or the end of its connection: a reply that is not taken in time costs the caller that. So does
one of a stream that was given up with a frame on its way.

Who is slow gives way once 70 % are held, and one tenant has three quarters at most, so that others seldom
find none.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import Message

from npugrad.codec import CHUNK_BYTES
from npugrad.errors import DeadlineExceeded, ServerBusy
from npugrad_server.config import LEAST_MESSAGE_BYTES, MESSAGES_PER_CALL
from npugrad_server.logs import get_logger
from npugrad_server.machine import memory_bytes
from npugrad_server.rpc.connections import end_connections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from npugrad_server.config import ServerSettings
    from npugrad_server.pool.tenant import Tenant
    from npugrad_server.rpc.rpc_call import RpcCall

REPLY_COPIES = 2
"""The original in Python, and gRPC's copy."""
_REPLY_OVERHEAD_BYTES = 16 * 1024
"""More than what is around the contents of most replies, and what gRPC keeps of an RPC."""
_PATIENCE_S = 8.0
"""How long a message waits for room before its call is refused."""
_PRESSED_MESSAGE_S, _PRESSED_REPLY_S = 2.0, 5.0
"""Seconds that a caller has to send its message, or to take its reply, while memory is short."""
_FAREWELL_S, _PRESSED_FAREWELL_S = 5.0, 1.0
"""Seconds that the status of a stream may wait behind a frame that is not taken."""
_PRESSED_FROM = 0.7
"""Part of the memory from which on it is short."""
_TENANT_PART = 0.75
"""Of the memory for one tenant, so that others find some."""
_MOVED_PART = 0.5
"""Of the memory for results that left their device's arena unread: the other calls need some as well."""
_TICK_S = 0.5
_RETRY_AFTER_S = 0.5
_MOST_BYTES = 4 * 2**30
"""No machine is so large that its callers should have more by default."""


@dataclass(frozen=True)
class FrontLimits:
    """What the front process may hold.

    Attributes:
        memory_bytes: Messages and replies together.
        message_bytes: The largest message there may be.
        calls: RPCs at once.
        upload_timeout_s: Seconds that a message may take to come.
        reply_timeout_s: Seconds that a reply may take to be taken.
    """

    memory_bytes: int = 2**63
    message_bytes: int = LEAST_MESSAGE_BYTES
    calls: int = 2**31
    upload_timeout_s: float = 60.0
    reply_timeout_s: float = 60.0

    @classmethod
    def of(cls, settings: ServerSettings) -> FrontLimits:
        """Those of a server; the default for memory is a part of the machine's."""
        largest = int(settings.max_message_bytes)
        sensible = max(min(memory_bytes() // 8, _MOST_BYTES), MESSAGES_PER_CALL * largest)
        return cls(
            memory_bytes=int(settings.front_memory_bytes or sensible),
            message_bytes=largest,
            calls=settings.max_calls,
            upload_timeout_s=settings.upload_idle_timeout_s,
            reply_timeout_s=settings.unary_reply_timeout_s,
        )

    @property
    def call_bytes(self) -> int:
        """What the largest unary call takes."""
        return MESSAGES_PER_CALL * self.message_bytes

    def incoming_bytes(self, *, is_streamed: bool) -> int:
        """What a message counts as while it comes: of a stream a frame, whose header is small."""
        return min(self.message_bytes, LEAST_MESSAGE_BYTES) if is_streamed else self.message_bytes


class Waiter(NamedTuple):
    """A message that found no room.

    Attributes:
        call: Whose it is.
        nbytes: What it needs.
        since_s: When it came, on the monotonic clock.
    """

    call: RpcCall
    nbytes: int
    since_s: float


class FrontMemory:
    """Counts what RPCs hold; used on the event loop only.

    Attributes:
        limits: What they may hold.
        requests_bytes: Held by messages, those on their way included.
        replies_bytes: Held by replies, from before their calls run; with those that left an arena.
        moved_bytes: Of them, those that left an arena.
        refused: Calls that found no room, by what for: ``"request"``, ``"reply"`` or ``"slot"``.
        dropped: Callers that were too slow, by what with: ``"request"`` or ``"reply"``.
    """

    def __init__(self, limits: FrontLimits | None = None) -> None:
        self.limits = limits or FrontLimits()
        self.requests_bytes = self.replies_bytes = self.moved_bytes = 0
        self.refused = {"request": 0, "reply": 0, "slot": 0}
        self.dropped = {"request": 0, "reply": 0}
        self._waiting: dict[asyncio.Future[None], Waiter] = {}
        self._held = Counter[str]()
        self._most_of_one = max(int(_TENANT_PART * self.limits.memory_bytes), self.limits.call_bytes)
        self._pressed_until_s = 0.0

    @property
    def used_bytes(self) -> int:
        """What is held now."""
        return self.requests_bytes + self.replies_bytes

    def arrive(self, call: RpcCall, nbytes: int) -> bool:
        """Takes room for a message that is to be read; whether there was any: else `wait_for_room`."""
        if self._waiting or not self._has_room(call, nbytes):
            return False
        self._hold(call, nbytes, call.reply_bytes)
        return True

    def held_bytes(self, tenant: Tenant) -> int:
        """What a tenant's calls hold."""
        return self._held[tenant.name]

    def _has_room(self, call: RpcCall, nbytes: int) -> bool:
        if self.requests_bytes + self.replies_bytes + nbytes > self.limits.memory_bytes:
            return False
        return self._held[call.tenant.name] + nbytes <= self._most_of_one

    def _hold(self, call: RpcCall, request_bytes: int, reply_bytes: int) -> None:
        """The one place where counts change."""
        requests, replies = request_bytes - call.request_bytes, reply_bytes - call.reply_bytes
        self.requests_bytes += requests
        self.replies_bytes += replies
        call.request_bytes, call.reply_bytes = request_bytes, reply_bytes
        held, name = self._held, call.tenant.name
        held[name] += requests + replies
        if not held[name]:
            del held[name]  # there may be any number of tenants

    async def wait_for_room(self, call: RpcCall, nbytes: int) -> None:
        """Takes room for a message as soon as there is some: whose tenant holds least, then first come.

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
        """What was read is there: a message, or nothing that has to be held."""
        nbytes = len(message) if isinstance(message, bytes) else _message_bytes(message)
        self._hold(call, nbytes, call.reply_bytes)
        call.reading_s = None
        self._wake()

    def hold_reply(self, call: RpcCall, nbytes: int) -> None:
        """Takes room for a reply, before it is there.

        Raises:
            ServerBusy: QUEUE_FULL, there is none.
        """
        held = REPLY_COPIES * (nbytes + _REPLY_OVERHEAD_BYTES)
        if nbytes > self.limits.message_bytes:
            return  # there will be no such reply
        if not self._has_room(call, held):
            raise self._refusal("reply", call, held)
        self._hold(call, call.request_bytes, held)

    def uploaded(self, call: RpcCall, nbytes: int) -> None:
        """All frames of a stream have come; of its reply it will hold one at a time, which is less."""
        held = REPLY_COPIES * (min(nbytes, CHUNK_BYTES) + _REPLY_OVERHEAD_BYTES)
        self._hold(call, 0, held)
        self._wake()

    def move(self, call: RpcCall, nbytes: int) -> bool:
        """Takes room for results that are to leave their device's arena unread, if there is some for such."""
        is_much = self.moved_bytes + nbytes > _MOVED_PART * self.limits.memory_bytes
        if is_much or not self._has_room(call, nbytes):
            return False
        self.moved_bytes += nbytes
        self._hold(call, call.request_bytes, call.reply_bytes + nbytes)
        return True

    def forget_moved(self, call: RpcCall, nbytes: int) -> None:
        """Results that were moved were sent or given up."""
        self.moved_bytes -= nbytes
        self._hold(call, call.request_bytes, call.reply_bytes - nbytes)
        self._wake()

    def answered(self, call: RpcCall, answer: Any) -> None:
        """The handler returned the reply of a unary call; its message is not held any more.

        Raises:
            ServerBusy: QUEUE_FULL, no room was taken for the reply, and there is none.
        """
        if not call.reply_bytes:
            self.hold_reply(call, answer.ByteSize())
        self._hold(call, 0, call.reply_bytes)
        call.answered_s = time.monotonic()

    def failed(self, call: RpcCall) -> None:
        """The call gets a status in place of a reply; of a stream, a frame may still wait before it."""
        if call.is_slow is None or not call.reply_bytes:
            self.release(call)
        elif call.answered_s is None:
            call.answered_s = time.monotonic()

    def release(self, call: RpcCall) -> None:
        """The RPC is over, and its reply taken or given up."""
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
        """What its tenant holds, by its weight: nobody has to wait behind all messages of another one."""
        tenant = item[1].call.tenant
        return self._held[tenant.name] / tenant.weight

    def _refusal(self, what: str, call: RpcCall, nbytes: int) -> ServerBusy:
        self.refused[what] += 1
        self._pressed_until_s = time.monotonic() + _PATIENCE_S
        return ServerBusy(
            f"{call.operator or call.method}: found {self.used_bytes} of {self.limits.memory_bytes} bytes of "
            f"front memory in use; expected room for {nbytes} of a {what} (setting front_memory_bytes)",
            retry_after_s=_RETRY_AFTER_S,
            operator=call.operator,
        )

    # ------------------------------------------------------------------------- those that are too slow

    async def watch(self, calls: Callable[[], Iterable[RpcCall]], port: int | None) -> None:
        """Ends who is too slow, until it is cancelled.

        Args:
            calls: The RPCs in progress.
            port: The server's own; None where it has none, and connections cannot be told apart.
        """
        while True:
            await asyncio.sleep(_TICK_S)
            peers = self.tick(list(calls()), time.monotonic())
            if peers and port is not None:
                await asyncio.to_thread(end_connections, peers, port)

    def tick(self, calls: Iterable[RpcCall], now_s: float) -> set[str]:
        """Ends messages that took too long, refuses who has waited too long for room.

        Args:
            calls: The RPCs in progress.
            now_s: Time on the monotonic clock.

        Returns:
            Peers that did not take a reply in time.
        """
        for room, waiter in self._waiting.items():
            if not room.done() and now_s - waiter.since_s > _PATIENCE_S:
                room.set_exception(self._refusal("request", waiter.call, waiter.nbytes))
        pressed = bool(self._waiting) or now_s < self._pressed_until_s
        pressed = pressed or self.used_bytes > _PRESSED_FROM * self.limits.memory_bytes
        peers = set()
        for call in calls:
            if call.answered_s is not None:
                if now_s - call.answered_s > self._reply_s(call, pressed):
                    peers.add(call.context.peer())
                    self._drop("reply", call, now_s - call.answered_s)
            elif call.is_slow is not None:
                if pressed and call.failure is None and call.is_slow():
                    self._drop("reply" if call.reply_bytes else "request", call, now_s - call.marks[0][1])
                    call.end(_slow(call))
            elif call.reading_s is not None and call.failure is None:
                self._end_late(call, now_s - call.reading_s, pressed)
        return peers

    def _reply_s(self, call: RpcCall, pressed: bool) -> float:
        if call.is_slow is not None:
            return _PRESSED_FAREWELL_S if pressed else _FAREWELL_S
        return _PRESSED_REPLY_S if pressed else self.limits.reply_timeout_s

    def _end_late(self, call: RpcCall, seconds: float, pressed: bool) -> None:
        if seconds <= (_PRESSED_MESSAGE_S if pressed else self.limits.upload_timeout_s):
            return
        self._drop("request", call, seconds)
        text = f"{call.method}: found no whole message for {seconds:.1f} s; expected one before that"
        call.end(
            ServerBusy(f"{text}, as memory is short", retry_after_s=1.0)
            if pressed
            else DeadlineExceeded(text)
        )

    def _drop(self, what: str, call: RpcCall, seconds: float) -> None:
        self.dropped[what] += 1
        get_logger().warning(
            f"{what} too slow",
            method=call.method,
            peer=call.context.peer(),
            request_id=call.request_id,
            held_bytes=call.request_bytes + call.reply_bytes,
            seconds=round(seconds, 3),
        )


def _message_bytes(message: Any) -> int:
    return message.ByteSize() if isinstance(message, Message) else 0


def _slow(call: RpcCall) -> ServerBusy:
    name = call.operator or call.method
    text = f"{name}: found a stream below the least rate while memory is short; expected more"
    return ServerBusy(text, retry_after_s=1.0, operator=call.operator)
