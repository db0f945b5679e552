"""Random damage to good messages: the server answers what the record says of the damaged message.

What is right is foretold here by decoding the same bytes: the error of the first stage that refuses them, or
the reference's results. A server that crashes, hangs, leaks, or answers anything else fails.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.calls import TIMEOUT_S, failure_of, fill
from tests.e2e.harness import (
    GRID_SAMPLER,
    GROUP_NORM,
    MSDA,
    VICTIM_INPUT_ARENA,
    VICTIM_OUTPUT_ARENA,
    differences,
    local_results,
    unary_results,
)

from npugrad import codec, layout
from npugrad.errors import CallTooLarge, MalformedRequest, NpugradError, OperatorError, RequestError
from npugrad.products import Product
from npugrad.registry import REGISTRY
from npugrad.status import ascii_message
from npugrad.v1 import operators_pb2
from npugrad.validation import error_from_verdict, validate_call

if TYPE_CHECKING:
    import grpc
    from tests.e2e.harness import Array
    from tests.summary import Tally

    from npugrad.codec import WireCall
    from npugrad.operator import OpRecord

pytestmark = pytest.mark.usefixtures("unharmed")

# Floyd's least message has megabytes; its metas are damaged in the tests of the contract.
BASES = {record.name: fill(record, record.build(), seed=5) for record in (GROUP_NORM, GRID_SAMPLER, MSDA)}
HYPOTHESIS = settings(
    max_examples=300,
    deadline=None,  # no absolute times
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
)


# ------------------------------------------------------------------------------------------- what is right


@dataclass(frozen=True)
class Foretold:
    """What the answer to some bytes must be: an error, or results."""

    error: NpugradError | None
    results: dict[str, Array | None]


def foretell(record: OpRecord, data: bytes) -> Foretold:
    """Decodes bytes as the unary method does and says what must come back."""
    try:
        message = REGISTRY.requests[record.name].FromString(data)
    except DecodeError:
        return Foretold(MalformedRequest("request: does not parse"), {})
    try:
        wire = codec.decode_request(record, message, Product.ATLAS_A2)
        verdict = validate_call(record, wire.call)
        if verdict.violations:
            raise error_from_verdict(record, verdict)
        codec.check_contents(wire, chunked=False)
        _check_size(wire, [m.nbytes for m in verdict.outputs.values() if m is not None])
    except NpugradError as error:
        return Foretold(error, {})
    operands = {
        name: None if meta is None else layout.view(meta, wire.contents[name].data or b"")
        for name, meta in wire.call.inputs.items()
    }
    return Foretold(None, local_results(record, wire.call, operands))


def _check_size(wire: WireCall, outputs: list[int]) -> None:
    """Only sizes far above the arenas can come of damage to a small call."""
    operands = [m for m in wire.call.inputs.values() if m is not None]
    if (
        sum(m.content_bytes for m in operands) > VICTIM_INPUT_ARENA
        or sum(outputs) > VICTIM_OUTPUT_ARENA
        or sum(m.nbytes for m in operands) > 2**40
    ):
        raise CallTooLarge("too large", operator=wire.record.name)


def assert_answered(channel: grpc.Channel, record: OpRecord, data: bytes) -> str:
    """Sends bytes to the unary method of an operator; returns the reason of the right answer."""
    method: Any = channel.unary_unary(
        f"/npugrad.v1.BackwardService/{record.rpc}",
        response_deserializer=REGISTRY.responses[record.name].FromString,
    )
    expected = foretell(record, data)
    if expected.error is None:
        response = method(data, timeout=TIMEOUT_S)
        assert differences(expected.results, unary_results(record, response)) == []
        return "OK"
    error = failure_of(lambda: method(data, timeout=TIMEOUT_S)).error
    assert (type(error), error.reason) == (type(expected.error), expected.error.reason)
    if isinstance(error, (OperatorError, RequestError)) and expected.error.operator:
        assert str(error) == ascii_message(str(expected.error))
        assert error.operator == record.name
    if isinstance(error, OperatorError) and isinstance(expected.error, OperatorError):
        assert (error.code, error.constraint) == (expected.error.code, expected.error.constraint)
        assert error.violations_total == len(expected.error.violations)
    if isinstance(error, RequestError) and isinstance(expected.error, RequestError):
        assert error.operand == expected.error.operand
    return error.reason


# ---------------------------------------------------------------------------------------------- damage

INT64 = st.one_of(
    st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1])
)
SIZES = st.lists(st.one_of(st.integers(0, 12), INT64), max_size=10)
BOOLS = st.lists(st.booleans(), max_size=5)


@st.composite
def damaged_tensor(draw: st.DrawFn, tensor: Any) -> None:
    """Changes one thing of a tensor."""
    what = draw(st.sampled_from(["dtype", "format", "shape", "axis", "strides", "offset", "data", "kind"]))
    if what == "dtype":
        tensor.meta.data_type = draw(st.integers(-1, 30))
    elif what == "format":
        tensor.meta.format = draw(st.integers(-1, 15))
    elif what == "shape":
        tensor.meta.shape[:] = draw(SIZES)
    elif what == "axis" and len(tensor.meta.shape):
        tensor.meta.shape[draw(st.integers(0, len(tensor.meta.shape) - 1))] = draw(INT64)
    elif what == "strides":
        rank = len(tensor.meta.shape)
        tensor.meta.strides[:] = draw(
            st.one_of(SIZES, st.lists(st.integers(0, 30), min_size=rank, max_size=rank))
        )
    elif what == "offset":
        tensor.meta.storage_offset = draw(INT64)
    elif what == "data":
        tensor.data = draw(
            st.one_of(st.binary(max_size=64), st.just(tensor.data + b"\0"), st.just(tensor.data[:-4]))
        )
    elif what == "kind":
        draw(
            st.sampled_from([tensor.region.SetInParent, tensor.recipe.SetInParent, lambda: _announce(tensor)])
        )()


def _announce(tensor: Any) -> None:
    tensor.chunked_bytes = len(tensor.data)


def _fitting(tensor: Any) -> None:
    """Makes the content as long as the meta says, so that damage gets past the check of lengths."""
    try:
        meta = codec.decode_meta(tensor.meta, "", "")
    except NpugradError:
        return
    if tensor.WhichOneof("content") == "data" and meta.content_bytes <= 2**16:
        tensor.data = (tensor.data * (meta.content_bytes // max(len(tensor.data), 1) + 1))[
            : meta.content_bytes
        ]


@st.composite
def damaged_message(draw: st.DrawFn) -> tuple[OpRecord, Any]:
    """A good request with one to four things changed."""
    made = BASES[draw(st.sampled_from(list(BASES)))]
    record, message = made.record, made.message()
    for _ in range(draw(st.integers(1, 4))):
        param = draw(st.sampled_from(record.params))
        if draw(st.integers(0, 9)) == 0:
            message.ClearField(param.name)
        elif param in record.inputs:
            draw(damaged_tensor(getattr(message, param.name)))
            if draw(st.booleans()):
                _fitting(getattr(message, param.name))
        elif param in record.outputs:
            getattr(message, param.name).meta.CopyFrom(_declared(draw, made.call, record, param.name))
        else:
            _damage_attribute(draw, message, param)
    if draw(st.integers(0, 5)) == 0:
        options = operators_pb2.CallOptions(
            priority=draw(st.integers(-(2**31), 2**31 - 1)),
            label=draw(st.text(max_size=80)),
            deterministic=draw(st.booleans()),
            verify=draw(st.booleans()),
        )
        message.options.CopyFrom(options)
    return record, message


def _declared(draw: st.DrawFn, call: Any, record: OpRecord, name: str) -> Any:
    """The meta of an output as it should be, with one thing changed or none."""
    declared = REGISTRY.requests[record.name]()
    meta = record.infer(call)[name]
    codec.encode_meta(meta, getattr(declared, name).meta)  # type: ignore[arg-type]
    if draw(st.booleans()):
        getattr(declared, name).meta.shape[:] = draw(SIZES)
    return getattr(declared, name).meta


def _damage_attribute(draw: st.DrawFn, message: Any, param: Any) -> None:
    if param.type == "bool_array":
        getattr(message, param.name).values[:] = draw(BOOLS)
    else:
        setattr(
            message,
            param.name,
            draw({"int64": INT64, "double": st.floats(), "bool": st.booleans()}[param.type]),
        )


@st.composite
def damaged_bytes(draw: st.DrawFn) -> tuple[OpRecord, bytes]:
    """A good request as bytes, with some of them changed, cut out or doubled; or no request at all."""
    made = BASES[draw(st.sampled_from(list(BASES)))]
    data = bytearray(made.message().SerializeToString())
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data) - 1))
        way = draw(st.sampled_from(["set", "cut", "double", "end"]))
        if way == "set":
            data[at] = draw(st.integers(0, 255))
        elif way == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif way == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
        else:
            del data[at + 1 :]
        if not data:
            break
    return made.record, draw(st.binary(max_size=200)) if draw(st.integers(0, 9)) == 0 else bytes(data)


# ------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def outcomes(tally: Tally) -> Any:
    """Counts reasons; the summary shows them."""
    counted: Counter[str] = Counter()
    yield counted
    for reason, count in counted.items():
        tally(f"hostile: random messages answered with {reason}", count)


@HYPOTHESIS
@given(damaged_message())
def test_damaged_messages(
    channel: grpc.Channel, outcomes: Counter[str], damaged: tuple[OpRecord, Any]
) -> None:
    record, message = damaged
    reason = assert_answered(channel, record, message.SerializeToString())
    outcomes[reason] += 1
    event(reason)


@HYPOTHESIS
@given(damaged_bytes())
def test_damaged_bytes(
    channel: grpc.Channel, outcomes: Counter[str], damaged: tuple[OpRecord, bytes]
) -> None:
    reason = assert_answered(channel, *damaged)
    outcomes[reason] += 1
    event(reason)
