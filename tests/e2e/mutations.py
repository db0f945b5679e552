"""Random damage to good messages, and what the answers to damaged ones must be.

What is right is foretold by decoding the same bytes: the error of the first stage that refuses them, or the
reference's results.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.message import DecodeError
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
from npugrad.v1 import validation_pb2
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
        if record.accepts_unchecked(wire.call):
            return Foretold(None, {param.name: None for param in record.outputs})
        operands = {
            name: None if meta is None else layout.view(meta, wire.contents[name].data or b"")
            for name, meta in wire.call.inputs.items()
        }
        record.data_check(operands, wire.call.attrs)
    except NpugradError as error:
        return Foretold(error, {})
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

EXTREMES = (2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63))
VARINTS = (
    *(b"\xff" * 9 + b"\x01", b"\x80" * 9 + b"\x01", b"\xff" * 12),
    *(b"\xff\xff\xff\xff\x07", b"\0", b"\x0b", b"\x0c"),
)
"""Numbers at the limits of their types, one that does not end, and groups, which nobody has."""


def _int64(rng: Random) -> int:
    return rng.choice((rng.randint(-3, 40), rng.randint(-(2**63), 2**63 - 1), rng.choice(EXTREMES)))


def _int32(rng: Random) -> int:
    return rng.choice((rng.randint(-130, 130), rng.randint(-(2**31), 2**31 - 1), -(2**31), 2**31 - 1))


def _sizes(rng: Random) -> list[int]:
    return [rng.choice((rng.randint(0, 12), _int64(rng))) for _ in range(rng.randint(0, 10))]


def _float(rng: Random) -> float:
    bits = struct.pack("<I", rng.getrandbits(32))
    return float(rng.choice((*struct.unpack("<f", bits), 0.0, -0.0, 1.0, math.nan, math.inf, -math.inf)))


def _text(rng: Random) -> str:
    letters = "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(9))
    length = rng.choice((0, 1, MAX_STRING_BYTES - 1, MAX_STRING_BYTES, MAX_STRING_BYTES + 1))
    return rng.choice(("sum", "mean", letters[: rng.randrange(10)], "x" * length))


VALUES: dict[str, Callable[[Random], Any]] = {
    "int64": _int64,
    "int32": _int32,
    "int8": _int32,
    "uint64": lambda rng: rng.choice((rng.randint(0, 40), rng.getrandbits(64), 2**64 - 1)),
    "double": lambda rng: rng.choice((_float(rng), *struct.unpack("<d", rng.randbytes(8)))),
    "float": _float,
    "bool": lambda rng: rng.random() < 0.5,
    "string": _text,
}
"""What a field of the wire can hold for each kind, which is more than the kind allows."""
ENTRIES = {"int64_array": _int64, "float_array": _float, "bool_array": VALUES["bool"]}


def _damage_tensor(rng: Random, tensor: Any) -> None:
    what = rng.choice(("dtype", "format", "shape", "axis", "strides", "offset", "data", "kind"))
    if what == "dtype":
        tensor.meta.data_type = rng.randint(-1, 30)
    elif what == "format":
        tensor.meta.format = rng.randint(-1, 15)
    elif what == "shape":
        tensor.meta.shape[:] = _sizes(rng)
    elif what == "axis" and len(tensor.meta.shape):
        tensor.meta.shape[rng.randrange(len(tensor.meta.shape))] = _int64(rng)
    elif what == "strides":
        fitting = [rng.randint(0, 30) for _ in tensor.meta.shape]
        tensor.meta.strides[:] = rng.choice((_sizes(rng), fitting))
    elif what == "offset":
        tensor.meta.storage_offset = _int64(rng)
    elif what == "data":
        other = rng.randbytes(rng.randint(0, 64))
        tensor.data = rng.choice((other, tensor.data + b"\0", tensor.data[:-4]))
    elif what == "kind":
        kind = rng.choice(("region", "recipe", "chunks"))
        if kind == "chunks":
            tensor.chunked_bytes = len(tensor.data)
        else:
            getattr(tensor, kind).SetInParent()


def _fit(tensor: Any) -> None:
    """Makes the content as long as the meta says, so that damage gets past the check of lengths."""
    try:
        meta = codec.decode_meta(tensor.meta, "", "")
    except NpugradError:
        return
    if tensor.WhichOneof("content") == "data" and meta.content_bytes <= 2**16:
        times = meta.content_bytes // max(len(tensor.data), 1) + 1
        tensor.data = (tensor.data * times)[: meta.content_bytes]


def _damage_attribute(rng: Random, message: Any, param: Any) -> None:
    field = getattr(message, param.name)
    if param.type in ENTRIES:
        size = rng.choice((*range(6), MAX_ENTRIES, MAX_ENTRIES + 1))
        some = [ENTRIES[param.type](rng) for _ in range(5)]
        field.values[:] = (some * MAX_ENTRIES)[:size]
    elif param.type == "scalar":
        if rng.random() < 0.5:
            field.data_type = rng.randint(-1, 30)
        if rng.random() < 0.5:
            field.value = rng.randbytes(rng.randint(0, 9))
    else:
        setattr(message, param.name, VALUES[param.type](rng))


def good(made: Sample) -> Any:
    if made.record is not FLOYD:
        return made.message()
    return codec.unwrap(made.header()[0].header)[1]


def damaged_message(rng: Random, registry: Registry) -> tuple[OpRecord, Any]:
    """A good request with one to four things changed."""
    made = rng.choice(BASES[registry])
    record, message = made.record, good(made)
    for _ in range(rng.randint(1, 4)):
        param = rng.choice(record.params)
        if rng.random() < 0.1:
            message.ClearField(param.name)
        elif param in record.inputs:
            _damage_tensor(rng, getattr(message, param.name))
            if rng.random() < 0.5:
                _fit(getattr(message, param.name))
        elif param in record.outputs:
            declared = getattr(message, param.name).meta
            codec.encode_meta(record.infer(made.call)[param.name], declared)  # type: ignore[arg-type]
            if rng.random() < 0.5:
                declared.shape[:] = _sizes(rng)
        else:
            _damage_attribute(rng, message, param)
    if rng.random() < 1 / 6:
        message.options.priority = _int32(rng)
        message.options.label = (_text(rng) * 9)[: rng.randint(0, 80)]
        message.options.deterministic, message.options.verify = rng.random() < 0.5, rng.random() < 0.5
    return record, message


def damaged_request(rng: Random, registry: Registry) -> tuple[OpRecord, bytes]:
    """A good request as bytes, damaged; or no request at all."""
    made = rng.choice(BASES[registry])
    if rng.random() < 0.1:
        return made.record, rng.randbytes(rng.randint(0, 200))
    return made.record, damaged_bytes(rng, good(made).SerializeToString())


def damaged_bytes(rng: Random, data: bytes) -> bytes:
    """Bytes with some changed, cut out, doubled or added."""
    found = bytearray(data)
    for _ in range(rng.randint(0, 6)):
        # Metas and attributes are short, and lie at both ends of what may be mostly contents.
        at = rng.randrange(len(found) + 1)
        if rng.random() < 0.5:
            at = min(at, rng.randrange(80)) if rng.random() < 0.5 else max(at - 80, 0)
        way, size = rng.randrange(5), rng.randint(1, 40)
        if way == 0 and at < len(found):
            found[at] = rng.randrange(256)
        elif way == 1:
            del found[at : at + size]
        elif way == 2:
            found[at:at] = found[at : at + size]
        elif way == 3:
            found[at:at] = rng.choice(VARINTS)
        else:
            del found[rng.choice((at + 1, max(len(found) - size, 0))) :]
    return bytes(found)
