"""Random damage to good messages, and what the answers to damaged ones must be.

What is right is foretold by decoding the same bytes: the error of the first stage that refuses them, or the
reference's results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from tests.calls import TIMEOUT_S, Sample, failure_of, fill, registry_of
from tests.e2e.harness import (
    VICTIM_INPUT_ARENA,
    VICTIM_OUTPUT_ARENA,
    Array,
    Wire,
    differences,
    local_results,
)
from tests.operators import FLOYD
from tests.synthetic.record import REGISTRY as SYNTHETIC_REGISTRY

from npugrad import codec, layout
from npugrad.attributes import MAX_ENTRIES, MAX_STRING_BYTES
from npugrad.codec import WireCall
from npugrad.errors import (
    CallTooLarge,
    MalformedRequest,
    MalformedTensor,
    NpugradError,
    OperatorError,
    RequestError,
)
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.registry import REGISTRY, Registry
from npugrad.status import ascii_message
from npugrad.v1 import operators_pb2, validation_pb2
from npugrad.validation import error_from_verdict, validate_call

# Floyd's least message has megabytes: only its header is damaged, whose operands never come.
BASES = {
    registry: [fill(record, record.build(), seed=5) for record in registry.records.values()]
    for registry in (REGISTRY, SYNTHETIC_REGISTRY)
}

# ------------------------------------------------------------------------------------------- what is right


@dataclass(frozen=True)
class Foretold:
    """What the answer to some bytes must be: an error, or results."""

    error: NpugradError | None
    results: dict[str, Array | None]


def foretell(record: OpRecord, data: bytes, *, chunked: bool) -> Foretold:
    """Decodes bytes as the server does and says what must come back.

    With `chunked` they are the header of a stream, after which nothing comes.
    """
    try:
        message = registry_of(record).requests[record.name].FromString(data)
    except DecodeError:
        return Foretold(MalformedRequest("request: does not parse"), {})
    try:
        wire = codec.decode_request(record, message, Product.ATLAS_A2)
        verdict = validate_call(record, wire.call)
        if verdict.violations:
            raise error_from_verdict(record, verdict)
        codec.check_contents(wire, chunked=chunked)
        _check_size(wire, [m.nbytes for m in verdict.outputs.values() if m is not None])
        _check_complete(wire)
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


def _check_complete(wire: WireCall) -> None:
    for name, content in wire.contents.items():
        if content.follows and content.nbytes:
            text = f"found the end of the stream after 0 bytes; expected the announced {content.nbytes}"
            where = {"operator": wire.record.name, "operand": name}
            raise MalformedTensor(f"{wire.record.name}: {name}: {text}", **where)


def as_header(record: OpRecord, data: bytes) -> bytes:
    """The first frame of a stream around the bytes of a request, which need not be one."""
    return _within(record, data, registry_of(record).execute_request.DESCRIPTOR.fields_by_name["header"])


def as_question(record: OpRecord, data: bytes) -> bytes:
    """What Validate is asked around the bytes of a request, which need not be one."""
    return _within(record, data, validation_pb2.ValidateRequest.DESCRIPTOR.fields_by_name["call"])


def _within(record: OpRecord, data: bytes, outer: Any) -> bytes:
    for field in (outer.message_type.fields_by_name[record.name], outer):
        data = _varint(field.number << 3 | 2) + _varint(len(data)) + data
    return data


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


def assert_validated(wire: Wire, record: OpRecord, data: bytes) -> None:
    """Asks Validate about the bytes of a request: it tells what the validator says in this process."""
    ask: Any = wire.channel.unary_unary(
        f"/{validation_pb2.DESCRIPTOR.services_by_name['ValidationService'].full_name}/Validate",
        request_serializer=bytes,
        response_deserializer=validation_pb2.ValidateResponse.FromString,
    )

    def act() -> Any:
        return ask(as_question(record, data), timeout=TIMEOUT_S)

    expected, call = _decoded(record, data)
    if call is None:
        assert failure_of(act).error.reason == expected
        return
    found, verdict = act(), validate_call(record, call)
    assert found.status == verdict.status
    assert [v.id for v in found.violations] == [v.id for v in verdict.violations]


def _decoded(record: OpRecord, data: bytes) -> tuple[str, CallMeta | None]:
    """The call of a request; the reason for which there is none."""
    try:
        message = registry_of(record).requests[record.name].FromString(data)
        return "", codec.decode_request(record, message, Product.ATLAS_A2).call
    except DecodeError:
        return MalformedRequest.default_reason, None
    except NpugradError as error:
        return error.reason, None


def assert_answered(wire: Wire, record: OpRecord, data: bytes) -> str:
    """Sends bytes as a unary call and as a header; returns the reason of the right answer to the former."""
    frames = [as_header(record, data)]
    _assert_told(
        foretell(record, data, chunked=True), record, lambda: wire.execute(frames, registry_of(record))
    )
    return _assert_told(foretell(record, data, chunked=False), record, lambda: wire.unary(record, data))


def _assert_told(expected: Foretold, record: OpRecord, act: Callable[[], Any]) -> str:
    if expected.error is None:
        assert differences(expected.results, act()) == []
        return "OK"
    error = failure_of(act).error
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
INT32 = st.one_of(st.integers(-130, 130), st.integers(-(2**31), 2**31 - 1))
LENGTHS = st.sampled_from([0, 1, MAX_STRING_BYTES - 1, MAX_STRING_BYTES, MAX_STRING_BYTES + 1])
# What a field of the wire can hold for each kind, which is more than the kind allows.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int64": INT64,
    "int32": INT32,
    "int8": INT32,
    "uint64": st.integers(0, 2**64 - 1),
    "double": st.floats(),
    "bool": st.booleans(),
    "string": st.one_of(st.sampled_from(["sum", "mean"]), st.text(max_size=9), LENGTHS.map("x".__mul__)),
}
ENTRIES: dict[str, st.SearchStrategy[Any]] = {
    "int64_array": INT64,
    "float_array": st.floats(width=32),
    "bool_array": st.booleans(),
}


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


def good(made: Sample) -> Any:
    """The request of a legal call."""
    if made.record is not FLOYD:
        return made.message()
    return codec.unwrap(made.header()[0].header)[1]


@st.composite
def damaged_message(draw: st.DrawFn, registry: Registry) -> tuple[OpRecord, Any]:
    """A good request with one to four things changed."""
    made = draw(st.sampled_from(BASES[registry]))
    record, message = made.record, good(made)
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
            draw(damaged_attribute(message, param))
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
    declared = registry_of(record).requests[record.name]()
    meta = record.infer(call)[name]
    codec.encode_meta(meta, getattr(declared, name).meta)  # type: ignore[arg-type]
    if draw(st.booleans()):
        getattr(declared, name).meta.shape[:] = draw(SIZES)
    return getattr(declared, name).meta


@st.composite
def damaged_attribute(draw: st.DrawFn, message: Any, param: Any) -> None:
    """Gives an attribute another value, legal or not."""
    field = getattr(message, param.name)
    if param.type in ENTRIES:
        entry = ENTRIES[param.type]
        size = draw(st.sampled_from([*range(6), MAX_ENTRIES, MAX_ENTRIES + 1]))
        field.values[:] = (draw(st.lists(entry, min_size=1, max_size=5)) * MAX_ENTRIES)[:size]
    elif param.type == "scalar":
        if draw(st.booleans()):
            field.data_type = draw(st.integers(-1, 30))
        if draw(st.booleans()):
            field.value = draw(st.binary(max_size=9))
    else:
        setattr(message, param.name, draw(VALUES[param.type]))


@st.composite
def damaged_bytes(draw: st.DrawFn, registry: Registry) -> tuple[OpRecord, bytes]:
    """A good request as bytes, with some of them changed, cut out or doubled; or no request at all."""
    made = draw(st.sampled_from(BASES[registry]))
    data = bytearray(good(made).SerializeToString())
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
