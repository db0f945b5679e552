"""Argument combinations: legal calls, and what each is about; those of an operator are its module in `calls`.

Plain calls vary types, sizes, masks, modes and scalars; strided ones vary how operands lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from npugrad.meta import CallMeta, TensorMeta

FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Combination:
    """One call, the same for both sides.

    Attributes:
        name: What is particular about it.
        call: Metas and attributes.
        deterministic: Whether the deterministic option is on.
    """

    name: str
    call: CallMeta
    deterministic: bool = False


def restride(call: CallMeta, **layouts: tuple[tuple[int, ...], int]) -> CallMeta:
    """The call with operands that have these strides and this storage offset, in elements."""
    changed = {}
    for name, (strides, offset) in layouts.items():
        meta = call.tensor(name)
        changed[name] = TensorMeta(meta.dtype, meta.shape, meta.format, strides, offset)
    return call.with_inputs(**changed)


def reshape(call: CallMeta, **shapes: tuple[int, ...]) -> CallMeta:
    """The call with operands of these shapes."""
    return call.with_inputs(
        **{name: TensorMeta(call.tensor(name).dtype, shape) for name, shape in shapes.items()}
    )


def bits(mask: tuple[bool, ...]) -> str:
    """A mask for a name."""
    return "mask " + "".join("01"[bit] for bit in mask)


def combinations(operator: str) -> Iterator[Combination]:
    """Combinations of an operator, always the same and in the same order."""
    found: Iterator[Combination] = import_module(f"tests.congruence.calls.{operator}").combinations()
    return found
