"""Bad streams, wild values, sheer size, and calls that break everything: typed errors or right results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from tests.calls import Sample, call_execute, call_unary, chunk, chunk_frames, failure_of, fill, header_frame
from tests.e2e.harness import (
    Array,
    Wire,
    both_ways,
    case,
    differences,
    each_operator,
    local_results,
    outputs_of,
)
from tests.operators import FLOYD, GRID_SAMPLER, GRID_SAMPLER_3D, GROUP_NORM, LAYER_NORM, MSDA
from tests.summary import Tally

from npugrad import codec
from npugrad.codec import MAX_CHUNK_BYTES
from npugrad.errors import CallTooLarge, MalformedRequest, MalformedTensor, NpugradError, UnsafeLevels
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.v1 import backward_pb2, validation_pb2
from npugrad.validation import validate_call
from npugrad_client import Client

pytestmark = pytest.mark.usefixtures("unharmed")

# ---------------------------------------------------------------------------------------------- streams


class BadStream(NamedTuple):
    """Frames that break a rule, and how they are refused."""

    what: str
    frames: list[Any]
    kind: type[NpugradError]
    said: str


def out_of_place(made: Sample) -> Iterator[BadStream]:
    """Frames where none of their kind may be, or of operands that do not come in chunks."""
    record, frames = made.record, list(made.frames())
    head, follow = made.header()
    operand, data = follow[0][0], bytes(follow[0][1])
    first = chunk(operand, 0, data[:8])
    announced = ", ".join(f"{index} ({record.params[index].name})" for index, _ in follow[:2])

    def refused(what: str, sent: list[Any], said: str) -> BadStream:
        return BadStream(what, sent, MalformedRequest, said)

    yield refused("nothing", [], "found the end of the stream first; expected a header")
    yield refused("chunk first", [first, head], "found chunk first; expected a header")
    empty = backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader())
    yield refused("no call", [empty], "header: found no call; expected one of")
    yield refused("two headers", [head, head], "found a second header; expected a chunk")
    yield refused("header at the end", [*frames, head], "found a second header; expected a chunk")
    yield refused("empty frame", [head, type(head)(), first], "found an empty frame; expected a chunk")
    yield refused("more", [*frames, first], "found a chunk after the last announced byte; expected the end")
    names = [param.name for param in record.attrs[:1]] + [record.outputs[0].name]
    for index in (2**32 - 1, *map(record.param_index, names)):
        said = f"found operand {index}; expected an announced one: {announced}"
        yield refused("no operand", [head, chunk(index, 0, data[:8])], said)
    least, most = (pick(follow, key=lambda each: each[1].nbytes) for pick in (min, max))
    if least[1].nbytes < most[1].nbytes:
        whole = made.header(chunk_from_bytes=most[1].nbytes)[0]
        said = f"found operand {least[0]}; expected an announced one"
        yield refused("whole operand", [whole, chunk(least[0], 0, data[:8])], said)


def out_of_order(made: Sample) -> Iterator[BadStream]:
    """Chunks that leave something out, or repeat it, or are of another length than they may."""
    head, follow = made.header()
    operand, data = follow[0][0], bytes(follow[0][1])
    name = f"{made.record.name}: {made.record.params[operand].name}: "
    first, size = chunk(operand, 0, data[:8]), len(data)

    def refused(what: str, said: str, *chunks: Any) -> BadStream:
        return BadStream(what, [head, *chunks], MalformedTensor, name + said)

    yield refused("gap", "found a chunk at offset 8; expected offset 0", chunk(operand, 8, data[8:16]))
    for at in (0, 4):
        said = f"found a chunk at offset {at}; expected offset 8"
        yield refused(f"again from {at}", said, first, chunk(operand, at, data[at : at + 8]))
    wrapped = 2**64 - 8
    said = f"found a chunk at offset {wrapped}; expected offset 0"
    yield refused("offset that wraps", said, chunk(operand, wrapped, data[:8]))
    for length in (0, MAX_CHUNK_BYTES + 1):
        said = f"found a chunk of {length} bytes; expected 1 to {MAX_CHUNK_BYTES}"
        yield refused(f"chunk of {length}", said, chunk(operand, 0, bytes(length)))
    said = f"found {size + 1} bytes in chunks; expected the announced {size}"
    yield refused("beyond", said, *chunk_frames(operand, memoryview(data + b"\0")))
    for sent in (0, size - 1):
        said = f"found the end of the stream after {sent} bytes; expected the announced {size}"
        yield refused(f"end after {sent}", said, *chunk_frames(operand, memoryview(data[:sent])))
    *frames, last = made.frames()
    operand, rest = follow[-1]
    said = (
        f"found the end of the stream after {last.chunk.offset} bytes; expected the announced {rest.nbytes}"
    )
    said = f"{made.record.name}: {made.record.params[operand].name}: {said}"
    yield BadStream("end before the last", frames, MalformedTensor, said)


@each_operator
def test_bad_stream(record: OpRecord, channel: grpc.Channel, legal: Mapping[str, Sample]) -> None:
    made = legal[record.name]
    for bad in (*out_of_place(made), *out_of_order(made)):
        with case(bad.what):
            failure = failure_of(partial(call_execute, channel, bad.frames))
            assert failure.status is grpc.StatusCode.INVALID_ARGUMENT
            assert type(failure.error) is bad.kind
            assert bad.said in str(failure.error)


# ------------------------------------------------------------------------------------------------- data


def _wild(array: Array, rng: np.random.Generator) -> Array:
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
def test_values_that_are_not_finite_are_computed(record: OpRecord, client: Client) -> None:
    for dtype in ("float32", "float16", "bfloat16") if record is not FLOYD else ("float16", "bfloat16"):
        with case(dtype):
            made = fill(record, record.build(dtype=dtype))
            rng = np.random.default_rng(3)
            arrays = {name: None if a is None else _wild(a, rng) for name, a in made.arrays.items()}
            result = getattr(client, record.name)(**arrays, **made.call.attrs)
            expected = local_results(record, made.call, arrays)
            assert differences(expected, outputs_of(record, result)) == []
            wild = [a for a in expected.values() if a is not None]
            assert not all(np.isfinite(a.astype(np.float64)).all() for a in wild)


LEVELS = (-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**32, 1_065_353_216, 2**62, 2**63 - 1)


@pytest.mark.parametrize("turns", [21, pytest.param(101, marks=pytest.mark.deep)])
def test_levels_outside_the_value_tensor(turns: int, client: Client, tally: Tally) -> None:
    """Sizes and starts are the caller's data: refused as the check says, else computed."""
    rng = np.random.default_rng(11)
    for index_dtype in ("int32", "int64"):
        made = fill(MSDA, MSDA.build(index_dtype=index_dtype))
        limits = np.iinfo(index_dtype)
        levels = np.array([min(max(level, limits.min), limits.max) for level in LEVELS])
        for turn in range(turns):
            arrays, drawn = dict(made.arrays), levels if turn % 2 else (0, 1)  # which stay among the keys
            for name in ("spatial_shape", "level_start_index"):
                old = arrays[name]
                assert old is not None
                wild = rng.choice(drawn, old.shape) if turn else np.full(old.shape, 1_065_353_216)
                changed = np.where(rng.random(old.shape) < (0.6 if turn else 1), wild, old)
                arrays[name] = changed.astype(old.dtype)
            try:
                MSDA.data_check(arrays, {})
            except UnsafeLevels as error:
                with pytest.raises(UnsafeLevels, match=f"^{re.escape(str(error))}$"):
                    getattr(client, MSDA.name)(**arrays)
                tally("hostile: level tables refused", 1)
                continue
            result = getattr(client, MSDA.name)(**arrays)
            assert differences(local_results(MSDA, made.call, arrays), outputs_of(MSDA, result)) == []
            tally("hostile: level tables computed", 1)


# ---------------------------------------------------------------------------------------- sheer size


def _long(record: OpRecord) -> CallMeta:
    """The smallest workload with its first axis as long."""
    sizes = dict(record.workloads.named["tiny"].sizes)
    first = next(iter(sizes))
    sizes[first] = (2**40, *sizes[first][1:]) if isinstance(sizes[first], tuple) else 2**40
    return record.build(**sizes)


def _terabytes(record: OpRecord) -> CallMeta:
    """A legal call with a tensor of 2^40 elements or more, all of them one element."""
    call: CallMeta = {
        GROUP_NORM.name: lambda: GROUP_NORM.build(n=1, c=4, hxw=2**38, group=2),
        GRID_SAMPLER.name: lambda: GRID_SAMPLER.build(n=2**20, c=2**10, h=2**5, w=2**5, oh=1, ow=1),
        MSDA.name: lambda: MSDA.build(bs=2**28, nq=1, nh=16, ch=256, levels=((1, 1),), points=1),
        FLOYD.name: lambda: FLOYD.build(b=1, h=1, n=2**20, m=2**20, k=128, d=32),
        LAYER_NORM.name: lambda: LAYER_NORM.build(leading=(2**20,), normalized=(2**20,)),
        GRID_SAMPLER_3D.name: lambda: GRID_SAMPLER_3D.build(n=2**20, c=2**10, d=1, h=2**5, w=2**5, ow=1),
    }.get(record.name, partial(_long, record))()
    metas = {
        name: None if m is None else TensorMeta(m.dtype, m.shape, strides=(0,) * m.rank)
        for name, m in call.inputs.items()
    }
    assert max(m.size for m in metas.values() if m is not None) >= 2**40
    return call.with_inputs(**metas)


@each_operator
def test_one_element_repeated_2_to_the_40_times(
    record: OpRecord, client: Client, channel: grpc.Channel
) -> None:
    """Also by the client, which makes no room for results before the server agreed."""
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
@pytest.mark.parametrize("turns", [5, pytest.param(100, marks=pytest.mark.deep)])
def test_everything_broken_at_once_again_and_again(
    turns: int, record: OpRecord, wire: Wire, channel: grpc.Channel, tally: Tally
) -> None:
    call = break_everything(record)
    expected = validate_call(record, call)
    message, _ = codec.encode_request(call.inputs, {}, record, call.attrs, call.outputs)
    metadata = [("x-request-id", "always-the-same")]
    statuses: Counter[tuple[object, bytes]] = Counter()
    verdicts: Counter[bytes] = Counter()
    for _ in range(turns):
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
    assert list(statuses.values()) == [2 * turns]
    assert list(verdicts.values()) == [turns]
    error: Any = failure.error
    assert (error.code, error.constraint) == (expected.status, expected.violations[0].id)
    assert error.violations_total == len(expected.violations)
    assert [v.id for v in verdict.violations] == [v.id for v in expected.violations]
    # As many as fit follow the first one, in order.
    assert [v.id for v in error.violations] == [v.id for v in expected.violations][: len(error.violations)]
    tally(f"hostile: constraints broken at once by one call of {record.name}", len(expected.violations))
