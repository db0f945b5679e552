"""A real gRPC server whose answers a test writes: for lies, stalls and refusals that no good server gives."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from npugrad import codec
from npugrad.call import ExecutionInfo
from npugrad.errors import NpugradError
from npugrad.meta import TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.registry import REGISTRY
from npugrad.status import encode_status, grpc_status_name
from npugrad.v1 import backward_pb2

Context = grpc.ServicerContext
Unary = Callable[[OpRecord, Any, Context], Any]
Execute = Callable[[Iterator[backward_pb2.ExecuteRequest], Context], Iterator[backward_pb2.ExecuteResponse]]

INFO = ExecutionInfo("test", "test:0", Product.ATLAS_A2, simulated=True, request_id="abc123")
STREAMED, UNARY = 0, 2**40
"""Values of `Client(stream_from_bytes=...)` that force one way or the other."""
LOOKAHEAD_BYTES = 2 * 2**20
"""How much of an upload passes that no handler reads: the rest stands still."""
STATUS_KEY = "grpc-status-details-bin"
_SERVICE = "npugrad.v1.BackwardService"


@dataclass
class Seen:
    """What reached the server.

    Attributes:
        address: Where it listens.
        methods: RPCs in order.
        headers: Typed requests in order.
        frames: Frames of all streams that were read, headers included.
        lock: Held while a call is noted, so that `methods` and `headers` have the same order.
    """

    address: str = ""
    methods: list[str] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    frames: list[backward_pb2.ExecuteRequest] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def fake_service(
    unary: Unary | None = None,
    execute: Execute | None = None,
    address: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
    is_serving: bool | None = None,
    max_message_bytes: int = -1,
    before: Callable[[Context], object] | None = None,
) -> Iterator[Seen]:
    """Runs a server for a block; without handlers of its own it answers with zeros, after what `before` does.

    Its health service says what `is_serving` says; None for no health service. Messages to it may have any
    size, or at most `max_message_bytes`.
    """
    seen = Seen()
    server = grpc.server(
        futures.ThreadPoolExecutor(8),
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ],
    )
    _add(server, seen, *_handlers(before, unary or zeros, execute or stream_zeros))
    if is_serving is not None:
        status = health_pb2.HealthCheckResponse
        servicer = health.HealthServicer()
        servicer.set("", status.SERVING if is_serving else status.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    seen.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    server.start()
    try:
        yield seen
    finally:
        server.stop(0).wait(10)


def _handlers(
    before: Callable[[Context], object] | None, unary: Unary, execute: Execute
) -> tuple[Unary, Execute]:
    """Handlers that do something first, of a stream when its header is there."""
    if before is None:
        return unary, execute

    def after(record: OpRecord, request: Any, context: Context) -> Any:
        before(context)
        return unary(record, request, context)

    def stream_after(frames: Iterator[backward_pb2.ExecuteRequest], context: Context) -> Iterator[Any]:
        header = next(frames)
        before(context)
        yield from execute(itertools.chain((header,), frames), context)

    return after, stream_after


def _add(server: grpc.Server, seen: Seen, unary: Unary, execute: Execute) -> None:
    def method(record: OpRecord) -> Any:
        def handle(request: Any, context: Context) -> Any:
            with seen.lock:
                seen.methods.append(record.rpc)
                seen.headers.append(request)
            return unary(record, request, context)

        parse = REGISTRY.requests[record.name].FromString
        return grpc.unary_unary_rpc_method_handler(handle, parse, _serialize)

    def stream(frames: Iterator[backward_pb2.ExecuteRequest], context: Context) -> Any:
        seen.methods.append("Execute")

        def watched() -> Iterator[backward_pb2.ExecuteRequest]:
            for frame in frames:
                seen.frames.append(frame)
                yield frame

        yield from execute(watched(), context)

    handlers = {record.rpc: method(record) for record in OPERATORS.values()}
    parse = backward_pb2.ExecuteRequest.FromString
    handlers["Execute"] = grpc.stream_stream_rpc_method_handler(stream, parse, _serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


def _serialize(message: Any) -> bytes:
    """A message, or bytes that are none."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def decoded(record: OpRecord, request: Any) -> dict[str, TensorMeta | None]:
    """Metas of the outputs that a request asks for."""
    return dict(record.infer(codec.decode_request(record, request, Product.ATLAS_A2).call))


def response(
    record: OpRecord, metas: dict[str, TensorMeta | None], chunk_from_bytes: int | None = None
) -> tuple[Any, list[tuple[int, memoryview]]]:
    """A right response full of zeros, and what of it follows in chunks."""
    contents = {n: memoryview(bytes(m.nbytes)) for n, m in metas.items() if m is not None}
    return codec.encode_response(record, metas, contents, INFO, chunk_from_bytes=chunk_from_bytes)


def zeros(record: OpRecord, request: Any, context: Context) -> Any:
    return response(record, decoded(record, request))[0]


def read_header(frames: Iterator[backward_pb2.ExecuteRequest]) -> tuple[OpRecord, Any]:
    return codec.unwrap(next(frames).header)


def stream_zeros(
    frames: Iterator[backward_pb2.ExecuteRequest], context: Context
) -> Iterator[backward_pb2.ExecuteResponse]:
    """Reads a streamed call to its end and answers with zeros in chunks."""
    record, request = read_header(frames)
    for _ in frames:
        pass
    message, follow = response(record, decoded(record, request), chunk_from_bytes=1)
    yield header_frame(record, message)
    for operand, data in follow:
        for offset in range(0, len(data), codec.CHUNK_BYTES):
            yield chunk_frame(operand, offset, bytes(data[offset : offset + codec.CHUNK_BYTES]))


def header_frame(record: OpRecord, message: Any) -> backward_pb2.ExecuteResponse:
    return backward_pb2.ExecuteResponse(
        header=codec.wrap(backward_pb2.ExecuteResponseHeader(), record, message)
    )


def chunk_frame(operand: int, offset: int, data: bytes) -> backward_pb2.ExecuteResponse:
    return backward_pb2.ExecuteResponse(chunk=backward_pb2.Chunk(operand=operand, offset=offset, data=data))


def abort_with(context: Context, error: NpugradError) -> None:
    status = encode_status(error, request_id="abc123")
    context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
    context.abort(grpc.StatusCode[grpc_status_name(error)], status.message)


class Gate:
    """Holds calls on the server until a test lets them go, or 30 s have passed.

    Attributes:
        given_up: Released for each call whose client did not wait so long.
        most: How many were held at once.
    """

    def __init__(self) -> None:
        self.given_up = threading.Semaphore(0)
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()

    def hold(self, context: Context | None = None) -> None:
        """Called by a handler: tells that it is there and waits."""

        def end() -> None:
            if not self._open.is_set():
                self.given_up.release()

        if context is not None and not context.add_callback(end):
            end()
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._arrived.put(None)
        self._open.wait(30)
        with self._lock:
            self._now -= 1

    def wait_for_call(self) -> None:
        self._arrived.get(timeout=30)

    def wait_until_given_up(self) -> None:
        """Returns when the client of a call that was held has given it up."""
        assert self.given_up.acquire(timeout=30), "the server never heard of it"

    def unary(self, record: OpRecord, request: Any, context: Context) -> Any:
        self.hold(context)
        return zeros(record, request, context)

    def execute(
        self, frames: Iterator[backward_pb2.ExecuteRequest], context: Context
    ) -> Iterator[backward_pb2.ExecuteResponse]:
        """The same for streams, whose frames it reads afterwards."""
        self.hold(context)
        yield from stream_zeros(frames, context)

    def open(self) -> None:
        """Lets all calls go, those that come later as well."""
        self._open.set()


def group_norm(n: int = 2, c: int = 4, hxw: int = 8, group: int = 2, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of a legal float32 call of `group_norm_backward`."""
    made = np.random.default_rng(seed)
    operands = {
        "grad_out": made.standard_normal((n, c, hxw), dtype=np.float32),
        "input": made.standard_normal((n, c, hxw), dtype=np.float32),
        "mean": made.standard_normal((n, group), dtype=np.float32),
        "rstd": made.random((n, group), dtype=np.float32) + np.float32(0.5),
        "gamma": made.standard_normal(c, dtype=np.float32),
    }
    return {**operands, "n": n, "c": c, "hxw": hxw, "group": group, "output_mask": (True, True, True)}
