"""What tests of every record do to a call: change some things of it, by name, and see what is violated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from npugrad import Verdict
from npugrad.dtypes import Format
from npugrad.error_table import PARAM_INVALID
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.validation import validate_call


def meta(*shape: int, dtype: str = "float32") -> TensorMeta:
    """A contiguous operand."""
    return TensorMeta(dtype, shape)


def ids(verdict: Verdict) -> list[str]:
    """What is violated, in the order of the report."""
    return [violation.id for violation in verdict.violations]


@dataclass(frozen=True)
class Changes:
    """A legal call, of which some things are changed."""

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
        return {n: TensorMeta(dtype, m.shape, m.format) for n, m in self.call.inputs.items() if m is not None}

    def stored(self, name: str, storage: Any) -> dict[str, TensorMeta]:
        """One operand, given or inferred, in another format."""
        given = self.call.inputs.get(name) or self.record.output_metas(self.call)[name]
        return {name: TensorMeta(given.dtype, given.shape, storage)}

    def formats(self, name: str) -> dict[Format, tuple[int, list[str]]]:
        """What is found with one operand in each format."""
        return {storage: self.found(self.stored(name, storage)) for storage in Format}


def rows_of_161002(
    changes: Changes, rows: Sequence[tuple[int, Mapping[str, Any], list[str]]]
) -> Callable[..., None]:
    """A test that each row of the page's 161002 list is found, and cited by what is found.

    A row is its number, the change of the call that breaks it, and the constraints that say so.
    """

    def test() -> None:
        for row, change, expected in rows:
            verdict = changes.check(change)
            assert (verdict.status, ids(verdict)) == (PARAM_INVALID, expected), (row, change)
            for violation in verdict.violations:
                cited = {(source.section, source.row) for source in violation.sources}
                assert (f"return codes, {PARAM_INVALID}", f"row {row}") in cited, (row, change)

    return test
