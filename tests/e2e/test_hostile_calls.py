"""Bad streams, wild values, sheer size, and calls that break everything: typed errors or right results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from tests.calls import Sample, call_execute, call_unary, chunk, failure_of, fill, header_frame
from tests.e2e.harness import Wire, both_ways, differences, each_operator, local_results, outputs_of
from tests.operators import FLOYD, GRID_SAMPLER, GRID_SAMPLER_3D, GROUP_NORM, LAYER_NORM, MSDA
from tests.summary import Tally

from npugrad import codec
from npugrad.errors import (
    CallTooLarge,
    MalformedRequest,
    MalformedTensor,
    NpugradError,
)
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.v1 import backward_pb2, validation_pb2
from npugrad.validation import validate_call
from npugrad_client import Client

Edit = Callable[[Any], None]

pytestmark = pytest.mark.usefixtures("unharmed")

# ---------------------------------------------------------------------------------------------- streams


def _announced(made: Sample) -> tuple[Any, int, bytes]:
    """The header of a call with its first operand in chunks, that operand's index and content."""
    first, follow = made.header()
    return first, follow[0][0], bytes(follow[0][1])


STREAMS: dict[str, tuple[Callable[[Any, int, bytes], list[Any]], type[NpugradError]]] = {
    "truncated": (lambda head, i, data: [head, chunk(i, 0, data[:-1])], MalformedTensor),
    "truncated_at_once": (lambda head, i, data: [head], MalformedTensor),
    "out_of_order": (lambda head, i, data: [head, chunk(i, 8, data[8:16])], MalformedTensor),
    "repeated": (lambda head, i, data: [head, chunk(i, 0, data[:8]), chunk(i, 0, data[:8])], MalformedTensor),
    "offset_wraps": (lambda head, i, data: [head, chunk(i, 2**64 - 8, data[:8])], MalformedTensor),
    "too_long": (lambda head, i, data: [head, chunk(i, 0, bytes(4 * 2**20 + 1))], MalformedTensor),
    "empty": (lambda head, i, data: [head, chunk(i, 0, b"")], MalformedTensor),
    "unknown_operand": (lambda head, i, data: [head, chunk(2**32 - 1, 0, data[:8])], MalformedRequest),
    "output_as_operand": (lambda head, i, data: [head, chunk(13, 0, data[:8])], MalformedRequest),
    "beyond": (
        lambda head, i, data: [head, *_pieces(i, data + b"\0")],
        MalformedTensor,
    ),
    "before_header": (lambda head, i, data: [chunk(i, 0, data[:8]), head], MalformedRequest),
    "second_header": (lambda head, i, data: [head, head], MalformedRequest),
    "empty_frame": (lambda head, i, data: [head, backward_pb2.ExecuteRequest()], MalformedRequest),
    "nothing": (lambda head, i, data: [], MalformedRequest),
}


def _pieces(operand: int, data: bytes) -> Iterator[Any]:
    size = codec.CHUNK_BYTES
    yield from (chunk(operand, o, data[o : o + size]) for o in range(0, len(data), size))


@each_operator
@pytest.mark.parametrize("what", STREAMS)
def test_bad_stream(what: str, record: OpRecord, channel: grpc.Channel, legal: Mapping[str, Sample]) -> None:
    frames, expected = STREAMS[what]
    error = failure_of(lambda: call_execute(channel, frames(*_announced(legal[record.name])))).error
    assert type(error) is expected


@each_operator
def test_chunks_after_completion(
    record: OpRecord, channel: grpc.Channel, legal: Mapping[str, Sample]
) -> None:
    made = legal[record.name]
    frames = [*made.frames(), chunk(0, 0, b"12345678")]
    error = failure_of(lambda: call_execute(channel, frames)).error
    assert isinstance(error, MalformedRequest)
    assert "found a chunk after the last announced byte; expected the end" in str(error)


# ------------------------------------------------------------------------------------------------- data


def _wild(array: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A third of the elements NaN, infinite, the largest or the smallest; NaN with any payload."""
    if array.dtype.kind in "iub":
        return array
    changed = array.copy().reshape(-1)
    where = rng.random(changed.size) < 1 / 3
    with np.errstate(over="ignore"):
        extremes = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 0.0, -0.0, 1e-320]).astype(array.dtype)
    changed[where] = rng.choice(extremes, np.count_nonzero(where))
    bits = changed.view(f"u{array.itemsize}")
    bits[rng.random(changed.size) < 1 / 20] = 2 ** (8 * array.itemsize) - 1  # a NaN that no arithmetic makes
    return changed.reshape(array.shape)


@each_operator
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_that_are_not_finite_are_computed(record: OpRecord, dtype: str, client: Client) -> None:
    if record is FLOYD and dtype == "float32":
        dtype = "float16"
    made = fill(record, record.build(dtype=dtype))
    rng = np.random.default_rng(3)
    arrays = {name: None if a is None else _wild(a, rng) for name, a in made.arrays.items()}
    result = getattr(client, record.name)(**arrays, **made.call.attrs)
    expected = local_results(record, made.call, arrays)
    assert differences(expected, outputs_of(record, result)) == []
    assert any(not np.isfinite(a.astype(np.float64)).all() for a in expected.values() if a is not None)


LEVELS = (-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**32, 1_065_353_216, 2**62, 2**63 - 1)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_levels_outside_the_value_tensor(index_dtype: str, client: Client, tally: Tally) -> None:
    """Sizes and starts are the caller's data; what points outside reads zero and writes nothing."""
    rng = np.random.default_rng(11)
    made = fill(MSDA, MSDA.build(index_dtype=index_dtype))
    limits = np.iinfo(index_dtype)
    levels = np.array([min(max(level, limits.min), limits.max) for level in LEVELS])
    for turn in range(101):
        arrays = dict(made.arrays)
        for name in ("spatial_shape", "level_start_index"):
            old = arrays[name]
            assert old is not None
            wild = rng.choice(levels, old.shape) if turn else np.full(old.shape, 1_065_353_216)
            arrays[name] = np.where(rng.random(old.shape) < (0.6 if turn else 1), wild, old).astype(old.dtype)
        result = getattr(client, MSDA.name)(**arrays)
        assert differences(local_results(MSDA, made.call, arrays), outputs_of(MSDA, result)) == []
        tally("hostile: level tables computed", 1)


# ---------------------------------------------------------------------------------------- sheer size


def _terabytes(record: OpRecord) -> CallMeta:
    """A legal call with a tensor of 2^40 elements or more, all of them one element."""
    call: CallMeta = {
        GROUP_NORM.name: lambda: GROUP_NORM.build(n=1, c=4, hxw=2**38, group=2),
        GRID_SAMPLER.name: lambda: GRID_SAMPLER.build(n=2**20, c=2**10, h=2**5, w=2**5, oh=1, ow=1),
        MSDA.name: lambda: MSDA.build(bs=2**28, nq=1, nh=16, ch=256, levels=((1, 1),), points=1),
        FLOYD.name: lambda: FLOYD.build(b=1, h=1, n=2**20, m=2**20, k=128, d=32),
        LAYER_NORM.name: lambda: LAYER_NORM.build(leading=(2**20,), normalized=(2**20,)),
        GRID_SAMPLER_3D.name: lambda: GRID_SAMPLER_3D.build(n=2**20, c=2**10, d=1, h=2**5, w=2**5, ow=1),
    }[record.name]()
    metas = {
        name: None if m is None else TensorMeta(m.dtype, m.shape, strides=(0,) * m.rank)
        for name, m in call.inputs.items()
    }
    assert max(m.size for m in metas.values() if m is not None) >= 2**40
    return call.with_inputs(**metas)


@each_operator
def test_one_element_repeated_2_to_the_40_times(record: OpRecord, wire: Wire, channel: grpc.Channel) -> None:
    call = _terabytes(record)
    assert validate_call(record, call).status == 0
    metas = {name: m for name, m in call.inputs.items() if m is not None}
    contents = {name: memoryview(bytes(m.content_bytes)) for name, m in metas.items()}
    message, _ = codec.encode_request(call.inputs, contents, record, call.attrs)
    assert message.ByteSize() < 1024
    for error in both_ways(channel, record, message):
        assert isinstance(error, CallTooLarge)
        assert error.operator == record.name
        assert not error.retryable


@each_operator
def test_broadcast_arrays_of_2_to_the_40_elements(record: OpRecord, client: Client) -> None:
    """The client sends one element of each, and makes no room for results before the server agreed."""
    call = _terabytes(record)
    arrays = {
        name: None if m is None else np.broadcast_to(np.zeros((), m.dtype.numpy), m.shape)
        for name, m in call.inputs.items()
    }
    with pytest.raises(CallTooLarge):
        getattr(client, record.name)(**arrays, **call.attrs)


# --------------------------------------------------------------------------------------- all at once


def break_everything(record: OpRecord) -> CallMeta:
    """A call that breaks as many constraints at once as the ways to break one can be put together."""
    call = next(iter(record.samples(Product.ATLAS_A2))).call
    broken = [c.violate(call) for c in record.constraints if not c.alone]
    for part in ("inputs", "attrs", "outputs"):
        found: list[Mapping[str, Any]] = [getattr(other, part) for other in broken if other is not None]
        for name, value in [(name, value) for values in found for name, value in values.items()]:
            changed: dict[str, Any] = {part: {**getattr(call, part), name: value}}
            worse = replace(call, **changed)
            if _violations(record, worse) > _violations(record, call):
                call = worse
    return call


def _violations(record: OpRecord, call: CallMeta) -> int:
    return len(validate_call(record, call).violations)


@each_operator
def test_everything_broken_at_once_200_times(
    record: OpRecord, wire: Wire, channel: grpc.Channel, tally: Tally
) -> None:
    call = break_everything(record)
    expected = validate_call(record, call)
    message, _ = codec.encode_request(call.inputs, {}, record, call.attrs, call.outputs)
    metadata = [("x-request-id", "always-the-same")]
    statuses: Counter[tuple[object, bytes]] = Counter()
    verdicts: Counter[bytes] = Counter()
    for _ in range(100):
        for act in (
            lambda: call_unary(channel, record, message, metadata=metadata),
            lambda: call_execute(channel, [header_frame(record, message)], metadata=metadata),
        ):
            failure = failure_of(act)
            statuses[failure.status, failure.raw] += 1
        verdict = wire.validation.Validate(
            validation_pb2.ValidateRequest(call=header_frame(record, message).header)
        )
        verdicts[verdict.SerializeToString(deterministic=True)] += 1
    assert list(statuses.values()) == [200]
    assert list(verdicts.values()) == [100]
    error: Any = failure.error
    assert (error.code, error.constraint) == (expected.status, expected.violations[0].id)
    assert error.violations_total == len(expected.violations)
    assert [v.id for v in verdict.violations] == [v.id for v in expected.violations]
    # As many as fit follow the first one, in order.
    assert [v.id for v in error.violations] == [v.id for v in expected.violations][: len(error.violations)]
    tally(f"hostile: constraints broken at once by one call of {record.name}", len(expected.violations))
