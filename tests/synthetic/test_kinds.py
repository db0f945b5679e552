"""Every kind of attribute in messages, on the command line, in files and in what generators write."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from tests.synthetic.client import GENERATED, SOURCE
from tests.synthetic.record import REGISTRY, SYNTHETIC

from npugrad import codec
from npugrad._tools import gen_docs
from npugrad.attributes import KINDS, AttrValue, Scalar
from npugrad.errors import MalformedRequest
from npugrad.meta import CallMeta
from npugrad.products import Product
from npugrad.validation import make_call
from npugrad_client._cli import explain, files
from npugrad_client._cli.terminal import FileError

A2 = Product.ATLAS_A2
SAMPLES = [sample.call for sample in SYNTHETIC.samples(A2)]
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


def test_requests_come_back() -> None:
    for call in SAMPLES:
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
        empty: Any = {"scalar": None, "string": ""}.get(ATTRS[name].type, ())
        assert decoded(encoded(SYNTHETIC.build(**{name: empty})))[name] == empty
        return
    with pytest.raises(MalformedRequest, match=f"synthetic: {name}: found nothing; expected") as caught:
        decoded(message)
    assert caught.value.operand == name


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


# Files and the command line.


def saved(value: Any) -> Any:
    """An attribute as NumPy saves it."""
    if isinstance(value, Scalar):
        return np.frombuffer(value.content, value.dtype.numpy).reshape(())
    return np.array(value)


def test_attributes_come_back_from_a_file(tmp_path: Path) -> None:
    for call in SAMPLES:
        arrays = {name: saved(value) for name, value in call.attrs.items() if value is not None}
        arrays["input"] = np.zeros(call.tensor("input").shape, call.tensor("input").dtype.numpy)
        for name in [name for name, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]:
            arrays[f"{name}:bfloat16"] = arrays.pop(name).view(np.uint16)
        np.savez(tmp_path / "call.npz", **arrays)
        operands, attrs = files.read_call(SYNTHETIC, tmp_path / "call.npz")
        files.check_complete(SYNTHETIC, attrs)
        assert list(operands) == ["input"]
        assert make_call(SYNTHETIC, call.inputs, attrs) == call


def test_a_scalar_of_bits_without_a_type_is_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "call.npz", alpha=np.array(1.5, ml_dtypes.bfloat16))
    with pytest.raises(FileError, match=r"alpha: raw 2-byte elements without a type; .*alpha=bfloat16"):
        files.read_call(SYNTHETIC, tmp_path / "call.npz")


def test_what_may_be_left_out_is_not_missing() -> None:
    with pytest.raises(FileError) as caught:
        files.check_complete(SYNTHETIC, {})
    missing = [param.name for param in SYNTHETIC.attrs if not param.optional]
    assert f"no value for {', '.join(missing)}; set" in str(caught.value)


PARSED: dict[str, Any] = {
    "count=-3": -3,
    "level=-128": -128,
    "seed=18446744073709551615": 2**64 - 1,
    **dict.fromkeys(("sizes=2,3", "sizes=[2, 3]"), (2, 3)),
    **dict.fromkeys(("sizes=[]", "weights=[]", "mask_optional=[]"), ()),
    **dict.fromkeys(("sizes_optional=null", "alpha_optional=null", "mode_optional=null"), None),
    "weights=0.5,2": (0.5, 2.0),
    "ratio=0.5": 0.5,
    "weights_optional=None": None,
    "mask_optional=[true]": (True,),
    "alpha=float32:0.5": Scalar("float32", 0.5),
    "alpha=int8:3": Scalar("int8", 3),
    "alpha=bool:true": Scalar("bool", True),
    "alpha=0.5": 0.5,
    "alpha=3": 3,
    "alpha=false": False,
    "mode=sum": "sum",
    "mode=a=b": "a=b",
    'mode_optional="null"': "null",
    **dict.fromkeys(('mode_optional=""', "mode_optional="), ""),
    r'mode_optional=" \u00e4"': " ä",
}
"""What is written for an attribute on the command line, and its value."""
INTEGERS, NUMBER = r"integers such as 2,3, \[\] or null", "a number, with a type such as float32:0.5"
UNREADABLE = {
    **dict.fromkeys(("level=x", "count=null"), "an integer"),
    **dict.fromkeys(("sizes=2,", "sizes=", "sizes=[2"), INTEGERS),
    "ratio=a": "a number",
    "weights=a": r"numbers such as 0.5,2, \[\] or null",
    "mask_optional=2": "bools such as true,false, or null",
    **dict.fromkeys(("alpha=x", "alpha=float33:1", "alpha=int8:128", "alpha=int8:1.5", "alpha=:1"), NUMBER),
    'mode="a': "text, in double quotes if it is empty or the word null, or has double quotes",
}


def test_attributes_are_parsed_by_their_kind_or_refused() -> None:
    for text, value in PARSED.items():
        (found,) = files.parse_attrs(SYNTHETIC, [text]).items()
        assert found == (text.partition("=")[0], value), text
        assert type(found[1]) is type(value), text
    for text, expected in UNREADABLE.items():
        with pytest.raises(FileError, match=f"^--attr .*: expected {expected}"):
            files.parse_attrs(SYNTHETIC, [text])


def test_kinds_are_explained() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(explain._parameters(SYNTHETIC))
    lines = [line.split() for line in captured.get().splitlines()]
    found = {words[0]: " ".join(words[2:-1]) for words in lines[2:19]}
    kinds = {p.name: f"optional {p.type}" if p.optional else p.type for p in SYNTHETIC.attrs}
    assert found == kinds


# What generators write.


@pytest.mark.parametrize("owner", ["Operators", "AsyncOperators", "FutureOperators"])
def test_methods_take_each_kind_and_leave_out_what_is_optional(owner: str) -> None:
    parameters = inspect.signature(getattr(GENERATED, owner).synthetic).parameters
    for param in SYNTHETIC.attrs:
        found = parameters[param.name]
        assert found.annotation == KINDS[param.type].annotation, param.name
        assert found.default is (None if param.optional else inspect.Parameter.empty), param.name
        assert found.kind is inspect.Parameter.KEYWORD_ONLY


def test_the_text_says_what_may_be_none_and_shows_a_call() -> None:
    text = inspect.getdoc(GENERATED.Operators.synthetic) or ""
    assert "sizes: One.\n" in text
    assert "sizes_optional: One. May be None.\n" in text
    assert "alpha=Scalar('bfloat16', 1.5)" in text
    assert 'mode="sum"' in text


def test_a_name_is_imported_where_a_kind_needs_it() -> None:
    assert SOURCE.count("from npugrad.attributes import Scalar") == 1


def test_tables_say_the_kind_of_each_attribute() -> None:
    found = {param.name: gen_docs._kind(param) for param in SYNTHETIC.params}
    assert (found["sizes"], found["sizes_optional"]) == ("int64_array", "int64_array, may be null")
    assert (found["level"], found["alpha"], found["mode"]) == ("int8", "scalar", "string")
    assert (found["input"], found["seen"]) == ("input", "output")
