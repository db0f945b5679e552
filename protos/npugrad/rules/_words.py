"""Words that findings and sentences have in common, and operands as rules see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad.dtypes import DType
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.page import Page, Rule

    Kind = Callable[[Page, str], Rule]
    Shape = tuple[int, ...]


FLOATS: Mapping[Product, tuple[DType, ...]] = {
    Product.ATLAS_TRAINING: (DType.FLOAT32, DType.FLOAT16),
    Product.ATLAS_A2: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
    Product.ATLAS_A3: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
}
"""What most pages say: BFLOAT16 everywhere but on the Atlas training series."""
SAID: Mapping[str, Any] = {
    "vendor": "accepts",
    "pick": "The document's parameter section says so; the vendor's source accepts others. npugrad: refused.",
}
"""Of a rule that only a parameter's description has."""


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
