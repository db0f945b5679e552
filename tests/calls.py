"""Calls as any gRPC client would make them: messages from records, generated stubs, no client of ours."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from grpc_status import rpc_status
from tests.synthetic.record import REGISTRY as SYNTHETIC_REGISTRY

from npugrad import codec
from npugrad.call import CallOptions
from npugrad.errors import NpugradError, error_from_details
from npugrad.layout import chunks, view
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import get_operator
from npugrad.products import Product
from npugrad.registry import REGISTRY, Registry
from npugrad.status import MAX_STATUS_BYTES, decode_status, grpc_status_name
from npugrad.v1 import backward_pb2
from npugrad_server.backends.base import DeviceCall
from npugrad_server.backends.cpu import CpuBackend
from npugrad_server.devices import parse_device

TIMEOUT_S = 60.0
"""Deadline of every call of a test: a hang fails it."""
UPLOAD_HXW = 4096
"""HxW of a GroupNorm whose upload has memory once its first chunk came; smaller ones wait for more."""


@cache
def cpu_backend(torch: str = "auto") -> CpuBackend:
    """The CPU backend as a worker has it; PyTorch's results depend on the number of threads, no others do."""
    backend = CpuBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPUGRAD_KERNELS_TORCH", torch)
        backend.open(parse_device("cpu:0"), Product.ATLAS_A2, 1)
    return backend


def cpu_results(
    record: OpRecord,
    call: CallMeta,
    operands: Mapping[str, npt.NDArray[Any] | None],
    outputs: Mapping[str, TensorMeta | None],
) -> dict[str, npt.NDArray[Any]]:
    """What a CPU device answers, bit for bit: its backend's results, by wanted output."""
    return cpu_run(record, call, operands, outputs)[0]


def cpu_run(
    record: OpRecord,
    call: CallMeta,
    operands: Mapping[str, npt.NDArray[Any] | None],
    outputs: Mapping[str, TensorMeta | None],
    torch: str = "auto",
) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """The same, and what says to have computed it: kernels do not take every type."""
    backend = cpu_backend(torch)
    wanted = {
        name: np.zeros(meta.shape, meta.dtype.numpy) for name, meta in outputs.items() if meta is not None
    }
    contiguous = {name: None if a is None else np.array(a, order="C") for name, a in operands.items()}
    if not wanted:
        return wanted, backend.name
    timings = backend.run(record, DeviceCall(call, contiguous, wanted, CallOptions(), 0))
    return wanted, timings.backend or backend.name


def registry_of(record: OpRecord) -> Registry:
    """Where an operator's messages and services are: the contract's, or those of the synthetic operator."""
    return REGISTRY if record.name in REGISTRY.records else SYNTHETIC_REGISTRY


def header_frame(record: OpRecord, message: Any) -> Any:
    """The first frame of a streamed call."""
    frame = registry_of(record).execute_request()
    codec.wrap(frame.header, record, message)
    return frame


@dataclass(frozen=True)
class Sample:
    """A call with its data: bytes of operands that are not null, laid out as in their metas, and arrays."""

    record: OpRecord
    call: CallMeta
    contents: Mapping[str, memoryview]
    arrays: Mapping[str, npt.NDArray[Any] | None]

    def message(self, **options: Any) -> Any:
        """The typed request with all contents inline."""
        return self._encode(None, CallOptions(**options))[0]

    def header(self, chunk_from_bytes: int = 1, **options: Any) -> tuple[Any, list[tuple[int, memoryview]]]:
        """The header frame of Execute, and (parameter index, content) of what follows in chunks."""
        message, follow = self._encode(chunk_from_bytes, CallOptions(**options))
        return header_frame(self.record, message), follow

    def frames(self, chunk_bytes: int = codec.CHUNK_BYTES, **options: Any) -> Iterator[Any]:
        """All frames of Execute, one operand after the other."""
        header, follow = self.header(**options)
        yield header
        for operand, content in follow:
            for frame in chunk_frames(operand, content, chunk_bytes):
                yield registry_of(self.record).execute_request(chunk=frame.chunk)

    def _encode(self, chunk_from_bytes: int | None, options: CallOptions) -> tuple[Any, Any]:
        return codec.encode_request(
            self.call.inputs,
            self.contents,
            self.record,
            self.call.attrs,
            self.call.outputs,
            options,
            chunk_from_bytes=chunk_from_bytes,
            registry=registry_of(self.record),
        )

    def reference(self) -> dict[str, bytes]:
        """What the tests' servers answer, which do without PyTorch: by wanted output, as raw bytes."""
        found, _ = cpu_run(self.record, self.call, self.arrays, self.outputs, torch="off")
        return {name: array.tobytes() for name, array in found.items()}

    @property
    def outputs(self) -> dict[str, TensorMeta]:
        """The wanted outputs."""
        if self.record.accepts_unchecked(self.call):
            return {}
        return {name: meta for name, meta in self.record.infer(self.call).items() if meta is not None}


def gated(frames: Iterator[Any], gate: threading.Event, before: int) -> Iterator[Any]:
    """Some frames of Execute at once, the rest when the gate opens."""
    yield from itertools.islice(frames, before)
    gate.wait(TIMEOUT_S)
    yield from frames


def fill(record: OpRecord, call: CallMeta, seed: int = 0) -> Sample:
    """Gives a call plausible data."""
    made = record.make_inputs(call, np.random.default_rng(seed))
    contents: dict[str, memoryview] = {}
    arrays: dict[str, npt.NDArray[Any] | None] = {}
    for name, meta in call.inputs.items():
        arrays[name] = None
        if meta is not None and meta.dtype.has_data:
            contents[name] = memoryview(bytearray(meta.content_bytes))
            array = arrays[name] = view(meta, contents[name])
            array[...] = made[name]
    return Sample(record, call, contents, arrays)


def sample(operator: str = "group_norm_backward", *, seed: int = 0, **sizes: Any) -> Sample:
    """A legal call with data; `sizes` go to the record's `build`."""
    record = get_operator(operator)
    return fill(record, record.build(**sizes), seed)


def repeated(reply_bytes: int, operator: str = "group_norm_backward") -> Sample:
    """A call of GroupNorm of about 100 bytes with a result of so many: large operands repeat one element."""
    record = get_operator(operator)
    call = record.build(n=1, c=1, hxw=reply_bytes // 4, group=1)
    metas = {
        name: meta and TensorMeta(meta.dtype, meta.shape, strides=(0,) * meta.rank)
        for name, meta in call.inputs.items()
    }
    contents = {name: memoryview(bytes(meta.content_bytes)) for name, meta in metas.items() if meta}
    return Sample(record, call.with_inputs(**metas), contents, {})


def named_sample(operator: str, name: str, product: Product = Product.ATLAS_A2) -> Sample:
    """One sample of a record, with data."""
    record = get_operator(operator)
    return fill(record, next(s.call for s in record.samples(product) if s.name == name))


def chunk_frames(operand: int, content: memoryview, chunk_bytes: int = codec.CHUNK_BYTES) -> Iterator[Any]:
    """Chunk frames of one operand."""
    for offset, piece in chunks(content, chunk_bytes):
        yield chunk(operand, offset, bytes(piece))


def chunk(operand: int, offset: int, data: bytes) -> backward_pb2.ExecuteRequest:
    """One chunk frame."""
    return backward_pb2.ExecuteRequest(chunk=backward_pb2.Chunk(operand=operand, offset=offset, data=data))


def call_unary(channel: grpc.Channel, record: OpRecord, message: Any, **kwargs: Any) -> codec.WireResult:
    """Calls the operator's unary RPC with a message, or with the bytes of one."""
    registry = registry_of(record)
    method: Any = channel.unary_unary(
        f"/{registry.backward.full_name}/{record.rpc}",
        request_serializer=bytes if isinstance(message, bytes) else type(message).SerializeToString,
        response_deserializer=registry.responses[record.name].FromString,
    )
    return codec.decode_response(record, method(message, **{"timeout": TIMEOUT_S, **kwargs}))


def arrays_of(result: codec.WireResult, contents: Mapping[str, bytes]) -> dict[str, Any]:
    """Each output as an array, None for one that was not computed."""
    return {name: None if meta is None else view(meta, contents[name]) for name, meta in result.metas.items()}


@dataclass
class Reply:
    """A streamed reply, put together; contents in chunks have no data in `result`."""

    result: codec.WireResult
    contents: dict[str, bytes] = field(default_factory=dict)
    chunk_sizes: list[int] = field(default_factory=list)


def call_execute(
    channel: grpc.Channel, frames: Iterable[Any], *, registry: Registry = REGISTRY, **kwargs: Any
) -> Reply:
    """Calls Execute with frames or bytes, and checks that the reply keeps the rules of the contract."""
    written: Callable[[Any], bytes] = lambda f: f if isinstance(f, bytes) else f.SerializeToString()  # noqa: E731
    method: Any = channel.stream_stream(
        f"/{registry.backward.full_name}/Execute",
        request_serializer=written,
        response_deserializer=registry.execute_response.FromString,
    )
    replies = iter(method(iter(frames), **{"timeout": TIMEOUT_S, **kwargs}))
    first = next(replies)
    assert first.WhichOneof("frame") == "header"
    record, message = codec.unwrap(first.header, registry)
    reply = Reply(codec.decode_response(record, message))
    parts = {name: bytearray(found.data or b"") for name, found in reply.result.contents.items()}
    last = -1
    for frame in replies:
        assert frame.WhichOneof("frame") == "chunk"
        name = record.params[frame.chunk.operand].name
        assert frame.chunk.operand >= last, "chunks do not come in the order of the parameters"
        assert frame.chunk.offset == len(parts[name])
        assert 1 <= len(frame.chunk.data) <= codec.MAX_CHUNK_BYTES
        last = frame.chunk.operand
        parts[name] += frame.chunk.data
        reply.chunk_sizes.append(len(frame.chunk.data))
    for name, part in parts.items():
        meta = reply.result.metas[name]
        assert meta is not None
        assert len(part) == reply.result.contents[name].nbytes == meta.content_bytes
        reply.contents[name] = bytes(part)
    return reply


@dataclass(frozen=True)
class Failure:
    """How a call failed; `raw` is the `google.rpc.Status`, serialized."""

    status: grpc.StatusCode
    error: NpugradError
    raw: bytes


def failure_of(act: Callable[[], object]) -> Failure:
    """Does something that must fail with an error of the contract, whose status keeps its limit."""
    with pytest.raises(grpc.RpcError) as caught:
        act()
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None, caught.value
    raw = status.SerializeToString()
    assert len(raw) <= MAX_STATUS_BYTES
    assert status.message.isascii()
    details = decode_status(status)
    assert details is not None, status
    assert details.metadata.get("request_id"), "an error without a request id cannot be found in the log"
    error = error_from_details(details)
    assert caught.value.code().name == grpc_status_name(error)
    return Failure(caught.value.code(), error, raw)
