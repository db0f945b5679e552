"""What is read of requests before they are parsed: signatures, which protobuf confirms, and their bulk."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from tests.calls import fill
from tests.derived import told
from tests.operators import GROUP_NORM as NORM
from tests.synthetic.record import REGISTRY as SYNTHETIC

from npugrad import codec
from npugrad.bounded_parser import MAX_FIELDS, MAX_PARSED_BYTES, MessageTooBulky, bounded_parser
from npugrad.call import CallOptions
from npugrad.generators import Draw
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.recipe import Recipe
from npugrad.registry import REGISTRY, Registry
from npugrad.signature import MAX_KEY_BYTES, Signature, SignatureReader
from npugrad.v1 import backward_pb2, operators_pb2, validation_pb2
from npugrad.varint import encode_varint

SEED, OTHER_SEED = 7, 2**64 - 1
UNKNOWN = {
    "a number": b"\x88\x3f\x05",
    "eight bytes": b"\x89\x3f" + bytes(8),
    "a text": b"\x8a\x3f\x02ab",
    "a group": b"\x8b\x3f\x08\x01\x8c\x3f",
    "four bytes": b"\x8d\x3f" + bytes(4),
}
"""A field of each wire type with the number 1009, which no message has."""
_READERS = {
    message.DESCRIPTOR.full_name: SignatureReader(message.DESCRIPTOR, "unary")
    for registry in (REGISTRY, SYNTHETIC)
    for message in registry.requests.values()
}


def reader(message: type[Any]) -> SignatureReader:
    """The reader of a request."""
    return _READERS[message.DESCRIPTOR.full_name]


def read(message: Any) -> Signature | None:
    return reader(type(message)).read(message.SerializeToString())


def is_plain(message: Any) -> bool:
    return reader(type(message)).is_plain(message.SerializeToString())


def key(message: Any) -> bytes:
    found = read(message)
    assert found is not None
    return found.key


def stripped(message: Any) -> Any:
    """The message with nothing in it that a signature leaves out."""
    bare = type(message)()
    bare.CopyFrom(message)
    bare.options.label, bare.options.priority = "", 0
    if not bare.options.ByteSize():
        bare.ClearField("options")
    for field, tensor in bare.ListFields():
        if field.message_type is None or field.message_type.name != "Tensor":
            continue
        tensor.padding = b""
        kind = tensor.WhichOneof("content")
        if kind == "data":
            tensor.data = bytes(len(tensor.data))
        elif kind == "recipe":
            tensor.recipe.seed, tensor.recipe.digest = 0, b""
        elif kind == "region":
            tensor.region.name, tensor.region.offset = "", 0
    return bare


def contents(call: CallMeta, fill: bytes) -> dict[str, memoryview]:
    return {n: memoryview(fill * m.content_bytes) for n, m in call.inputs.items() if m is not None}


def request(
    record: OpRecord, call: CallMeta, fill: bytes = b"\0", registry: Registry = REGISTRY, **more: Any
) -> Any:
    made, _ = codec.encode_request(
        call.inputs, contents(call, fill), record, call.attrs, call.outputs, registry=registry, **more
    )
    return made


def norm(**more: Any) -> Any:
    return request(NORM, NORM.build(), **more)


def of_recipes(seed: int = SEED, digest: bytes = b"") -> Any:
    call = NORM.build()
    metas = {name: meta for name, meta in call.inputs.items() if meta is not None}
    made = {n: Recipe.of(Draw("uniform", (0.5, 2.0), 3), m, seed, digest) for n, m in metas.items()}
    return codec.encode_request(call.inputs, made, NORM, call.attrs)[0]


def announced(nbytes: int = 3) -> Any:
    message = norm()
    message.input.chunked_bytes = nbytes
    return message


def in_region(name: str = "r", offset: int = 0, byte_size: int = 8) -> Any:
    message = norm()
    message.input.region.name, message.input.region.offset = name, offset
    message.input.region.byte_size = byte_size
    return message


EACH = pytest.mark.parametrize(
    ("registry", "record"),
    [pytest.param(r, s, id=s.name) for r in (REGISTRY, SYNTHETIC) for s in r.records.values()],
)


@EACH
def test_only_contents_label_and_priority_are_left_out(registry: Registry, record: OpRecord) -> None:
    keys: dict[bytes, CallMeta] = {}
    for sample in record.samples(Product.ATLAS_A2):
        with told(sample.name):
            key_of_both = check_what_is_left_out(registry, record, sample.call)
            # Calls that differ share no key.
            assert key_of_both is None or keys.setdefault(key_of_both, sample.call) == sample.call


def check_what_is_left_out(registry: Registry, record: OpRecord, call: CallMeta) -> bytes | None:
    options = CallOptions(label="somebody", priority=-100)
    first = request(record, call, registry=registry)
    second = request(record, call, b"\xff", registry=registry, options=options)
    found, same = read(first), read(second)
    assert is_plain(first)
    assert is_plain(second)
    if found is None:  # the longest attributes there are
        assert same is None
        assert len(stripped(first).SerializeToString()) > MAX_KEY_BYTES
        return None
    assert same is not None
    assert found.key == same.key
    assert "options" not in found.taken
    taken_options = same.taken.pop("options")
    assert bytes(taken_options["label"]) == b"somebody"
    assert taken_options["priority"] == 2**64 - 100
    for taken, message in ((found.taken, first), (same.taken, second)):
        assert {name: bytes(each["data"]) for name, each in taken.items()} == {
            name: getattr(message, name).data for name, meta in call.inputs.items() if meta is not None
        }
    return found.key


def test_options_but_label_and_priority_are_in_the_key() -> None:
    variants = [CallOptions(deterministic=d, verify=v) for d in (False, True) for v in (False, True)]
    assert len({key(norm(options=options)) for options in variants}) == 4
    labelled = CallOptions(verify=True, label="x", priority=3)
    assert key(norm(options=labelled)) == key(norm(options=CallOptions(verify=True)))


def test_rpcs_share_no_key() -> None:
    message = norm()
    data, descriptor = message.SerializeToString(), message.DESCRIPTOR
    keys = [SignatureReader(descriptor, rpc).read(data) for rpc in ("unary", "stream")]
    assert keys[0] is not None
    assert keys[1] is not None
    assert keys[0].key != keys[1].key


def test_arms_of_the_same_length_share_no_key() -> None:
    empty, chunked, nothing = norm(), norm(), norm()
    empty.input.data, chunked.input.chunked_bytes = b"", 0
    nothing.input.ClearField("data")
    region = in_region(byte_size=0)
    recipe = norm()
    recipe.input.recipe.SetInParent()
    absent = norm()
    absent.ClearField("input")
    assert len({key(each) for each in (empty, chunked, nothing, region, recipe, absent)}) == 6


def test_seed_and_digest_of_a_recipe_are_left_out_and_nothing_else_of_it() -> None:
    first, second = of_recipes(), of_recipes(OTHER_SEED, b"d" * 32)
    found, other = read(first), read(second)
    assert found is not None
    assert other is not None
    assert found.key == other.key
    assert found.taken["input"] == {"recipe": {"seed": SEED}}
    assert other.taken["input"]["recipe"]["seed"] == OTHER_SEED
    assert bytes(other.taken["input"]["recipe"]["digest"]) == b"d" * 32
    for name, value in (("generator", "normal"), ("repeat", 4)):
        changed = of_recipes()
        setattr(changed.input.recipe, name, value)
        assert key(changed) != found.key
    changed = of_recipes()
    changed.input.recipe.parameters[1] = 2.5
    assert key(changed) != found.key


def test_name_and_offset_of_a_region_are_left_out_and_its_length_is_not() -> None:
    assert key(in_region()) == key(in_region("another", 2**40))
    assert key(in_region()) != key(in_region(byte_size=9))


def test_padding_is_left_out_wherever_it_stands() -> None:
    padded = norm()
    padded.mean.padding = bytes(1000)
    assert key(padded) == key(norm())
    data = padded.mean.SerializeToString()
    at = data.index(b"\x7a")
    first = norm()
    first.ClearField("mean")
    moved = first.SerializeToString() + b"\x22" + encode_varint(len(data)) + data[at:] + data[:at]
    assert type(first).FromString(moved) == padded
    found = reader(type(first)).read(moved)
    assert found is not None
    assert bytes(found.taken["mean"]["data"]) == padded.mean.data


def test_contents_are_views_and_a_request_may_stand_at_the_end_of_something_else() -> None:
    message = norm()
    data = b"before" + message.SerializeToString()
    found = reader(type(message)).read(data, 6)
    assert found is not None
    assert found.key == key(message)
    assert found.taken["input"]["data"].obj is data
    assert reader(type(message)).is_plain(data, 6)
    assert not reader(type(message)).is_plain(data, 5)


@pytest.mark.parametrize("where", ["request", "options", "tensor", "meta", "recipe", "declared", "array"])
def test_unknown_fields_are_for_the_general_way(where: str) -> None:
    for kind, extra in UNKNOWN.items():
        message = of_recipes()
        message.options.verify = True
        message.grad_input.SetInParent()
        parts = {"request": message, "options": message.options, "tensor": message.mean}
        parts |= {"meta": message.mean.meta, "recipe": message.mean.recipe}
        parts |= {"declared": message.grad_input, "array": message.output_mask}
        assert is_plain(message)
        parts[where].MergeFromString(extra)
        assert read(message) is None or not is_plain(message), kind
    message = norm()
    message.MergeFromString(UNKNOWN["a number"] * 10_000)
    assert read(message) is None


def _delimited(number: int, data: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


TWICE = {
    "attribute": b"\x38\x02",
    "operand": _delimited(2, norm().grad_out.SerializeToString()),
    "options": _delimited(1, b"\x08\x01") * 2,
    "label": _delimited(1, b"\x1a\x01a\x1a\x01b"),
    "priority": _delimited(1, b"\x10\x01\x10\x01"),
    "deterministic": _delimited(1, b"\x08\x01\x08\x01"),
    "declared": _delimited(13, b"") * 2,
}
"""Behind a request: what is there already, or comes twice."""
TWICE_INSIDE = {
    "meta": b"\x0a\x02\x08\x01\x0a\x02\x08\x01",
    "data": b"\x12\x01a\x12\x01b",
    "two arms": b"\x12\x01a\x18\x01",
    "length": b"\x18\x01\x18\x01",
    "padding": b"\x7a\x01a\x7a\x01a",
    "recipe": b"\x2a\x02\x10\x01\x2a\x02\x10\x02",
    "seed": b"\x2a\x04\x10\x01\x10\x02",
    "type": b"\x0a\x04\x08\x01\x08\x01",
    "shape": b"\x0a\x06\x12\x01\x01\x12\x01\x01",
    "shape not packed": b"\x0a\x02\x10\x01",
}
"""An operand."""
LONG_NUMBERS = {
    "of an attribute": b"\x38\x82\x00",
    "tag": b"\xb8\x00\x02",
    "length of an operand": b"\x22\x82\x00\x0a\x00",
    "length in an operand": b"\x22\x03\x0a\x80\x00",
    "type of an operand": b"\x22\x05\x0a\x03\x08\x81\x00",
    "shape of an operand": b"\x22\x06\x0a\x04\x12\x02\x81\x00",
    "of a priority": b"\x0a\x03\x10\x81\x00",
}
"""In more bytes than they need."""


def test_other_ways_to_write_a_request_are_for_the_general_way() -> None:
    """Bytes that protobuf takes, and that no plan may be made by."""
    without_mean, without_both = norm(), norm()
    for message, names in ((without_mean, ("mean",)), (without_both, ("mean", "n"))):
        for name in names:
            message.ClearField(name)
    tails = {name: (norm(), tail) for name, tail in TWICE.items()}
    tails |= {name: (without_mean, _delimited(4, inner)) for name, inner in TWICE_INSIDE.items()}
    tails |= {name: (without_both, tail) for name, tail in LONG_NUMBERS.items()}
    assert len(tails) == 24
    for name, (message, tail) in tails.items():
        data = message.SerializeToString() + tail
        type(message).FromString(data)
        found = reader(type(message))
        assert found.read(data) is None or not found.is_plain(data), name


def test_lengths_that_lie_are_for_the_general_way() -> None:
    for data in (
        *(b"\x12", b"\x12\x05", b"\x12\x05\x12\x02ab", b"\x12\x04\x12\x03ab"),
        *(b"\x12\x80", b"\0", b"\x38"),
    ):
        assert reader(REGISTRY.requests[NORM.name]).read(data) is None, data


def test_long_keys_are_for_the_general_way() -> None:
    message = norm()
    message.output_mask.values.extend([True] * MAX_KEY_BYTES)
    assert read(message) is None
    message.output_mask.ClearField("values")
    message.output_mask.values.extend([True] * (MAX_KEY_BYTES - len(key(message))))
    assert read(message) is None


# Against protobuf: what shares a signature decodes alike, apart from what a signature leaves out.


def _plain_messages() -> list[Any]:
    labelled = norm(options=CallOptions(deterministic=True, priority=-3, label="abc", verify=True))
    declared = NORM.build().with_outputs(grad_input=None, grad_gamma=NORM.build().inputs["gamma"])
    synthetic = SYNTHETIC.records["synthetic"]
    return [
        norm(),
        labelled,
        of_recipes(digest=b"d" * 32),
        announced(),
        in_region(),
        request(NORM, declared),
        request(synthetic, synthetic.build(), registry=SYNTHETIC),
    ]


PLAIN_MESSAGES = _plain_messages()


def _compare(message: Any, data: bytes) -> None:
    """What shares the signature of a message decodes alike."""
    found = reader(type(message))
    signature = found.read(data)
    if signature is None or signature.key != key(message):
        return
    assert found.is_plain(data)
    decoded = type(message).FromString(data)
    assert stripped(decoded) == stripped(message)
    for name, taken in signature.taken.items():
        for field, value in taken.items():
            known = getattr(getattr(decoded, name), field)
            if isinstance(value, memoryview):
                assert bytes(value) == (known if isinstance(known, bytes) else known.encode())


def test_a_change_of_any_byte_gives_another_key_or_the_general_way_or_was_of_what_is_left_out() -> None:
    for message in PLAIN_MESSAGES:
        data = message.SerializeToString()
        for at in range(len(data)):
            for change in (1, 0x80, 0xFF):
                _compare_parsed(message, data[:at] + bytes([data[at] ^ change]) + data[at + 1 :])


def _compare_parsed(message: Any, data: bytes) -> None:
    """As `_compare`; a label that is no UTF-8 is the only thing that protobuf knows better."""
    try:
        type(message).FromString(data)
    except DecodeError:
        signature = reader(type(message)).read(data)
        if signature is not None and signature.key == key(message):
            taken = signature.taken
            texts = [bytes(each[f]) for each in taken.values() for f in ("label",) if f in each]
            texts += [bytes(each["region"]["name"]) for each in taken.values() if "region" in each]
            assert any(not _is_text(text) for text in texts)
        return
    _compare(message, data)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.data())
def test_what_shares_a_signature_decodes_alike(data: st.DataObject) -> None:
    """Pieces of two requests, cut, doubled and swapped."""
    message = data.draw(st.sampled_from(PLAIN_MESSAGES))
    mutated = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(mutated))] * 2)))
        piece = data.draw(st.sampled_from([b"", bytes(mutated[start:stop]) * 2]) | st.binary(max_size=6))
        mutated[start:stop] = piece
    _compare_parsed(message, bytes(mutated))


@given(st.binary(max_size=64))
@example(b"")
def test_any_bytes_are_read_or_left_to_the_general_way(data: bytes) -> None:
    found = reader(REGISTRY.requests[NORM.name])
    found.read(data)
    found.is_plain(data)


# What is parsed of messages from anybody: contents of any length, and not much besides.

REQUEST = operators_pb2.GroupNormBackwardRequest
N, NO_FIELD, EMPTY_TENSOR = b"\x38\x01", b"\x78\x01", b"\x12\x00"
parse = bounded_parser(REQUEST)


def described(axes: int) -> Any:
    """A request that describes a tensor of so many axes."""
    message = REQUEST()
    message.grad_out.meta.shape[:] = [1] * axes
    return message


@pytest.mark.parametrize(
    "more", [N, NO_FIELD, EMPTY_TENSOR, b"\x7b\x7c"], ids=["n", "unknown", "empty", "group"]
)
def test_many_small_fields_are_too_many_in_a_large_message(more: bytes) -> None:
    begun = fill(NORM, NORM.build(n=1, c=8, hxw=2**13, group=2)).message().SerializeToString()
    assert parse(begun) == REQUEST.FromString(begun)
    for count in (MAX_FIELDS, 2**20):
        with pytest.raises(MessageTooBulky, match=r"more than 65536 bytes besides contents, or 4096 fields"):
            parse(begun + more * count)


def test_long_descriptions_are_too_long_wherever_they_are() -> None:
    validate = bounded_parser(validation_pb2.ValidateRequest)
    frame = bounded_parser(backward_pb2.ExecuteRequest)
    for axes, is_legal in ((MAX_PARSED_BYTES - 100, True), (MAX_PARSED_BYTES, False)):
        message = described(axes)
        asked = validation_pb2.ValidateRequest()
        asked.call.group_norm_backward.CopyFrom(message)
        header = backward_pb2.ExecuteRequest()
        header.header.group_norm_backward.CopyFrom(message)
        pairs: list[tuple[Any, Any]] = [(parse, message), (validate, asked), (frame, header)]
        for parser, made in pairs:
            if is_legal:
                assert parser(made.SerializeToString()) == made
            else:
                with pytest.raises(MessageTooBulky):
                    parser(made.SerializeToString())


def test_numbers_in_more_bytes_than_they_need_hide_nothing() -> None:
    padded = b"\xb8\x80\x80\x00\x81\x00"
    message = REQUEST.FromString(padded)
    assert message.n == 1
    with pytest.raises(MessageTooBulky):
        parse(padded + N * 2**20)


class Watched(bytes):
    """Bytes that count how often somebody looks at them."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        Watched.looks += 1
        return super().__getitem__(at)


def test_a_number_without_end_is_left_to_protobuf_after_ten_bytes() -> None:
    """Read to its end it would take minutes: each byte more makes a larger number."""
    Watched.looks = 0
    for begun in (b"", b"\x38", b"\x12"):
        with pytest.raises(DecodeError):
            parse(Watched(begun + b"\xff" * 2**20))
    assert Watched.looks < 64


@given(st.binary(max_size=64), st.integers(0, 64))
def test_anything_else_is_what_protobuf_makes_of_it(noise: bytes, at: int) -> None:
    """Also where a large message is damaged or cut short."""
    large = REQUEST()
    large.input.data = bytes(MAX_PARSED_BYTES + 1)
    whole = large.SerializeToString()
    data = whole[:at] + noise + whole[at:]
    try:
        expected = REQUEST.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            parse(data)
    else:
        try:
            assert parse(data) == expected
        except MessageTooBulky:
            assert expected.ByteSize() - len(expected.input.data) > MAX_PARSED_BYTES


def test_a_signature_is_not_read_through_millions_of_fields() -> None:
    """Steps are counted by what is looked at: bytes behind the first few thousand are not."""
    Watched.looks = 0
    assert reader(REGISTRY.requests[NORM.name]).read(Watched(N * 2**20)) is None
    assert Watched.looks < 2**15
