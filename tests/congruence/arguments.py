"""Compares what two sides handed to phase 1, argument by argument in C order, down to the bits of a double.

What may differ stands in `DOCUMENTED`, each with its reason and with what exactly it lets pass.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npugrad.meta import TensorMeta

Tensor = Mapping[str, Any]
Plan = Mapping[str, Any]

ND, NCHW, NCDHW, NCL = 2, 0, 30, 47
_RANKED = {3: NCL, 4: NCHW, 5: NCDHW}
COMPARED = ("dtype", "shape", "strides", "offset", "format", "storage")
"""Fields of a tensor argument; its address, of course, is each side's own."""
_MOST_GAPS = 2


@dataclass(frozen=True)
class Difference:
    """One thing that the sides handed down differently."""

    argument: str
    ours: Any
    theirs: Any
    excuse: str = ""  # a key of `DOCUMENTED`

    def __str__(self) -> str:
        """For a person."""
        return f"{self.argument}: service {self.ours}, torch_npu {self.theirs}"


@dataclass(frozen=True)
class Documented:
    """A difference that is meant to be."""

    field: str
    reason: str
    holds: Callable[[Tensor, Tensor], bool]


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta("uint8", tensor["shape"], strides=tensor["strides"])


def _is_contiguous(tensor: Tensor) -> bool:
    return _meta(tensor).is_contiguous


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    return _meta(tensor).content_bytes


def _is_same_walk(ours: Tensor, theirs: Tensor) -> bool:
    axes = zip(ours["shape"], ours["strides"], theirs["strides"], strict=True)
    return all(mine == other for size, mine, other in axes if size > 1)


def _is_gappy(tensor: Tensor) -> bool:
    return _span(tensor) > _MOST_GAPS * math.prod(tensor["shape"])


def _has_own_storage(ours: Tensor) -> bool:
    """Its own shape where it is contiguous, as the documents' examples have it; else one flat axis."""
    shape, storage = ours["shape"], ours["storage"]
    return bool(storage == ([_span(ours)] if not shape or not _is_contiguous(ours) else shape))


DOCUMENTED: Mapping[str, Documented] = {
    "format": Documented(
        "format",
        "the documents ask for ND and their examples pass it; torch_npu names a format by the rank alone",
        lambda ours, theirs: ours["format"] == ND and theirs["format"] == _RANKED[len(theirs["shape"])],
    ),
    "storage": Documented(
        "storage",
        "the service has the storage hold the tensor and nothing else; torch_npu passes the whole storage "
        "that the tensor is a view of, as one axis",
        lambda ours, theirs: (
            _has_own_storage(ours)
            and len(theirs["storage"]) == 1
            and theirs["storage"][0] >= theirs["offset"] + _span(theirs)
        ),
    ),
    "offset": Documented(
        "offset",
        "only what begins with the first element travels, so the service's address is that of the element",
        lambda ours, theirs: ours["offset"] == 0 < theirs["offset"],
    ),
    "packed": Documented(
        "strides",
        "an operand with gaps of more than its own size is packed on the host: copying the gaps costs more",
        lambda ours, theirs: _is_contiguous(ours) and _is_gappy(theirs),
    ),
    "idle strides": Documented(
        "strides",
        "the stride of an axis of one element, or of a tensor of none, is never stepped",
        lambda ours, theirs: 0 in ours["shape"] or _is_same_walk(ours, theirs),
    ),
}
"""Every difference that may be, by a short name."""


def names(plan: Plan) -> list[str]:
    """Names of the arguments in C order."""
    return [argument["name"] for argument in plan["arguments"]]


def values(plan: Plan) -> dict[str, Any]:
    """The arguments by name."""
    return {argument["name"]: argument["value"] for argument in plan["arguments"]}


def differences(ours: Plan, theirs: Plan) -> Iterator[Difference]:
    """All that differs between two records of phase 1; those without an excuse are mistakes."""
    for key in ("op", "status", "deterministic", "workspace"):
        if ours[key] != theirs[key]:
            yield Difference(key, ours[key], theirs[key])
    if names(ours) != names(theirs):
        yield Difference("order", names(ours), names(theirs))
        return
    for name, mine, other in zip(names(ours), values(ours).values(), values(theirs).values(), strict=True):
        if isinstance(mine, dict) and isinstance(other, dict):
            yield from _tensor_differences(name, mine, other)
        elif not is_same_value(mine, other):
            yield Difference(name, mine, other)


def is_same_value(mine: Any, other: Any) -> bool:
    """Whether two scalars, masks or nulls are of one type and value, a double to its last bit."""
    if isinstance(mine, float) and isinstance(other, float):
        return struct.pack("<d", mine) == struct.pack("<d", other)
    if isinstance(mine, list) and isinstance(other, list):
        return len(mine) == len(other) and all(map(is_same_value, mine, other))
    return type(mine) is type(other) and bool(mine == other)


def _tensor_differences(name: str, ours: Tensor, theirs: Tensor) -> Iterator[Difference]:
    for field in COMPARED:
        if ours[field] != theirs[field]:
            yield Difference(f"{name}.{field}", ours[field], theirs[field], _excuse(field, ours, theirs))


def _excuse(field: str, ours: Tensor, theirs: Tensor) -> str:
    if ours["shape"] != theirs["shape"]:
        return ""
    found = (key for key, documented in DOCUMENTED.items() if documented.field == field)
    return next((key for key in found if DOCUMENTED[key].holds(ours, theirs)), "")


def elements(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Where each element lies, in row-major order, counted in elements from the first."""
    indices = np.indices(shape).reshape(len(shape), math.prod(shape))
    return [int(place) for place in np.array(strides, np.int64) @ indices] if shape else [0]
