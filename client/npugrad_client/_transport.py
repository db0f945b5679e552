"""The channel to a server: unary calls, streamed calls, and the one place where grpc's errors end.

Small calls are unary; larger ones go through Execute in 1 MiB chunks, so that no message limit ever
reaches a user and neither side holds a call twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import numpy as np

from npugrad import codec, layout
from npugrad.errors import NpugradError
from npugrad.v1 import backward_pb2, backward_pb2_grpc, server_pb2_grpc, validation_pb2_grpc
from npugrad_client.errors import translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from npugrad.call import CallOptions, ExecutionInfo
    from npugrad.spec import CallMeta, OpSpec, TensorMeta

STREAM_FROM_BYTES = 2**20
"""Calls with this much data either way are streamed: below, one message is quicker; above, grpc copies a
message several times into fresh memory."""
CHUNKED_FROM_BYTES = 2**16
"""In a streamed call, operands below this length travel in the header."""

T = TypeVar("T")

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


@dataclass(frozen=True)
class Prepared:
    """A call ready to be sent.

    Attributes:
        spec: Its operator.
        call: Metas and attributes.
        contents: Content of each operand that is not null.
        options: Options of the call.
        expected: Outputs as the local record infers them; empty when it refuses the call.
        targets: Contiguous arrays that results may be written to directly.
    """

    spec: OpSpec
    call: CallMeta
    contents: Mapping[str, memoryview]
    options: CallOptions
    expected: Mapping[str, TensorMeta | None]
    targets: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of data in the larger direction."""
        sent = sum(data.nbytes for data in self.contents.values())
        received = sum(meta.nbytes for meta in self.expected.values() if meta is not None)
        return max(sent, received)


@dataclass(frozen=True)
class Answer:
    """Results of a call: arrays by output name, None for masked-out ones, and what produced them."""

    arrays: dict[str, npt.NDArray[Any] | None]
    info: ExecutionInfo


class Transport:
    """One channel to one target.

    Thread safety: every method may be called from several threads at once; grpc multiplexes them.
    """

    def __init__(self, target: str, stream_from_bytes: int = STREAM_FROM_BYTES) -> None:
        """Opens the channel lazily; nothing is sent before the first call."""
        self.target = target
        self._stream_from_bytes = stream_from_bytes
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._backward = backward_pb2_grpc.BackwardServiceStub(self._channel)
        self._services = {
            "validate": validation_pb2_grpc.ValidationServiceStub(self._channel).Validate,
            "server_info": server_pb2_grpc.ServerServiceStub(self._channel).GetServerInfo,
            "list_operators": server_pb2_grpc.ServerServiceStub(self._channel).ListOperators,
        }

    def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        self._channel.close()

    def ask(self, service: str, request: Any, timeout_s: float | None) -> Any:
        """One of the small services: `validate`, `server_info` or `list_operators`."""
        call: Any = self._services[service]
        return self._translated("", lambda: call(request, timeout=timeout_s))

    def run(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        """Runs a call, streamed or not by its size."""
        send = self._streamed if prepared.nbytes >= self._stream_from_bytes else self._unary
        return self._translated(prepared.spec.name, lambda: send(prepared, timeout_s))

    def _translated(self, operator: str, send: Callable[[], T]) -> T:
        try:
            return send()
        except grpc.RpcError as error:
            raise translate(error, operator, self.target) from None
        except ValueError as error:
            if isinstance(error, NpugradError) or "closed channel" not in str(error):
                raise
            raise RuntimeError("the client is closed; expected calls before close()") from None

    def _unary(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        request, _ = _encode(prepared, None)
        response = getattr(self._backward, prepared.spec.rpc)(request, timeout=timeout_s)
        result = codec.decode_response(prepared.spec, response)
        arrays = {
            name: None if meta is None else _copied(meta, result.contents[name], prepared.targets.get(name))
            for name, meta in result.metas.items()
        }
        return Answer(arrays, result.info)

    def _streamed(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        stream: Any = self._backward.Execute(_frames(prepared), timeout=timeout_s)
        try:
            return _receive(prepared, iter(stream))
        finally:
            stream.cancel()  # no effect after a complete answer; frees the stream when ours was refused


def _encode(prepared: Prepared, chunk_from_bytes: int | None) -> tuple[Any, list[tuple[int, memoryview]]]:
    call = prepared.call
    return codec.encode_request(
        call.inputs,
        prepared.contents,
        prepared.spec,
        call.attrs,
        call.outputs,
        prepared.options,
        chunk_from_bytes=chunk_from_bytes,
    )


def _frames(prepared: Prepared) -> Iterator[backward_pb2.ExecuteRequest]:
    message, follow = _encode(prepared, CHUNKED_FROM_BYTES)
    header = codec.wrap(backward_pb2.ExecuteHeader(), prepared.spec, message)
    yield backward_pb2.ExecuteRequest(header=header)
    for operand, data in follow:
        for offset, piece in layout.chunks(data, codec.CHUNK_BYTES):
            chunk = backward_pb2.Chunk(operand=operand, offset=offset, data=bytes(piece))
            yield backward_pb2.ExecuteRequest(chunk=chunk)


def _copied(meta: TensorMeta, found: codec.WireContent, target: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    array = _destination(meta, target)
    array[...] = layout.view(meta, found.data or b"")
    return array


def _destination(meta: TensorMeta, target: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """The caller's own array where results can land in it as they are, else a new one."""
    if target is not None and target.shape == meta.shape and target.dtype == meta.dtype.numpy:
        return target
    return np.empty(meta.shape, meta.dtype.numpy)


def _receive(prepared: Prepared, frames: Iterator[backward_pb2.ExecuteResponse]) -> Answer:
    spec = prepared.spec
    first = next(frames, None)
    if first is None or first.WhichOneof("frame") != "header":
        raise _broken(spec, "found no header as the first frame of the reply")
    answered, message = codec.unwrap(first.header)
    if answered is not spec:
        raise _broken(spec, f"found results of {answered.name} in the reply")
    result = codec.decode_response(spec, message)
    arrays: dict[str, npt.NDArray[Any] | None] = dict.fromkeys(result.metas)
    pending: dict[int, _Sink] = {}
    for name, meta in result.metas.items():
        if meta is None:
            continue
        found = result.contents[name]
        if found.data is None and meta.is_contiguous:
            array = arrays[name] = _destination(meta, prepared.targets.get(name))
            pending[spec.param_index(name)] = _Sink(name, array)
        else:
            arrays[name] = _copied(meta, found, prepared.targets.get(name))
    for frame in frames:
        _store(spec, frame, pending)
    for sink in pending.values():
        if sink.filled != sink.array.nbytes:
            raise _broken(spec, f"found {sink.filled} bytes of {sink.name}; expected {sink.array.nbytes}")
    return Answer(arrays, result.info)


class _Sink:
    """One result that arrives in chunks."""

    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        self.name, self.array, self.filled = name, array, 0
        self.memory = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _store(spec: OpSpec, frame: backward_pb2.ExecuteResponse, pending: Mapping[int, _Sink]) -> None:
    chunk = frame.chunk
    sink = pending.get(chunk.operand) if frame.WhichOneof("frame") == "chunk" else None
    if sink is None:
        raise _broken(spec, "found a frame that the reply's header did not announce")
    data = chunk.data
    if chunk.offset != sink.filled or sink.filled + len(data) > sink.array.nbytes:
        raise _broken(
            spec,
            f"found {len(data)} bytes of {sink.name} at offset {chunk.offset}; expected offset {sink.filled}",
        )
    sink.memory[sink.filled : sink.filled + len(data)] = data
    sink.filled += len(data)


def _broken(spec: OpSpec, text: str) -> NpugradError:
    return NpugradError(f"{spec.name}: the server's reply is malformed: {text}", operator=spec.name)
