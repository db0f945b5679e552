"""What tests of every record do to a call: change some things of it, by name, and see what is violated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from npugrad.meta import TensorMeta
from npugrad.products import Product
from npugrad.validation import validate_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad import Verdict
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord


def meta(*shape: int, dtype: str = "float32") -> TensorMeta:
    """A contiguous operand."""
    return TensorMeta(dtype, shape)


def ids(verdict: Verdict) -> list[str]:
    """What is violated, in the order of the report."""
    return [violation.id for violation in verdict.violations]


@dataclass(frozen=True)
class Changes:
    """A legal call, of which some things are changed.

    Attributes:
        record: Its operator.
        call: The call.
    """

    record: OpRecord
    call: CallMeta

    def check(self, changed: Mapping[str, Any] | None = None, product: Product = Product.ATLAS_A2) -> Verdict:
        """Validate the call with inputs, attributes and declared outputs changed, each by its name."""
        call, changes = replace(self.call, product=product), dict(changed or {})
        inputs = {p.name: changes.pop(p.name) for p in self.record.inputs if p.name in changes}
        attrs = {p.name: changes.pop(p.name) for p in self.record.attrs if p.name in changes}
        return validate_call(
            self.record, call.with_inputs(**inputs).with_attrs(**attrs).with_outputs(**changes)
        )

    def found(self, changed: Mapping[str, Any], product: Product = Product.ATLAS_A2) -> tuple[int, list[str]]:
        """Status and what is violated."""
        verdict = self.check(changed, product)
        return verdict.status, ids(verdict)

    def all_of(self, dtype: str) -> dict[str, TensorMeta]:
        """All inputs in another type."""
        return {name: meta(*m.shape, dtype=dtype) for name, m in self.call.inputs.items() if m is not None}

    def stored(self, name: str, storage: Any) -> dict[str, TensorMeta]:
        """One operand, given or inferred, in another format."""
        given = self.call.inputs.get(name) or self.record.output_metas(self.call)[name]
        return {name: TensorMeta(given.dtype, given.shape, storage)}
