"""What a signature has of a request, what it leaves out, and which requests have none."""

from __future__ import annotations

from typing import Any

import pytest
from tests.signatures import (
    NORM,
    SEED,
    in_region,
    is_plain,
    key,
    norm,
    of_recipes,
    read,
    reader,
    request,
    stripped,
)
from tests.synthetic.record import REGISTRY as SYNTHETIC

from npugrad.call import CallOptions
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.registry import REGISTRY, Registry
from npugrad.signature import MAX_KEY_BYTES, SignatureReader
from npugrad.varint import encode_varint

A2 = Product.ATLAS_A2
OTHER_SEED = 2**64 - 1
UNKNOWN = {
    "a number": b"\x88\x3f\x05",
    "eight bytes": b"\x89\x3f" + bytes(8),
    "a text": b"\x8a\x3f\x02ab",
    "a group": b"\x8b\x3f\x08\x01\x8c\x3f",
    "four bytes": b"\x8d\x3f" + bytes(4),
}
"""A field of each wire type with the number 1009, which no message has."""


def _samples() -> list[Any]:
    return [
        pytest.param(registry, record, sample.call, id=f"{record.name}-{sample.name}")
        for registry in (REGISTRY, SYNTHETIC)
        for record in registry.records.values()
        for sample in record.samples(A2)
    ]


@pytest.mark.parametrize(("registry", "record", "call"), _samples())
def test_of_a_call_of_any_operator_only_contents_label_and_priority_are_left_out(
    registry: Registry, record: OpRecord, call: CallMeta
) -> None:
    first = request(record, call, registry=registry)
    second = request(
        record, call, b"\xff", registry=registry, options=CallOptions(label="somebody", priority=-100)
    )
    found, same = read(first), read(second)
    assert is_plain(first)
    assert is_plain(second)
    if found is None:  # the longest attributes there are
        assert same is None
        assert len(stripped(first).SerializeToString()) > MAX_KEY_BYTES
        return
    assert same is not None
    assert found.key == same.key
    assert "options" not in found.taken
    options = same.taken.pop("options")
    assert bytes(options["label"]) == b"somebody"
    assert options["priority"] == 2**64 - 100
    for taken, message in ((found.taken, first), (same.taken, second)):
        assert {name: bytes(each["data"]) for name, each in taken.items()} == {
            name: getattr(message, name).data for name, meta in call.inputs.items() if meta is not None
        }


@pytest.mark.parametrize(("registry", "record", "call"), _samples())
def test_calls_that_differ_share_no_key(registry: Registry, record: OpRecord, call: CallMeta) -> None:
    own = read(request(record, call, registry=registry))
    for sample in record.samples(A2):
        other = read(request(record, sample.call, registry=registry))
        if own and other and own.key == other.key:
            assert sample.call == call


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


@pytest.mark.parametrize("extra", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("where", ["request", "options", "tensor", "meta", "recipe", "declared", "array"])
def test_unknown_fields_are_for_the_general_way(where: str, extra: bytes) -> None:
    message = of_recipes()
    message.options.verify = True
    message.grad_input.SetInParent()
    parts = {"request": message, "options": message.options, "tensor": message.mean}
    parts |= {"meta": message.mean.meta, "recipe": message.mean.recipe}
    parts |= {"declared": message.grad_input, "array": message.output_mask}
    assert is_plain(message)
    parts[where].MergeFromString(extra)
    assert read(message) is None or not is_plain(message)


def test_ten_thousand_unknown_fields_are_for_the_general_way() -> None:
    message = norm()
    message.MergeFromString(UNKNOWN["a number"] * 10_000)
    assert read(message) is None


def _delimited(number: int, data: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


def assert_general(message: Any, data: bytes) -> None:
    """Bytes that protobuf takes, and that no plan may be made by."""
    type(message).FromString(data)
    found = reader(type(message))
    assert found.read(data) is None or not found.is_plain(data)


@pytest.mark.parametrize(
    "twice",
    [
        pytest.param(lambda m: b"\x38\x02", id="attribute"),
        pytest.param(lambda m: _delimited(2, m.grad_out.SerializeToString()), id="operand"),
        pytest.param(lambda m: _delimited(1, b"\x08\x01") + _delimited(1, b"\x08\x01"), id="options"),
        pytest.param(lambda m: _delimited(1, b"\x1a\x01a\x1a\x01b"), id="label"),
        pytest.param(lambda m: _delimited(1, b"\x10\x01\x10\x01"), id="priority"),
        pytest.param(lambda m: _delimited(1, b"\x08\x01\x08\x01"), id="deterministic"),
        pytest.param(lambda m: _delimited(13, b"") + _delimited(13, b""), id="declared"),
    ],
)
def test_fields_that_come_twice_are_for_the_general_way(twice: Any) -> None:
    message = norm()
    data = message.SerializeToString() + twice(message)
    assert_general(message, data)


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(b"\x0a\x02\x08\x01\x0a\x02\x08\x01", id="meta"),
        pytest.param(b"\x12\x01a\x12\x01b", id="data"),
        pytest.param(b"\x12\x01a\x18\x01", id="two arms"),
        pytest.param(b"\x18\x01\x18\x01", id="length"),
        pytest.param(b"\x7a\x01a\x7a\x01a", id="padding"),
        pytest.param(b"\x2a\x02\x10\x01\x2a\x02\x10\x02", id="recipe"),
        pytest.param(b"\x2a\x04\x10\x01\x10\x02", id="seed"),
        pytest.param(b"\x0a\x04\x08\x01\x08\x01", id="type"),
        pytest.param(b"\x0a\x06\x12\x01\x01\x12\x01\x01", id="shape"),
        pytest.param(b"\x0a\x02\x10\x01", id="shape not packed"),
    ],
)
def test_what_comes_twice_in_an_operand_is_for_the_general_way(inner: bytes) -> None:
    message = norm()
    message.ClearField("mean")
    data = message.SerializeToString() + _delimited(4, inner)
    assert_general(message, data)


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(b"\x38\x82\x00", id="attribute"),
        pytest.param(b"\xb8\x00\x02", id="tag"),
        pytest.param(b"\x22\x82\x00\x0a\x00", id="length of an operand"),
        pytest.param(b"\x22\x03\x0a\x80\x00", id="length in an operand"),
        pytest.param(b"\x22\x05\x0a\x03\x08\x81\x00", id="type"),
        pytest.param(b"\x22\x06\x0a\x04\x12\x02\x81\x00", id="shape"),
        pytest.param(b"\x0a\x03\x10\x81\x00", id="priority"),
    ],
)
def test_numbers_in_more_bytes_than_they_need_are_for_the_general_way(tail: bytes) -> None:
    message = norm()
    message.ClearField("mean")
    message.ClearField("n")
    data = message.SerializeToString() + tail
    assert_general(message, data)


@pytest.mark.parametrize(
    "data", [b"\x12", b"\x12\x05", b"\x12\x05\x12\x02ab", b"\x12\x04\x12\x03ab", b"\x12\x80", b"\0", b"\x38"]
)
def test_lengths_that_lie_are_for_the_general_way(data: bytes) -> None:
    assert reader(REGISTRY.requests[NORM.name]).read(data) is None


def test_long_keys_are_for_the_general_way() -> None:
    message = norm()
    message.output_mask.values.extend([True] * MAX_KEY_BYTES)
    assert read(message) is None
    message.output_mask.ClearField("values")
    message.output_mask.values.extend([True] * (MAX_KEY_BYTES - len(key(message))))
    assert read(message) is None
