"""Calls as messages and frames, and replies back into arrays; a reply is checked before it is believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import codec, layout
from npugrad.errors import NpugradError, RequestError
from npugrad.v1 import backward_pb2
from npugrad_client._call import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npugrad.spec import OpSpec, TensorMeta
    from npugrad_client._call import Array, Prepared

CHUNKED_FROM_BYTES = 2**16
"""In a streamed call, operands below this length travel in the header."""


def unary_request(prepared: Prepared) -> Any:
    """The typed request with all contents inline."""
    return _encode(prepared, None)[0]


def request_frames(
    prepared: Prepared, is_answered: Callable[[], bool]
) -> Iterator[backward_pb2.ExecuteRequest]:
    """The frames of a streamed call.

    Args:
        prepared: The call.
        is_answered: Asked once, after the header of a call that the local record refuses; may wait. True
            ends the stream there, so that a call that is bound to be refused costs no upload.
    """
    message, follow = _encode(prepared, CHUNKED_FROM_BYTES)
    header = codec.wrap(backward_pb2.ExecuteHeader(), prepared.spec, message)
    yield backward_pb2.ExecuteRequest(header=header)
    if prepared.is_refused and is_answered():
        return
    for operand, data in follow:
        for offset, piece in layout.chunks(data, codec.CHUNK_BYTES):
            chunk = backward_pb2.Chunk(operand=operand, offset=offset, data=bytes(piece))
            yield backward_pb2.ExecuteRequest(chunk=chunk)


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


def read_response(prepared: Prepared, response: Any) -> Answer:
    """Results of a unary call.

    Raises:
        NpugradError: The reply is malformed, or is no answer to this call.
    """
    result = _decode(prepared, response)
    arrays: dict[str, Array | None] = {}
    for name, meta in result.metas.items():
        found = result.contents.get(name)
        if meta is not None and found is not None and found.data is None:
            raise broken(prepared.spec, f"found {name} announced in chunks in a unary reply")
        arrays[name] = None if meta is None else _copied(prepared, name, meta, found)
    return Answer(arrays, result.info)


def read_frames(prepared: Prepared, frames: Iterator[backward_pb2.ExecuteResponse]) -> Answer:
    """Results of a streamed call.

    Raises:
        NpugradError: The reply is malformed, incomplete, or no answer to this call.
    """
    spec = prepared.spec
    result = _decode(prepared, _header(spec, next(frames, None)))
    arrays: dict[str, Array | None] = dict.fromkeys(result.metas)
    pending: dict[int, _Sink] = {}
    for name, meta in result.metas.items():
        if meta is None:
            continue
        found = result.contents[name]
        if found.data is None:
            array = arrays[name] = _destination(prepared, name, meta)
            pending[spec.param_index(name)] = _Sink(name, array)
        else:
            arrays[name] = _copied(prepared, name, meta, found)
    for frame in frames:
        _store(spec, frame, pending)
    for sink in pending.values():
        if sink.filled != sink.array.nbytes:
            raise broken(
                spec, f"found {sink.filled} bytes of {sink.name} at its end; expected {sink.array.nbytes}"
            )
    return Answer(arrays, result.info)


def _header(spec: OpSpec, frame: backward_pb2.ExecuteResponse | None) -> Any:
    kind = "nothing" if frame is None else frame.WhichOneof("frame") or "an empty frame"
    if frame is None or kind != "header":
        raise broken(spec, f"found {kind} as its first frame; expected a header")
    answered = frame.header.WhichOneof("call")
    if answered != spec.name:
        raise broken(spec, f"found results of {answered or 'no operator'} in its header")
    return getattr(frame.header, spec.name)


def _decode(prepared: Prepared, message: Any) -> codec.WireResult:
    """Metas, contents and info of a response; only what the call can have as results is let through."""
    spec = prepared.spec
    try:
        result = codec.decode_response(spec, message)
    except RequestError as error:  # the request was fine: not the caller's mistake
        raise broken(spec, str(error).removeprefix(f"{spec.name}: ")) from None
    for name, meta in result.metas.items():
        if meta is not None and not (meta.is_contiguous and meta.dtype.has_data):
            raise broken(spec, f"found {meta} as {name}; expected it contiguous and of a type with data")
        wanted = prepared.expected.get(name, meta)
        target = prepared.targets.get(name)
        if target is not None and meta is not None:
            wanted = prepared.call.outputs[name]
        if _type(meta) != _type(wanted):
            raise broken(spec, f"found {meta or 'nothing'} as {name}; expected {wanted or 'nothing'}")
    return result


def _type(meta: TensorMeta | None) -> Any:
    return meta and (meta.dtype, meta.shape)


def _destination(prepared: Prepared, name: str, meta: TensorMeta) -> Array:
    """The caller's own array where results can land in it as they are, else a new one."""
    target = prepared.targets.get(name)
    if target is not None and target.flags.c_contiguous and target.dtype == meta.dtype.numpy:
        return target
    return np.empty(meta.shape, meta.dtype.numpy)


def _copied(prepared: Prepared, name: str, meta: TensorMeta, found: codec.WireContent | None) -> Array:
    array = _destination(prepared, name, meta)
    array[...] = layout.view(meta, (found and found.data) or b"")
    return array


class _Sink:
    """One result that arrives in chunks."""

    def __init__(self, name: str, array: Array) -> None:
        self.name, self.array, self.filled = name, array, 0
        self.memory = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _store(spec: OpSpec, frame: backward_pb2.ExecuteResponse, pending: Mapping[int, _Sink]) -> None:
    kind = frame.WhichOneof("frame")
    if kind != "chunk":
        raise broken(spec, f"found {'a second header' if kind else 'an empty frame'}; expected a chunk")
    operand, offset = frame.chunk.operand, frame.chunk.offset
    data = frame.chunk.data  # copied at every access: read once
    sink = pending.get(operand)
    if sink is None:
        raise broken(spec, f"found a chunk of parameter {operand}, which its header did not announce")
    if not data or offset != sink.filled or sink.filled + len(data) > sink.array.nbytes:
        raise broken(
            spec,
            f"found a chunk of {len(data)} bytes of {sink.name} at offset {offset}; expected 1 to "
            f"{sink.array.nbytes - sink.filled} bytes at offset {sink.filled}",
        )
    sink.memory[sink.filled : sink.filled + len(data)] = data
    sink.filled += len(data)


def broken(spec: OpSpec, text: str) -> NpugradError:
    """The error of a server that does not keep to the contract."""
    return NpugradError(f"{spec.name}: the server's reply is malformed: {text}", operator=spec.name)
