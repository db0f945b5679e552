"""Checks that results are within tolerance of the reference, or explained by pixel edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import pixel_edges
from npugrad.tolerance import compare, is_exact

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy.typing as npt

    from npugrad.meta import TensorMeta
    from npugrad.operator import Arrays, OpRecord
    from npugrad.tolerance import Comparison

    Golden = dict[str, npt.NDArray[Any]]

_EPS = 2.0**-23
_STEPS = 4
"""Roundings on the way of a term to its sum."""


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
    record: OpRecord, inputs: Arrays, attrs: Mapping[str, Any], results: Mapping[str, npt.NDArray[Any]]
) -> Golden:
    """Computes the reference's values for results of these shapes: in float64, integers in their own type."""
    golden = {
        name: np.empty(array.shape, array.dtype if is_exact(array.dtype) else np.float64)
        for name, array in results.items()
    }
    record.reference(inputs, attrs, golden)
    return golden


def unwritten(meta: TensorMeta) -> npt.NDArray[Any]:
    """A result that shows where nobody wrote: NaN, or the lowest integer."""
    dtype = meta.dtype.numpy
    value = np.iinfo(dtype).min if dtype.kind in "iu" else dtype.kind == "b" or np.nan
    return np.full(meta.shape, value, dtype)


def agreement(
    record: OpRecord,
    inputs: Arrays,
    attrs: Mapping[str, Any],
    results: Mapping[str, npt.NDArray[Any]],
    golden: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Agreement:
    """Compares results with the reference; checks whether conditioning or pixel edges explain a difference.

    Args:
        record: The operator.
        inputs: Operands of a legal call by name, None for null.
        attrs: Attributes by name.
        results: Wanted outputs by name.
        golden: Result of `computed`, if the caller has it already; it is not changed.

    Raises:
        ValueError: As for `compare`.
    """
    values = computed(record, inputs, attrs, results) if golden is None else golden
    found = Agreement(_compared(record, inputs, attrs, results, values, {}))
    if found.ok:
        return found
    call = None if record.sampled is None else record.sampled(inputs, attrs)
    fixed = () if call is None else (call.points,)
    lost = conditioning(record, inputs, attrs, values, fixed)
    found = Agreement(_compared(record, inputs, attrs, results, values, lost))
    if found.ok or call is None:
        return found
    if golden is not None:
        values = {name: array.copy() for name, array in golden.items()}
    with np.errstate(all="ignore"):  # places may be NaN or infinite
        for explained in pixel_edges.explanations(call, results, values):
            comparisons = _compared(record, inputs, attrs, results, values, lost)
            if all(each.ok for each in comparisons.values()):
                return Agreement(comparisons, explanation=str(explained))
    return Agreement(found.comparisons, tried=f"no coordinate rule explains it: {', '.join(call.rules)}")


def conditioning(
    record: OpRecord,
    inputs: Arrays,
    attrs: Mapping[str, Any],
    golden: Mapping[str, npt.NDArray[np.float64]],
    fixed: Collection[str] = (),
) -> dict[str, float]:
    """What arithmetic in float32 may lose in a call, whatever computes it: an absolute error for each output.

    Terms that cancel each other leave a sum that is far smaller than its rounding errors. How far, the
    reference itself shows: it is computed once more with each operand's values off by one unit in the last
    place of float32, up or down at random. The difference grows with the magnitudes of the terms; rounding
    errors add up with the root of their number, too.

    Args:
        record: The operator.
        inputs: Operands of a legal call by name, None for null.
        attrs: Attributes by name.
        golden: Result of `computed`.
        fixed: Operands that stay as they are, because results jump where their values do.
    """
    drawn, moved = np.random.default_rng(0), dict(inputs)
    for name, array in inputs.items():
        if array is not None and name not in fixed and array.dtype.kind not in "iub":
            moved[name] = array.astype(np.float64) * (1 + _EPS * drawn.choice((-1.0, 1.0), array.shape))
    largest = max((array.size for array in inputs.values() if array is not None), default=0)
    with np.errstate(all="ignore"):
        other = computed(record, moved, attrs, {n: a for n, a in golden.items() if not is_exact(a.dtype)})
        off = {name: np.abs(array - golden[name]) for name, array in other.items()}
    return {
        name: _STEPS
        * max(1.0, largest / max(array.size, 1)) ** 0.5
        * float(np.max(array, initial=0.0, where=np.isfinite(array)))
        for name, array in off.items()
    }


def _compared(
    record: OpRecord,
    inputs: Arrays,
    attrs: Mapping[str, Any],
    results: Mapping[str, npt.NDArray[Any]],
    golden: Mapping[str, npt.NDArray[np.float64]],
    lost: Mapping[str, float],
) -> dict[str, Comparison]:
    extra = {name: record.extra_tolerance(inputs, attrs, name) + lost.get(name, 0.0) for name in results}
    return {name: compare(golden[name], array, extra[name]) for name, array in results.items()}
