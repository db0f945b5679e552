"""Replies of servers that lie, each with what the client must say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.client.fake_service import chunk_frame, group_norm, header_frame, response

from npugrad import OPERATORS, TensorMeta, codec
from npugrad.call import CallOptions
from npugrad.registry import REGISTRY
from npugrad.v1 import backward_pb2
from npugrad_client._call import Prepared, prepare

Frames = list[backward_pb2.ExecuteResponse]
Lie = Callable[[Frames], Frames]

RECORD = OPERATORS["group_norm_backward"]
SHAPE = (4, 8, 1024)
GRAD_INPUT = RECORD.param_index("grad_input")
GRAD_GAMMA = RECORD.param_index("grad_gamma")
NBYTES = 4 * 8 * 1024 * 4
MALFORMED = "the server's reply is malformed"


def call_of(sizes: tuple[int, int, int] = SHAPE, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a legal call, but for the changes."""
    n, c, hxw = sizes
    return {**group_norm(n=n, c=c, hxw=hxw, group=2), **changes}


def prepared(
    out: dict[str, Any] | None = None, sizes: tuple[int, int, int] = SHAPE, **changes: Any
) -> Prepared:
    call = call_of(sizes, **changes)
    names = [p.name for p in RECORD.inputs]
    inputs, attrs = {k: call[k] for k in names}, {k: v for k, v in call.items() if k not in names}
    return prepare(RECORD, inputs, attrs, out, CallOptions(label="test"))


def reply(call: Prepared, chunk_from_bytes: int = 1) -> Frames:
    """A right reply of zeros."""
    message, follow = response(RECORD, dict(RECORD.infer(call.call)), chunk_from_bytes)
    frames = [header_frame(RECORD, message)]
    for operand, data in follow:
        half = data.nbytes // 2
        frames += [
            chunk_frame(operand, 0, bytes(data[:half])),
            chunk_frame(operand, half, bytes(data[half:])),
        ]
    return frames


def edited(change: Callable[[Any], object]) -> Lie:
    """A lie in the typed response of the header."""

    def lie(frames: Frames) -> Frames:
        message = REGISTRY.responses[RECORD.name]()
        message.CopyFrom(getattr(frames[0].header, RECORD.name))
        change(message)
        return [header_frame(RECORD, message), *frames[1:]]

    return lie


def put(message: Any, meta: TensorMeta, nbytes: int | None = None) -> None:
    """Another meta for grad_input, and another length."""
    message.grad_input.meta.Clear()
    codec.encode_meta(meta, message.grad_input.meta)
    message.grad_input.chunked_bytes = meta.content_bytes if nbytes is None else nbytes


def other_operator(frames: Frames) -> Frames:
    grid = OPERATORS["grid_sampler_2d_backward"]
    return [header_frame(grid, REGISTRY.responses[grid.name]()), *frames[1:]]


def swapped(frames: Frames) -> Frames:
    return [frames[0], frames[2], frames[1], *frames[3:]]


HEADER_LIES: dict[str, tuple[Lie, str]] = {
    "nothing": (lambda f: [], "found nothing as its first frame; expected a header"),
    "chunk first": (lambda f: f[1:], "found chunk as its first frame"),
    "empty frame first": (
        lambda f: [backward_pb2.ExecuteResponse(), *f],
        "found an empty frame as its first",
    ),
    "no operator": (
        lambda f: [backward_pb2.ExecuteResponse(header=backward_pb2.ExecuteResponseHeader()), *f[1:]],
        "found results of no operator",
    ),
    "other operator": (other_operator, "found results of grid_sampler_2d_backward"),
    "missing output": (
        edited(lambda m: m.ClearField("grad_gamma")),
        r"found nothing as grad_gamma; expected float32\[8\]",
    ),
    "wrong dtype": (
        edited(lambda m: put(m, TensorMeta("float64", SHAPE))),
        r"found float64\[4, 8, 1024\] as grad_input; expected float32\[4, 8, 1024\]",
    ),
    "wrong shape": (
        edited(lambda m: put(m, TensorMeta("float32", (4, 8, 512)))),
        r"found float32\[4, 8, 512\] as grad_input",
    ),
    "huge": (
        edited(lambda m: put(m, TensorMeta("float32", (2**30, 2**30)))),
        r"found float32\[1073741824, 1073741824\] as grad_input",
    ),
    "strides": (
        edited(lambda m: put(m, TensorMeta("float32", SHAPE, strides=(0, 0, 0)))),
        r"found float32\[4, 8, 1024\] as grad_input; expected it contiguous",
    ),
    "offset": (
        edited(lambda m: put(m, TensorMeta("float32", SHAPE, storage_offset=1))),
        "expected it contiguous",
    ),
    "announces too much": (
        edited(lambda m: put(m, TensorMeta("float32", SHAPE), NBYTES + 4)),
        f"grad_input: found {NBYTES + 4} bytes of content; expected {NBYTES}",
    ),
    "inline too short": (
        edited(lambda m: setattr(m.grad_gamma, "data", b"123")),
        "grad_gamma: found 3 bytes of content; expected 32",
    ),
    "unknown dtype": (
        edited(lambda m: setattr(m.grad_input.meta, "data_type", 99)),
        "grad_input: found data type 99",
    ),
    "negative size": (
        edited(lambda m: m.grad_input.meta.shape.insert(0, -1)),
        "grad_input: found shape .* expected sizes of 0 or more",
    ),
    "no product": (edited(lambda m: setattr(m.info, "product", 0)), "info: found product 0"),
}
CHUNK_LIES: dict[str, tuple[Lie, str]] = {
    "ends early": (lambda f: f[:-1], "found 16 bytes of grad_beta at its end; expected 32"),
    "no chunks": (lambda f: f[:1], f"found 0 bytes of grad_input at its end; expected {NBYTES}"),
    "out of order": (swapped, f"chunk of {NBYTES // 2} bytes of grad_input at offset {NBYTES // 2}"),
    "repeated": (lambda f: [*f[:2], *f[1:]], "of grad_input at offset 0; expected 1 to"),
    "gap": (
        lambda f: [f[0], chunk_frame(GRAD_INPUT, 4, b"1234")],
        "found a chunk of 4 bytes of grad_input at offset 4",
    ),
    "far away": (lambda f: [f[0], chunk_frame(GRAD_INPUT, 2**63, b"1")], f"at offset {2**63}"),
    "too long": (
        lambda f: [*f[:2], chunk_frame(GRAD_INPUT, NBYTES // 2, bytes(NBYTES))],
        f"found a chunk of {NBYTES} bytes of grad_input at offset {NBYTES // 2}; expected 1 to {NBYTES // 2}",
    ),
    "past the end": (lambda f: [*f, chunk_frame(GRAD_INPUT, NBYTES, b"1")], "expected 1 to 0 bytes"),
    "empty chunk": (lambda f: [f[0], chunk_frame(GRAD_INPUT, 0, b""), *f[1:]], "found a chunk of 0 bytes"),
    "an input": (
        lambda f: [f[0], chunk_frame(0, 0, b"1"), *f[1:]],
        "a chunk of parameter 0, which its header",
    ),
    "no parameter": (lambda f: [f[0], chunk_frame(99, 0, b"1")], "a chunk of parameter 99"),
    "second header": (lambda f: [f[0], *f], "found a second header; expected a chunk"),
    "empty frame": (lambda f: [f[0], backward_pb2.ExecuteResponse(), *f[1:]], "found an empty frame"),
}
LIES = HEADER_LIES | CHUNK_LIES
