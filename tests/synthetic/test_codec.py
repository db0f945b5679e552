"""Messages and calls of the synthetic operator: every kind there and back, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.synthetic.record import REGISTRY, SYNTHETIC

from npugrad import codec
from npugrad.attributes import KINDS, AttrValue
from npugrad.errors import MalformedRequest
from npugrad.meta import CallMeta
from npugrad.products import Product
from npugrad.validation import make_call

A2 = Product.ATLAS_A2
SAMPLES = [pytest.param(sample.call, id=sample.name) for sample in SYNTHETIC.samples(A2)]
ATTRS = {param.name: param for param in SYNTHETIC.attrs}
POINTERS = [name for name, param in ATTRS.items() if KINDS[param.type].is_pointer]


def encoded(call: CallMeta) -> Any:
    contents = {n: memoryview(bytes(m.content_bytes)) for n, m in call.inputs.items() if m is not None}
    return codec.encode_request(
        call.inputs, contents, SYNTHETIC, call.attrs, call.outputs, registry=REGISTRY
    )[0]


def decoded(message: Any) -> Mapping[str, AttrValue]:
    sent = type(message).FromString(message.SerializeToString())
    return codec.decode_request(SYNTHETIC, sent, A2).call.attrs


def test_the_operator_has_every_kind_and_each_pointer_twice() -> None:
    kinds = [param.type for param in SYNTHETIC.attrs]
    assert {kind: kinds.count(kind) for kind in kinds} == {k: 1 + v.is_pointer for k, v in KINDS.items()}
    required = {c.operands[0] for c in SYNTHETIC.constraints if c.id.endswith(".not_null")}
    assert {name: name in required for name in POINTERS} == {n: not n.endswith("l") for n in POINTERS}


@pytest.mark.parametrize("call", SAMPLES)
def test_request_round_trip(call: CallMeta) -> None:
    message = encoded(call)
    wire = codec.decode_request(SYNTHETIC, type(message).FromString(message.SerializeToString()), A2)
    assert wire.call == call
    assert {n: repr(v) for n, v in wire.call.attrs.items()} == {n: repr(v) for n, v in call.attrs.items()}
    # What came is what a caller in Python may give again.
    assert make_call(SYNTHETIC, call.inputs, wire.call.attrs) == call
    header = REGISTRY.execute_request().header
    assert codec.unwrap(codec.wrap(header, SYNTHETIC, message), REGISTRY) == (SYNTHETIC, message)


@pytest.mark.parametrize("name", ATTRS)
def test_an_unset_pointer_is_null_and_another_unset_attribute_is_named(name: str) -> None:
    message = encoded(SYNTHETIC.build())
    message.ClearField(name)
    if name in POINTERS:
        assert decoded(message)[name] is None
        return
    with pytest.raises(MalformedRequest, match=f"synthetic: {name}: found nothing; expected") as caught:
        decoded(message)
    assert caught.value.operand == name


@pytest.mark.parametrize(
    ("name", "empty"), [("sizes", ()), ("weights", ()), ("mask_optional", ()), ("mode_optional", "")]
)
def test_empty_is_not_null_on_the_wire(name: str, empty: AttrValue) -> None:
    call = SYNTHETIC.build(**{name: empty})
    assert decoded(encoded(call))[name] == empty
    assert decoded(encoded(call.with_attrs(**{name: None})))[name] is None


def spoiled(message: Any, name: str, value: Any) -> None:
    field = getattr(message, name)
    if isinstance(value, dict):
        for part, found in value.items():
            setattr(field, part, found)
    elif isinstance(value, list):
        field.values[:] = value
    else:
        setattr(message, name, value)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("level", 128, "found 128; expected an integer in int8"),
        ("level", -129, "found -129; expected an integer in int8"),
        ("sizes", [0] * 1025, "found 1025 entries; expected at most 1024"),
        ("weights", [0.0] * 1025, "found 1025 entries; expected at most 1024"),
        ("mask_optional", [True] * 1025, "found 1025 entries; expected at most 1024"),
        ("alpha", {"data_type": 0}, "found data type 0; expected one of the contract's numbers"),
        ("alpha", {"data_type": 99}, "found data type 99; expected one of the contract's numbers"),
        ("alpha", {"data_type": 15}, "found dtype complex64; expected one whose data can be sent"),
        ("alpha", {"value": b""}, "found 0 bytes; expected 2 for bfloat16"),
        ("alpha", {"value": b"123"}, "found 3 bytes; expected 2 for bfloat16"),
        ("alpha_optional", {"data_type": 13, "value": b"\2"}, "found a bool of 2; expected 0 or 1"),
        ("mode", "a\0b", r"found 'a\\x00b'; expected text without NUL of at most 4096 bytes"),
        ("mode_optional", "ü" * 2049, "found 'üü.*; expected text without NUL of at most 4096 bytes"),
    ],
)
def test_an_attribute_that_is_not_sane_is_malformed(name: str, value: Any, problem: str) -> None:
    message = encoded(SYNTHETIC.build())
    spoiled(message, name, value)
    with pytest.raises(MalformedRequest, match=f"^synthetic: {name}: {problem}") as caught:
        decoded(message)
    assert (caught.value.operator, caught.value.operand) == ("synthetic", name)
