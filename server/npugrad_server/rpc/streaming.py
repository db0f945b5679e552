"""Execute: one call of any size, as a header and the chunks that it announces; the reply likewise.

The header is decoded, validated and admitted before a single chunk is read; a refused call costs no payload.
Chunks go straight into the input arena. Rules, whose violation gives MALFORMED_REQUEST or MALFORMED_TENSOR:
the header comes first and once; a chunk names an announced operand, carries 1 byte to 4 MiB, continues where
the operand's last chunk ended and does not exceed its announced length (operands may interleave); the client
ends its side after the last chunk, and not before.

An upload takes memory for its operands once it has sent some of them, and a place in the queue once it has
sent all. If another call finds no memory, an upload below the minimum rate gives up its own, and so does one
whose tenant is over its share and whose own rate would have it keep the memory for more than some seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio

from npugrad.codec import CHUNK_BYTES, encode_response, unwrap, wrap
from npugrad.errors import DeadlineExceeded, MalformedRequest, ServerBusy
from npugrad.frames import Chunk, encode_header
from npugrad.layout import chunks
from npugrad.timeline import serialize_marks
from npugrad_server.dispatch import mark_encoded
from npugrad_server.plans import INLINE_REPLY_BYTES
from npugrad_server.rpc.funnel import RpcCall, sane
from npugrad_server.rpc.headers import Header
from npugrad_server.rpc.idle import IdleTimer
from npugrad_server.rpc.pace import GIVES_WAY_AFTER_S, KEEPS_AT_MOST_S, Pace, PaceLimits
from npugrad_server.rpc.unsent import UnsentReply
from npugrad_server.rpc.upload import Upload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from npugrad.errors import NpugradError
    from npugrad_server.dispatch import Dispatcher
    from npugrad_server.plans import Request
    from npugrad_server.pool import Outcome, Ticket

_HELD_BACK_BYTES = 16 * 1024
"""Bytes, frames included, that an upload has sent when it gets memory for its operands."""
_FRAME_BYTES = 256
"""More than a frame takes besides its data."""
_RETRY_AFTER_S = 1.0


class Frames:
    """The frames of one Execute call; the settings limit the wait for each.

    A context manager, to be entered by the task that reads and writes.
    """

    def __init__(self, call: RpcCall, upload: PaceLimits, reply: PaceLimits) -> None:
        self._call = call
        self._upload, self._reply = Pace(upload), Pace(reply)
        self._timer = IdleTimer()
        self._held_back: deque[Any] = deque()
        self._end: NpugradError | None = None
        self._asked_s: float | None = None
        self._is_uploaded = self._has_metadata = False

    def __enter__(self) -> Frames:
        """Registers `is_slow`; waits begin with a frame."""
        self._call.is_slow = self.is_slow
        return self

    def __exit__(self, *error: object) -> None:
        """Stops the timer."""
        self._timer.close()

    async def read(self) -> Any:
        """The next frame, a `Chunk` or a message; None once the client has ended its side.

        Raises:
            DeadlineExceeded: The client sent nothing for too long, or is too slow.
            ServerBusy: It is slow, and another call needed its memory.
            MalformedRequest: The bytes are not a frame.
            asyncio.CancelledError: The client is gone, or its deadline has passed.
        """
        if self._held_back:
            return self._held_back.popleft()
        upload = self._upload
        frame = await self._within(self._call.context.read(), upload, "no frame from the client", "a chunk")
        if isinstance(frame, Chunk):
            upload.moved_bytes += len(frame.data)
            return frame
        upload.waited_s = 0.0  # that wait was for the header; contents have not begun
        return None if frame is grpc.aio.EOF else sane(frame)

    async def hold_back(self, nbytes: int) -> None:
        """Waits for the first chunks, which `read` returns later; errors as in `read`.

        Args:
            nbytes: Bytes of contents still to come.
        """
        held_back: deque[Any] = deque()
        held_bytes, missing_bytes = 0, nbytes
        while held_bytes < _HELD_BACK_BYTES and missing_bytes > 0:
            frame = await self.read()
            held_back.append(frame)
            if not isinstance(frame, Chunk):
                break
            held_bytes += len(frame.data) + _FRAME_BYTES
            missing_bytes -= len(frame.data)
        self._held_back = held_back

    def is_slow(self) -> bool:
        """Whether it uploads below the minimum rate, or has not taken a reply frame for some seconds."""
        waiting_s = self._timer.waiting_s
        return waiting_s > GIVES_WAY_AFTER_S if self._is_uploaded else self._upload.is_slow(waiting_s)

    def end_if_slow(self, error: ServerBusy) -> bool:
        """Ends the call with an error if the client is slow; returns whether it is."""
        if self._end is not None:
            return True
        return self.is_slow() and self._end_wait(error)

    def end_if_long(self, operator: str, missing_bytes: int, judged_after_s: float) -> bool:
        """Ends an upload that would keep others waiting for long; returns whether it does.

        Args:
            operator: Its operator.
            missing_bytes: Bytes still to come.
            judged_after_s: Seconds of waiting for the client after which its rate counts; infinite if its
                tenant is not over its share.
        """
        pace, now, waiting_s = self._upload, time.monotonic(), self._timer.waiting_s
        waited_s = pace.waited_s + waiting_s
        if waited_s < judged_after_s:
            return False
        self._asked_s = self._asked_s or now
        takes_s = pace.takes_s(missing_bytes, waiting_s)
        if takes_s <= KEEPS_AT_MOST_S and now - self._asked_s <= KEEPS_AT_MOST_S:
            return False
        text = (
            f"{operator}: the upload gives way: found {pace.moved_bytes} bytes in {waited_s:.3g} s and "
            f"{missing_bytes} still to come; expected those within {KEEPS_AT_MOST_S:g} s, because other "
            "tenants wait for memory, and this one holds more than its share"
        )
        return self._end_wait(ServerBusy(text, retry_after_s=_RETRY_AFTER_S, operator=operator))

    def _end_wait(self, error: ServerBusy) -> bool:
        """Ends the current wait with an error; returns False if there is none: it moves bytes just now."""
        if not self._timer.waiting_s:
            return False
        self._end = error
        self._timer.ring()
        return True

    def end_upload(self, reply_bytes: int) -> None:
        """The upload is complete; a reply of this many bytes will follow."""
        self._is_uploaded = True
        self._call.memory.uploaded(self._call, reply_bytes)

    async def start_reply(self) -> None:
        """Sends the metadata before the first frame: otherwise no status could follow until that is taken."""
        if not self._has_metadata:
            await self.confirm_end()

    async def confirm_end(self) -> None:
        """Checks that the client itself ended its side: reading from a dead call also returns the end.

        Raises:
            asyncio.CancelledError: The client is gone, or its deadline has passed.
        """
        # Metadata can be sent only on a live call; all that the client could notice is that it comes early.
        self._has_metadata = True
        await self._within(
            self._call.context.send_initial_metadata(()),
            self._reply,
            "no room for metadata",
            "the client to read",
        )

    async def write(self, frame: Any) -> None:
        """Sends a frame, a `Chunk` or a message; its data is no longer needed once this waits.

        Raises:
            DeadlineExceeded: The client took nothing for too long, or is too slow.
            ServerBusy: It is slow, and another call needed the memory of its results.
            asyncio.CancelledError: The client is gone, or its deadline has passed.
        """
        await self._within(
            self._call.context.write(frame), self._reply, "no room for the reply", "the client to read"
        )
        if isinstance(frame, Chunk):
            self._reply.moved_bytes += len(frame.data)

    async def _within(self, act: Awaitable[Any], pace: Pace, found: str, expected: str) -> Any:
        self._timer.start(pace.left_s())
        try:
            return await act
        except asyncio.CancelledError:
            if not self._timer.is_cause():
                raise
            text = f"execute: stream: {pace.late_text(self._timer.waiting_s, found, expected)}"
            raise self._end or DeadlineExceeded(text, operator=self._call.operator) from None
        except (grpc.aio.BaseError, grpc.RpcError) as error:
            # On a dead call, the transport fails before it cancels the task.
            raise asyncio.CancelledError(f"execute: stream: found it closed: {error}") from None
        finally:
            pace.waited_s += self._timer.stop()


class Execute:
    """The handler of Execute."""

    def __init__(self, dispatcher: Dispatcher, upload: PaceLimits, reply: PaceLimits) -> None:
        """Creates the handler.

        Args:
            dispatcher: Runs the calls.
            upload: Limits on waiting for frames of an upload.
            reply: Limits on waiting until frames of a reply are taken.
        """
        self._dispatcher = dispatcher
        self._limits = (upload, reply)

    async def __call__(self, call: RpcCall) -> None:
        """Handles one call from its header to the last chunk of its reply; errors as in `Dispatcher`."""
        with Frames(call, *self._limits) as frames:
            header = await self._header(frames)
            call.marks.append(("", time.monotonic()))  # until now there was nothing to decode
            request = self._plan(call, header)
            upload = Upload.of(request)
            call.received_bytes = request.known.content_bytes - upload.missing_bytes
            if upload.missing_bytes:
                self._dispatcher.pool.check(request, is_upload=True)  # a refused call costs no payload
                await frames.hold_back(upload.missing_bytes)
            admitted: list[Ticket] = []
            source = partial(_receive, call, frames, upload, admitted)
            await self._dispatcher.call(request, source, partial(self._send, call, frames, request, admitted))

    async def _header(self, frames: Frames) -> Header:
        frame = await frames.read()
        if isinstance(frame, Header):
            return frame
        if frame is None:
            await frames.confirm_end()
            raise MalformedRequest("execute: stream: found the end of the stream first; expected a header")
        kind = _kind(frame)
        if kind != "header":
            raise MalformedRequest(f"execute: stream: found {kind} first; expected a header")
        record, message = unwrap(frame.header, self._dispatcher.registry)
        return Header(record, None, 0, lambda: message)

    def _plan(self, call: RpcCall, header: Header) -> Request:
        def read() -> Any:
            message = header.read()
            call.operator = header.record.name
            return message

        request = self._dispatcher.planner.plan(
            header.record,
            header.data,
            read,
            start=header.start,
            request_id=call.request_id,
            timeout_s=call.timeout_s,
            chunked=True,
            marks=call.marks,
            tenant=call.tenant,
        )
        call.operator = header.record.name
        call.describe(request.plan.call)
        return request

    async def _send(
        self, call: RpcCall, frames: Frames, request: Request, admitted: list[Ticket], outcome: Outcome
    ) -> None:
        call.info = outcome.info
        (ticket,) = admitted
        self._dispatcher.pool.drop_operands(ticket)
        call.sent_bytes = sum(view.nbytes for view in outcome.contents.values())
        replies = _reply(self._dispatcher, request, outcome)
        frame = next(replies)  # the header, which this builds
        await frames.start_reply()
        with UnsentReply(replies, call.sent_bytes, ticket, call, frames.end_if_slow) as unsent:
            while frame is not None:
                await frames.write(frame)
                frame = await unsent.next()
        request.marks.append(("send_back", time.monotonic()))
        call.timeline = serialize_marks(request.marks)


def _kind(frame: Any) -> str:
    if isinstance(frame, Header):
        frame.read()  # raises if it does not parse
        return "header"
    return "chunk" if isinstance(frame, Chunk) else frame.WhichOneof("frame") or "an empty frame"


async def _receive(
    call: RpcCall, frames: Frames, upload: Upload, admitted: list[Ticket], ticket: Ticket
) -> None:
    admitted.append(ticket)
    operator = ticket.planned.plan.record.name
    ticket.give_way = partial(_give_way, frames, upload, operator)
    views = {}
    while (frame := await frames.read()) is not None:
        if not isinstance(frame, Chunk):
            found = "a second header" if _kind(frame) == "header" else "an empty frame"
            raise MalformedRequest(f"{operator}: stream: found {found}; expected a chunk", operator=operator)
        if not upload.missing_bytes:
            raise MalformedRequest(
                f"{operator}: stream: found a chunk after the last announced byte; expected the end",
                operator=operator,
            )
        operand, offset, data = frame
        name = upload.place(operand, offset, len(data))
        call.received_bytes += len(data)
        if name in ticket.planned.plan.unused:
            continue
        if name not in views:
            views[name] = ticket.view(name)
        for start in range(0, len(data), CHUNK_BYTES):
            if len(data) > CHUNK_BYTES:
                await asyncio.sleep(0)  # let others run: the data was copied once already
            piece = data[start : start + CHUNK_BYTES]
            views[name][offset + start : offset + start + len(piece)] = piece
    if upload.missing_bytes:
        await frames.confirm_end()
    upload.finish()
    ticket.give_way = None
    frames.end_upload(ticket.state.output_bytes)


def _give_way(frames: Frames, upload: Upload, operator: str, judged_after_s: float) -> bool:
    """Ends an upload that is too slow for its memory, which others need; returns whether it is."""
    text = f"{operator}: the upload is slower than the minimum rate, and other calls wait for memory"
    error = ServerBusy(text, retry_after_s=_RETRY_AFTER_S, operator=operator)
    return frames.end_if_slow(error) or frames.end_if_long(operator, upload.missing_bytes, judged_after_s)


def _reply(dispatcher: Dispatcher, request: Request, outcome: Outcome) -> Iterator[Any]:
    header, follow = _open_reply(dispatcher, request, outcome)
    yield header
    for operand, content in follow:
        for offset, piece in chunks(content, CHUNK_BYTES):
            yield Chunk(operand, offset, piece)


def _open_reply(
    dispatcher: Dispatcher, request: Request, outcome: Outcome
) -> tuple[Any, list[tuple[int, memoryview]]]:
    """The first frame, and (parameter index, content) of what follows in chunks."""
    plan, registry = request.plan, dispatcher.registry
    known = dispatcher.reply_by_template(request, outcome)
    if known is not None:
        follow = [(index, outcome.contents[name]) for index, name in request.known.follow]
        return encode_header(registry.execute_response, plan.record.name, known), follow
    message, follow = encode_response(
        plan.record,
        plan.outputs,
        outcome.contents,
        outcome.info,
        chunk_from_bytes=INLINE_REPLY_BYTES,
        registry=registry,
    )
    mark_encoded(request, message)
    frame = registry.execute_response()
    wrap(frame.header, plan.record, message)
    return frame, follow
