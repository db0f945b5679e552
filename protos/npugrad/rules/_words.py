"""Words that findings and sentences have in common, and operands as rules see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.page import Page, Rule

    Kind = Callable[[Page, str], Rule]
    Shape = tuple[int, ...]


def listed(items: Iterable[object]) -> str:
    """Formats a list as ``a, b or c``."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def shape_text(shape: Iterable[int]) -> str:
    """Formats a shape as ``[2, 3]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


def present(call: CallMeta, name: str) -> TensorMeta | None:
    """Meta of an input or a declared output; None when null, inferred or unknown."""
    return call.inputs.get(name) or call.declared(name)
