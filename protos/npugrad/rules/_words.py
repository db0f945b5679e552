"""What the kinds of rules have in common: words, operands as rules see them, and how a kind is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad import changes
from npugrad.dtypes import DType
from npugrad.operator import Finding
from npugrad.page import Page, Rule
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from npugrad.meta import CallMeta, TensorMeta

    Kind = Callable[[Page, str], Rule]
    Shape = tuple[int, ...]
    Said = tuple[str, str] | None
    """What is found and what is expected; None if the rule holds."""

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


def any_empty(*names: str) -> Callable[[CallMeta], bool]:
    """Whether one of some operands has no elements."""
    return lambda call: any(meta is not None and not meta.size for meta in map(call.inputs.get, names))


def of_tensor(
    kind: str,
    text: str,
    judge: Callable[[CallMeta, TensorMeta], Said],
    edits: Callable[[], Iterator[changes.Edit]],
    *about: str,
    **extra: Any,
) -> Kind:
    """A kind of rule about a tensor that is there.

    Args:
        kind: As in `Rule`.
        text: As in `Rule`, with ``{}`` for the C names of the operands in `about`.
        judge: What is found and expected of a call's tensor.
        edits: What may break it.
        about: Further operands that it concerns.
        extra: The rest of `Rule`.
    """

    def made(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            meta = present(call, name)
            said = None if meta is None else judge(call, meta)
            return Finding(*said) if said else None

        words, breaks = text.format(*(page.params[each].c_name for each in about)), page.edited(name, edits())
        return Rule(kind=kind, text=words, check=check, breaks=breaks, about=about, **extra)

    return made


def of_attr(
    kind: str, text: str, judge: Callable[[CallMeta, str], Said], others: Iterable[Any] = (), *about: str
) -> Kind:
    """A kind of rule about an attribute, as in `of_tensor`; the judge has its name, `others` may break it."""

    def made(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            said = judge(call, name)
            return Finding(*said) if said else None

        words = text.format(*(page.params[each].c_name for each in about))
        return Rule(kind=kind, text=words, check=check, breaks=changes.numbered(name, others), about=about)

    return made
