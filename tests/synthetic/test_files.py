"""Attributes of every kind on the command line and in `.npz` files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from tests.synthetic.record import SYNTHETIC

from npugrad.attributes import Scalar
from npugrad.meta import CallMeta
from npugrad.products import Product
from npugrad.validation import make_call
from npugrad_client._cli import explain, files
from npugrad_client._cli.files import FileError

SAMPLES = [pytest.param(s.call, id=s.name) for s in SYNTHETIC.samples(Product.ATLAS_A2)]


def saved(value: Any) -> Any:
    """An attribute as NumPy saves it."""
    if isinstance(value, Scalar):
        return np.frombuffer(value.content, value.dtype.numpy).reshape(())
    return np.array(value)


@pytest.mark.parametrize("call", SAMPLES)
def test_attributes_come_back_from_a_file(tmp_path: Path, call: CallMeta) -> None:
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("count=-3", -3),
        ("level=-128", -128),
        ("seed=18446744073709551615", 2**64 - 1),
        ("sizes=2,3", (2, 3)),
        ("sizes=[2, 3]", (2, 3)),
        ("sizes=[]", ()),
        ("sizes_optional=null", None),
        ("weights=0.5,2", (0.5, 2.0)),
        ("weights=[]", ()),
        ("weights_optional=None", None),
        ("mask_optional=[]", ()),
        ("mask_optional=[true]", (True,)),
        ("alpha=float32:0.5", Scalar("float32", 0.5)),
        ("alpha=int8:3", Scalar("int8", 3)),
        ("alpha=bool:true", Scalar("bool", True)),
        ("alpha=0.5", 0.5),
        ("alpha=3", 3),
        ("alpha=false", False),
        ("alpha_optional=null", None),
        ("mode=sum", "sum"),
        ("mode=a=b", "a=b"),
        ("mode_optional=null", None),
        ('mode_optional="null"', "null"),
        ('mode_optional=""', ""),
        (r'mode_optional=" \u00e4"', " ä"),
        ("mode_optional=", ""),
    ],
)
def test_attributes_are_parsed_by_their_kind(text: str, value: Any) -> None:
    (found,) = files.parse_attrs(SYNTHETIC, [text]).items()
    assert found == (text.partition("=")[0], value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("level=x", "an integer"),
        ("count=null", "an integer"),
        ("sizes=2,", r"integers such as 2,3, \[\] or null"),
        ("sizes=", r"integers such as 2,3, \[\] or null"),
        ("sizes=[2", r"integers such as 2,3, \[\] or null"),
        ("weights=a", r"numbers such as 0.5,2, \[\] or null"),
        ("mask_optional=2", "bools such as true,false, or null"),
        ("alpha=x", "a number, with a type such as float32:0.5"),
        ("alpha=float33:1", "a number, with a type such as float32:0.5"),
        ("alpha=int8:128", "a number, with a type such as float32:0.5"),
        ("alpha=int8:1.5", "a number, with a type such as float32:0.5"),
        ("alpha=:1", "a number, with a type such as float32:0.5"),
        ('mode="a', "text, in double quotes if it is empty or the word null, or has double quotes"),
    ],
)
def test_an_attribute_that_cannot_be_read_is_told(text: str, expected: str) -> None:
    with pytest.raises(FileError, match=f"^--attr .*: expected {expected}"):
        files.parse_attrs(SYNTHETIC, [text])


def test_kinds_are_explained() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(explain._parameters(SYNTHETIC))
    lines = [line.split() for line in captured.get().splitlines()]
    found = {words[0]: " ".join(words[2:-1]) for words in lines[2:18]}
    kinds = {p.name: f"optional {p.type}" if p.optional else p.type for p in SYNTHETIC.attrs}
    assert found == kinds
