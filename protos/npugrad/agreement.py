"""Checks that results are within tolerance of the reference, or explained by pixel edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import pixel_edges
from npugrad.tolerance import compare

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from npugrad.operator import Arrays, OpRecord
    from npugrad.tolerance import Comparison

    Golden = dict[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Agreement:
    """Outcome of comparing a call's results with its reference.

    Attributes:
        comparisons: Comparison of each output by name: with the values that explain the results, else with
            those of the service's own coordinate rule.
        explanation: By which coordinate rule the results are right, and how many points lie on the other side
            of a pixel edge, in words; empty if the service's own rule explains everything, or nothing does.
        tried: The coordinate rules that failed to explain wrong results, in words; empty if there are none.
    """

    comparisons: Mapping[str, Comparison]
    explanation: str = ""
    tried: str = ""

    @property
    def ok(self) -> bool:
        """Whether every output is right."""
        return all(found.ok for found in self.comparisons.values())

    @property
    def wrong(self) -> dict[str, Comparison]:
        """The comparisons of wrong outputs."""
        return {name: found for name, found in self.comparisons.items() if not found.ok}

    def __str__(self) -> str:
        """One-line description, without tensor values."""
        shown = self.wrong or self.comparisons
        said = [f"{name}: {found}" for name, found in shown.items()]
        return "; ".join(filter(None, (*said, self.explanation, self.tried))) or "no outputs"


def computed(
    record: OpRecord, inputs: Arrays, attrs: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Golden:
    """Computes the reference's float64 values of the outputs whose shapes are given by name."""
    golden = {name: np.empty(shape, np.float64) for name, shape in shapes.items()}
    record.reference(inputs, attrs, golden)
    return golden


def agreement(
    record: OpRecord,
    inputs: Arrays,
    attrs: Mapping[str, Any],
    results: Mapping[str, npt.NDArray[Any]],
    golden: Mapping[str, npt.NDArray[np.float64]] | None = None,
) -> Agreement:
    """Compares results with the reference; if they differ, checks whether pixel edges explain it.

    Args:
        record: The operator.
        inputs: Operands of a legal call by name, None for null.
        attrs: Attributes by name.
        results: Wanted outputs by name, of any float dtype that `compare` takes.
        golden: Result of `computed`, if the caller has it already; it is not changed.

    Raises:
        ValueError: As for `compare`.
    """
    shapes = {name: array.shape for name, array in results.items()}
    values = computed(record, inputs, attrs, shapes) if golden is None else golden
    found = Agreement(_compared(record, inputs, attrs, results, values))
    if found.ok or record.sampled is None:
        return found
    if golden is not None:
        values = {name: array.copy() for name, array in golden.items()}
    call = record.sampled(inputs, attrs)
    with np.errstate(all="ignore"):  # places may be NaN or infinite
        for explained in pixel_edges.explanations(call, results, values):
            comparisons = _compared(record, inputs, attrs, results, values)
            if all(each.ok for each in comparisons.values()):
                return Agreement(comparisons, explanation=str(explained))
    return Agreement(found.comparisons, tried=f"no coordinate rule explains it: {', '.join(call.rules)}")


def _compared(
    record: OpRecord,
    inputs: Arrays,
    attrs: Mapping[str, Any],
    results: Mapping[str, npt.NDArray[Any]],
    golden: Mapping[str, npt.NDArray[np.float64]],
) -> dict[str, Comparison]:
    return {
        name: compare(golden[name], array, record.extra_tolerance(inputs, attrs, name))
        for name, array in results.items()
    }
