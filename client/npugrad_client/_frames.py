"""Encodes calls as messages and frames, and decodes and checks replies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import codec, layout
from npugrad.errors import NpugradError, RequestError
from npugrad.frames import Chunk
from npugrad.timeline import TIMELINE_KEY
from npugrad_client._call import CHUNKED_FROM_BYTES, Answer, infer

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping

    from npugrad.call import ExecutionInfo
    from npugrad.meta import TensorMeta
    from npugrad.operator import OpRecord
    from npugrad.v1.backward_pb2 import ExecuteResponse
    from npugrad_client._attempt import Attempt
    from npugrad_client._call import Array, Prepared
    from npugrad_client._clock import CallClock

    Frame = Chunk | ExecuteResponse


def unary_request(prepared: Prepared) -> Any:
    """The typed request with all contents inline."""
    return _encode(prepared, None)[0]


def request_frames(prepared: Prepared, is_answered: Callable[[], bool], attempt: Attempt) -> Iterator[Any]:
    """The frames of a streamed call.

    Args:
        prepared: The call.
        is_answered: Asked once, after the header of a call that the local record refuses; may wait. True
            ends the stream there, so that a call that is bound to be refused costs no upload.
        attempt: Gets the number of bytes to send, and of those sent.
    """
    header, follow = open_call(prepared)
    attempt.upload_bytes = sum(data.nbytes for _, data in follow)
    yield header
    if not (prepared.is_refused and is_answered()):
        yield from chunk_frames(follow, attempt)
    attempt.sent_s = time.monotonic()


async def request_frames_async(
    prepared: Prepared, is_answered: Callable[[], Awaitable[bool]], attempt: Attempt
) -> AsyncIterator[Any]:
    """Like `request_frames`, for an event loop: no step takes longer than copying one chunk."""
    header, follow = open_call(prepared)
    attempt.upload_bytes = sum(data.nbytes for _, data in follow)
    yield header
    if not (prepared.is_refused and await is_answered()):
        for frame in chunk_frames(follow, attempt):
            yield frame
    attempt.sent_s = time.monotonic()


def open_call(prepared: Prepared) -> tuple[Any, list[tuple[int, memoryview]]]:
    """The first frame of a streamed call, and (parameter index, content) of what follows in chunks."""
    if prepared.request is not None:
        index = prepared.record.param_index
        views = ((index(name), data) for name, data in prepared.contents.items())
        return prepared.request, [(each, data) for each, data in views if isinstance(data, memoryview)]
    message, follow = _encode(prepared, CHUNKED_FROM_BYTES)
    frame = prepared.registry.execute_request()
    codec.wrap(frame.header, prepared.record, message)
    return frame, follow


def chunk_frames(follow: Iterable[tuple[int, memoryview]], attempt: Attempt) -> Iterator[Chunk]:
    """Yields the chunks of a streamed call as views of the operands: gRPC serializes each before the next."""
    for operand, data in follow:
        for offset, piece in layout.chunks(data, codec.CHUNK_BYTES):
            yield Chunk(operand, offset, piece)
            attempt.sent_bytes += piece.nbytes  # gRPC asks for the next one once this one is sent


def _encode(prepared: Prepared, chunk_from_bytes: int | None) -> tuple[Any, list[tuple[int, memoryview]]]:
    call = prepared.call
    return codec.encode_request(
        call.inputs,
        prepared.contents,
        prepared.record,
        call.attrs,
        call.outputs,
        prepared.options,
        chunk_from_bytes=chunk_from_bytes,
        registry=prepared.registry,
    )


def read_response(prepared: Prepared, response: Any, clock: CallClock | None = None) -> Answer:
    """Results of a unary call.

    Raises:
        NpugradError: The reply is malformed or does not answer this call.
    """
    result = _decode(prepared, response, clock)
    arrays: dict[str, Array | None] = {}
    for name, meta in result.metas.items():
        found = result.contents.get(name)
        if meta is not None and found is not None and found.data is None:
            raise broken(prepared.record, f"found {name} announced in chunks in a unary reply")
        arrays[name] = None if meta is None else _copied(prepared, name, meta, found)
    return Answer(arrays, result.info)


def read_frames(
    prepared: Prepared, frames: Iterable[Frame], attempt: Attempt, clock: CallClock | None = None
) -> Answer:
    """Results of a streamed call.

    Args:
        prepared: The call.
        frames: The reply.
        attempt: Gets the number of bytes to receive, of those received, and the times.
        clock: Measurements of the call, for its info.

    Raises:
        NpugradError: The reply is malformed or incomplete, or does not answer this call.
    """
    reply = Reply(prepared, attempt, clock)
    for frame in frames:
        reply.feed(frame)
        del frame  # else it takes memory until the next one is complete
    return reply.end()


async def read_frames_async(
    prepared: Prepared, frames: AsyncIterable[Frame], attempt: Attempt, clock: CallClock | None = None
) -> Answer:
    """Like `read_frames`, for an event loop: no step takes longer than copying one chunk."""
    reply = Reply(prepared, attempt, clock)
    async for frame in frames:
        reply.feed(frame)
        del frame  # as above
    return reply.end()


class Reply:
    """The reply to a streamed call, fed frame by frame; each chunk goes directly to its array."""

    def __init__(self, prepared: Prepared, attempt: Attempt, clock: CallClock | None = None) -> None:
        """Creates a reply of which nothing has arrived."""
        self._prepared, self._attempt, self._clock = prepared, attempt, clock
        self._info: ExecutionInfo | None = None
        self._arrays: dict[str, Array | None] = {}
        self._pending: dict[int, _Sink] = {}

    def feed(self, frame: Frame) -> None:
        """Takes the next frame; raises `NpugradError` if it is out of place."""
        self._attempt.hear()
        if self._info is None:
            self._open(frame)
        else:
            self._attempt.received_bytes += _store(self._prepared.record, frame, self._pending)

    def _open(self, frame: Frame) -> None:
        prepared = self._prepared
        self._attempt.first_s = time.monotonic()
        result = _decode(prepared, _header(prepared.record, frame), self._clock)
        self._arrays = dict.fromkeys(result.metas)
        for name, meta in result.metas.items():
            if meta is None:
                continue
            found = result.contents[name]
            if found.data is None:
                array = self._arrays[name] = destination(prepared, name, meta)
                self._pending[prepared.record.param_index(name)] = _Sink(name, array)
            else:
                self._arrays[name] = _copied(prepared, name, meta, found)
        self._attempt.download_bytes = sum(sink.array.nbytes for sink in self._pending.values())
        self._info = result.info

    def end(self) -> Answer:
        """Returns the results after the last frame; raises `NpugradError` if something is missing."""
        record = self._prepared.record
        if self._info is None:
            raise broken(record, "found nothing as its first frame; expected a header")
        for sink in self._pending.values():
            if sink.filled != sink.array.nbytes:
                raise broken(
                    record,
                    f"found {sink.filled} bytes of {sink.name} at its end; expected {sink.array.nbytes}",
                )
        self._attempt.received_s = time.monotonic()
        return Answer(self._arrays, self._info)


def _header(record: OpRecord, frame: Frame) -> Any:
    if isinstance(frame, Chunk) or not frame.HasField("header"):
        kind = "chunk" if isinstance(frame, Chunk) else "an empty frame"
        raise broken(record, f"found {kind} as its first frame; expected a header")
    answered = frame.header.WhichOneof("call")
    if answered != record.name:
        raise broken(record, f"found results of {answered or 'no operator'} in its header")
    return getattr(frame.header, record.name)


def _decode(prepared: Prepared, message: Any, clock: CallClock | None) -> codec.WireResult:
    """Decodes metas, contents and info of a response; rejects anything the call cannot have as results."""
    record = prepared.record
    try:
        result = codec.decode_response(record, message, clock)
    except RequestError as error:  # the request was fine: not the caller's mistake
        raise broken(record, str(error).removeprefix(f"{record.name}: ")) from None
    expected = prepared.expected or (not prepared.is_refused and infer(record, prepared.call)) or {}
    for name, meta in result.metas.items():
        if meta is not None and not (meta.is_contiguous and meta.dtype.has_data):
            raise broken(record, f"found {meta} as {name}; expected it contiguous and of a type with data")
        wanted = expected.get(name, meta)
        target = prepared.targets.get(name)
        if target is not None and meta is not None:
            wanted = prepared.call.outputs[name]
        if _type(meta) != _type(wanted):
            raise broken(record, f"found {meta or 'nothing'} as {name}; expected {wanted or 'nothing'}")
    return result


def _type(meta: TensorMeta | None) -> Any:
    return meta and (meta.dtype, meta.shape)


def destination(prepared: Prepared, name: str, meta: TensorMeta) -> Array:
    """Returns the caller's array if results can be written to it directly, else a new one."""
    target = None if prepared.is_apart else prepared.targets.get(name)
    if target is not None and target.flags.c_contiguous and target.dtype == meta.dtype.numpy:
        return target
    return np.empty(meta.shape, meta.dtype.numpy)


def _copied(prepared: Prepared, name: str, meta: TensorMeta, found: codec.WireContent | None) -> Array:
    array = destination(prepared, name, meta)
    array[...] = layout.view(meta, (found and found.data) or b"")
    return array


class _Sink:
    """One result that arrives in chunks."""

    def __init__(self, name: str, array: Array) -> None:
        self.name, self.array, self.filled = name, array, 0
        self.memory = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _store(record: OpRecord, frame: Frame, pending: Mapping[int, _Sink]) -> int:
    """Copies a chunk to its array; returns its size in bytes."""
    if not isinstance(frame, Chunk):
        found = "a second header" if frame.WhichOneof("frame") else "an empty frame"
        raise broken(record, f"found {found}; expected a chunk")
    operand, offset, data = frame
    sink = pending.get(operand)
    if sink is None:
        raise broken(record, f"found a chunk of parameter {operand}, which its header did not announce")
    if not data or offset != sink.filled or sink.filled + len(data) > sink.array.nbytes:
        raise broken(
            record,
            f"found a chunk of {len(data)} bytes of {sink.name} at offset {offset}; expected 1 to "
            f"{sink.array.nbytes - sink.filled} bytes at offset {sink.filled}",
        )
    sink.memory[sink.filled : sink.filled + len(data)] = data
    sink.filled += len(data)
    return len(data)


def broken(record: OpRecord, text: str) -> NpugradError:
    """Returns the error for a server that violates the contract."""
    return NpugradError(f"{record.name}: the server's reply is malformed: {text}", operator=record.name)


def server_stages(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """Returns the server's stages from the trailing metadata of a streamed call."""
    for key, value in metadata or ():
        if key == TIMELINE_KEY and isinstance(value, bytes):
            return value
    return b""
