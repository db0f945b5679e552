"""Tolerance of results against the float64 reference: one formula for all operators.

With golden values g, T = 2^-13 (float32), 2^-10 (float16), 2^-7 (bfloat16) or 2^-40 (float64), and an
absolute allowance `extra` that an operator's record may add for terms that cancel, a result is right when

    each element     |e| <= 10*T*|g| + T*rms(g) + tiny + extra
    the whole tensor mean|e| <= T*(mean|g| + tiny) + extra

where tiny is the smallest normal number of the dtype. If g, cast to the dtype, is not finite, the result must
have the same non-finite value; such elements are excluded from everything else. Integers and bools must be
equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.dtypes import DATA_DTYPES, DType, dtype_from_name
from npugrad.references._blocks import flat_float64, spans, store

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

T: dict[DType, float] = {
    DType.FLOAT32: 2.0**-13,
    DType.FLOAT16: 2.0**-10,
    DType.BFLOAT16: 2.0**-7,
    DType.FLOAT64: 2.0**-40,
}
"""The relative tolerance of each float dtype."""
_TINY = {
    DType.FLOAT32: 2.0**-126,
    DType.FLOAT16: 2.0**-14,
    DType.BFLOAT16: 2.0**-126,
    DType.FLOAT64: 2.0**-1022,
}

# Scratch memory of a block, and of one of its elements: about ten float64 values.
_BLOCK_BYTES = 64 * 2**20
_ELEMENT_BYTES = 80


@dataclass(frozen=True)
class Comparison:
    """Result of comparing one tensor.

    Attributes:
        ok: Whether the result is within the tolerance.
        max_absolute_error: max|e| over finite elements.
        max_relative_error: max|e| / max|g| over finite elements; what accuracy tables show.
        mean_relative_error: mean|e| / mean|g| over finite elements.
        mean_error: mean|e| over finite elements.
        mean_limit: The largest mean error within the tolerance.
        worst: Largest error, of elements and mean, as a fraction of the tolerance; too large above 1,
            infinite if finite and non-finite values do not match.
        mismatches: Elements outside their tolerance.
        non_finite: Elements that are not finite in the golden values, cast to the dtype.
        size: Elements compared.
        first_mismatch: Index of the first mismatch in C order; None if there is none.
    """

    ok: bool
    max_absolute_error: float
    max_relative_error: float
    mean_relative_error: float
    mean_error: float
    mean_limit: float
    worst: float
    mismatches: int
    non_finite: int
    size: int
    first_mismatch: tuple[int, ...] | None

    def __str__(self) -> str:
        """One-line description, without tensor values."""
        verdict = "within" if self.ok else "outside"
        is_mean_off = self.mean_error > self.mean_limit
        parts = [
            f"{verdict} tolerance: max relative error {self.max_relative_error:.2e}",
            f"{self.worst:.2g} of the tolerance",
        ]
        if self.mismatches or not is_mean_off:
            parts.append(f"{self.mismatches} of {self.size} elements off")
        if self.first_mismatch is not None:
            parts.append(f"the first at {list(self.first_mismatch)}")
        if is_mean_off:
            parts.append(f"mean error {self.mean_error:.2e} (limit {self.mean_limit:.2e})")
            parts += ["each element within its own limit"] * (not self.mismatches)
        return ", ".join(parts)


@dataclass(frozen=True)
class Allowance:
    """The errors that the formula allows in one tensor.

    Attributes:
        relative: Error of an element, as a share of its golden value.
        absolute: Further error of any element.
        mean: Mean error of all elements.
    """

    relative: float
    absolute: float
    mean: float

    @classmethod
    def of(cls, golden: npt.NDArray[Any], got: npt.NDArray[Any], extra: float = 0.0) -> Allowance:
        """The allowance of a whole tensor; arguments and errors as for `compare`."""
        return _allowance(_scale(golden, got), _tolerance(golden, got), got, extra)

    def used(self, golden: npt.NDArray[Any], got: npt.NDArray[Any]) -> Floats:
        """The share of the allowance that each of some elements uses; above 1 it is wrong.

        Args:
            golden: Golden values of some elements of the tensor, few enough for several copies in memory.
            got: Their results, in the dtype of the tensor and of the same shape.
        """
        shape = np.broadcast_shapes(golden.shape, got.shape)
        flat = (np.broadcast_to(array, shape).reshape(-1) for array in (golden, got))
        values, result = (np.array(array, np.float64) for array in flat)
        return self._of_block(_block(0, values, result, got.dtype)).reshape(shape)

    def _of_block(self, block: _Block) -> Floats:
        used: Floats = block.error / (self.relative * np.abs(block.golden) + self.absolute)
        used[block.unlike] = np.inf
        return used


@dataclass(frozen=True)
class _Scale:
    """Statistics of the golden values whose cast is finite."""

    count: int
    mean: float
    rms: float
    largest: float


@dataclass(frozen=True)
class _Block:
    """Some consecutive elements, in C order.

    Attributes:
        start: Number of the first one.
        golden: Golden values in float64, 0 where not `finite`.
        error: |e|, 0 where not `finite`.
        finite: Whether the cast golden value and the result are both finite.
        unlike: Whether golden value and result differ and are not both finite.
        non_finite: Golden values that are not finite once cast.
    """

    start: int
    golden: Floats
    error: Floats
    finite: Bools
    unlike: Bools
    non_finite: int


def is_exact(dtype: np.dtype[Any]) -> bool:
    """Whether results of this type must equal the golden values: integers and bools."""
    return dtype.kind in "iub"


def compare(golden: npt.NDArray[Any], got: npt.NDArray[Any], extra: float = 0.0) -> Comparison:
    """Compares a result with golden values, in blocks of bounded memory.

    Args:
        golden: Golden values in any layout, preferably in float64; integers and bools in their own dtype.
        got: The result, of the same shape, in any layout.
        extra: Absolute error allowed beyond the common formula, as from `OpRecord.extra_tolerance`.

    Raises:
        ValueError: The shapes differ, or the formula has no tolerance for the result's dtype.
    """
    tolerance, scale = _tolerance(golden, got), _scale(golden, got)
    allowed = _allowance(scale, tolerance, got, extra)
    worst, largest, total, mismatches, non_finite = 0.0, 0.0, 0.0, 0, 0
    first: int | None = None
    for block in _blocks(golden, got):
        fraction = allowed._of_block(block)
        off = fraction > 1
        if first is None and off.any():
            first = block.start + int(off.argmax())
        mismatches += int(np.count_nonzero(off))
        non_finite += block.non_finite
        worst = max(worst, float(fraction.max()))
        largest = max(largest, float(block.error.max()))
        total += float(block.error.sum())
    mean_error = total / scale.count if scale.count else 0.0
    worst = max(worst, mean_error / allowed.mean)
    return Comparison(
        ok=worst <= 1,
        max_absolute_error=largest,
        max_relative_error=_ratio(largest, scale.largest),
        mean_relative_error=_ratio(mean_error, scale.mean),
        mean_error=mean_error,
        mean_limit=allowed.mean,
        worst=worst,
        mismatches=mismatches,
        non_finite=non_finite,
        size=got.size,
        first_mismatch=None if first is None else tuple(map(int, np.unravel_index(first, got.shape))),
    )


def wrong_elements(
    golden: npt.NDArray[Any], got: npt.NDArray[Any], most: int, extra: float = 0.0
) -> npt.NDArray[np.int64]:
    """The flat indices of the first elements outside their tolerance, in order.

    Args:
        golden: As for `compare`.
        got: As for `compare`.
        most: Maximum number to find.
        extra: As for `compare`.
    """
    allowed = Allowance.of(golden, got, extra)
    found = [np.zeros(0, np.int64)]
    for block in _blocks(golden, got):
        found.append(np.flatnonzero(allowed._of_block(block) > 1)[:most] + block.start)
        most -= found[-1].size
        if not most:
            break
    return np.concatenate(found)


def _allowance(scale: _Scale, tolerance: float, got: npt.NDArray[Any], extra: float) -> Allowance:
    if is_exact(got.dtype):  # whatever differs is unlike; the mean says nothing more
        return Allowance(relative=0.0, absolute=0.5, mean=math.inf)
    tiny = _TINY[dtype_from_name(got.dtype)]
    return Allowance(
        relative=10 * tolerance,
        absolute=tolerance * scale.rms + tiny + extra,
        mean=tolerance * (scale.mean + tiny) + extra,
    )


def _tolerance(golden: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    if golden.shape != got.shape:
        raise ValueError(f"found shape {list(got.shape)}; expected {list(golden.shape)}, that of golden")
    dtype = dtype_from_name(got.dtype)
    if dtype not in DATA_DTYPES:
        raise ValueError(f"found dtype {dtype}; expected {', '.join(DATA_DTYPES)}")
    return T.get(dtype, 0.0)


def _blocks(golden: npt.NDArray[Any], got: npt.NDArray[Any]) -> Iterator[_Block]:
    for span in spans(got.size, _ELEMENT_BYTES, _BLOCK_BYTES):
        values = flat_float64(golden, span.start, span.stop)
        block = _block(span.start, values, flat_float64(got, span.start, span.stop), got.dtype)
        if is_exact(got.dtype):  # float64 holds no more than 53 bits of an integer
            block.unlike[:] = golden.flat[span] != got.flat[span]
        yield block


def _block(start: int, values: Floats, result: Floats, dtype: np.dtype[Any]) -> _Block:
    """Overwrites both arrays."""
    cast = _cast(values, dtype)
    finite = np.isfinite(cast) & np.isfinite(result)
    same = (cast == result) | (np.isnan(cast) & np.isnan(result))
    unlike = ~finite & ~same
    # A golden value whose cast is infinite may itself be finite; it is excluded from the sums all the same.
    values[~np.isfinite(cast)] = 0.0
    result[~finite] = 0.0
    error = np.abs(np.subtract(result, values, out=result), out=result)
    error[~finite] = 0.0
    return _Block(start, values, error, finite, unlike, int(np.count_nonzero(~np.isfinite(cast))))


def _cast(values: Floats, dtype: np.dtype[Any]) -> Floats:
    if is_exact(dtype):
        return values.copy()
    rounded = np.empty(values.shape, dtype)
    store(rounded, values)
    return rounded.astype(np.float64)


def _scale(golden: npt.NDArray[Any], got: npt.NDArray[Any]) -> _Scale:
    """First pass: the statistics to which the tolerance is relative."""
    count, total, rms, largest = 0, 0.0, 0.0, 0.0  # rms: over all elements, excluded ones being 0
    for span in spans(got.size, _ELEMENT_BYTES, _BLOCK_BYTES):
        values = flat_float64(golden, span.start, span.stop)
        finite = np.isfinite(_cast(values, got.dtype))
        values[~finite] = 0.0
        count += int(np.count_nonzero(finite))
        np.abs(values, out=values)
        total += float(values.sum())
        highest = float(values.max())
        if highest:  # after division by it no square overflows
            values /= highest
            rms = math.hypot(rms, highest * math.sqrt(float(np.square(values).sum()) / got.size))
        largest = max(largest, highest)
    return _Scale(count, total / max(count, 1), rms * math.sqrt(got.size / max(count, 1)), largest)


def _ratio(error: float, scale: float) -> float:
    if error == 0:
        return 0.0
    return error / scale if scale else math.inf
