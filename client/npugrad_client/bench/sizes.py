"""Sizes of one call as text, such as ``n=8,c=320,hxw=4096,group=32``: what ``npugrad bench --size`` takes."""

from __future__ import annotations

import inspect
import math
import re
from typing import TYPE_CHECKING, Any

from npugrad.dtypes import dtype_from_name
from npugrad_client.bench.scenario import NOT_SIZES, ScenarioError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad.operator import OpRecord

_NEXT = re.compile(r",(?=\s*\w+\s*=)")
"""A comma before the next name; the others are part of a value."""


def parse_sizes(record: OpRecord, text: str) -> dict[str, Any]:
    """Reads sizes given by name.

    Whole numbers are written as they are, a shape as ``8x1024``, lists with commas (``levels=50x67,25x34``).
    The names in the record's small workload are required, the other keywords of `OpRecord.build` optional.

    Args:
        record: The operator.
        text: ``NAME=VALUE``, separated by commas.

    Raises:
        ScenarioError: A name is unknown, missing or given twice, or a value is malformed.
    """
    forms = _forms(record)
    required = record.workloads.named["small"].sizes
    sizes: dict[str, Any] = {}
    for item in _NEXT.split(text):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals):
            raise ScenarioError(
                f"{record.name}: found {shown(item)}; expected NAME=VALUE, as in {example(record)}"
            )
        if name not in forms:
            raise ScenarioError(
                f"{record.name}: {shown(name)[1:-1]}: found {shown(item)}; expected one of {', '.join(forms)}"
            )
        if name in sizes:
            raise ScenarioError(f"{record.name}: {name} is given twice")
        read, expected = _READERS[forms[name]]
        try:
            sizes[name] = read(value)
        except ValueError:
            raise ScenarioError(f"{record.name}: {name}: found {shown(value)}; expected {expected}") from None
    missing = [name for name in required if name not in sizes]
    if missing:
        raise ScenarioError(
            f"{record.name}: {', '.join(missing)} missing; give {', '.join(required)}, "
            f"as in {example(record)}"
        )
    return sizes


def example(record: OpRecord, workload: str = "small") -> str:
    """One of the operator's workloads, as `parse_sizes` reads it."""
    sizes = record.workloads.named[workload].sizes
    return ",".join(f"{name}={_text(value)}" for name, value in sizes.items())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, tuple):
        return str(value)
    return ("," if isinstance(value[0], (tuple, bool)) else "x").join(map(_text, value))


def _forms(record: OpRecord) -> dict[str, str]:
    """The type of each keyword of the record's `build`, without type and product."""
    keywords = inspect.signature(record.build).parameters.values()
    return {p.name: p.annotation.removesuffix(" | None") for p in keywords if p.name not in NOT_SIZES}


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise ValueError(text)
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(_whole, text.split("x")))


def _pairs(text: str) -> tuple[tuple[int, ...], ...]:
    pairs = tuple(map(_shape, text.split(",")))
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(text)
    return pairs


def _flags(text: str) -> tuple[bool, ...]:
    return tuple(map(_flag, text.split(",")))


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (_whole, "a whole number, 0 or more"),
    "float": (_number, "a finite number"),
    "bool": (_flag, "true or false"),
    "str": (str, "text"),
    "DType | str": (dtype_from_name, "an element type such as int32"),
    "tuple[int, ...]": (_shape, "a shape such as 8x1024"),
    "tuple[tuple[int, int], ...]": (_pairs, "pairs of height and width such as 50x67,25x34"),
    "tuple[bool, ...]": (_flags, "flags such as true,false"),
}
"""Reader and description of a value, by the annotation of a record's `build`."""
