"""Counter-based random numbers for operands that a server generates: the same bits on every machine.

A *draw* is a function of seed and position only, so that any part of a content can be generated separately.
The draws of a content are cut into tiles of `TILE_WORDS` 32-bit words. SplitMix64 turns the seed and the
number of a tile into two keys; word j of the tile is a hash of j and the keys: three rounds of xor-shift and
odd multiplication, with the keys added before the first and before the last one. Types of more than two bytes
use one word per draw; smaller ones use half a word, low half first, to index a table of 65536 values.

Words become values only by integer operations and by IEEE 754 single-precision operations that NumPy rounds
one by one: no logarithm and no sine, whose last bits differ between libraries. Golden digests in the tests
pin all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from npugrad.dtypes import DType, dtype_from_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

TILE_WORDS = 2**14
"""Number of words that share keys; one tile fits a core's cache."""
MAX_REPEAT = 2**32 - 1
"""Maximum number of times that a value can be repeated in a row."""

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST_SHIFT = 14
_FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)
# Approximate quantile of the normal distribution at (1 + u) / 2: u (a + b u^2 + c u^4) / (1 - d u^2).
_NORMAL_A, _NORMAL_B, _NORMAL_C, _NORMAL_D = (
    np.float32(value) for value in (1.1983621, -0.58846885, -0.50403205, 0.9678839)
)
_NORMAL_BOUND = 3.3
_EXACT = 2**53


@dataclass(frozen=True)
class Draw:
    """A distribution to draw from, without the number of values.

    Attributes:
        generator: Name of a row of `GENERATORS`.
        parameters: Its parameters in order; those that are left out have their defaults.
        repeat: How many times in a row each value is repeated.
    """

    generator: str
    parameters: tuple[float, ...] = ()
    repeat: int = 1

    def completed(self) -> tuple[float, ...]:
        """The parameters, with defaults for those that were left out."""
        defaults = tuple(GENERATORS[self.generator].parameters.values())
        return self.parameters + defaults[len(self.parameters) :]

    def problem(self, dtype: DType) -> str | None:
        """Why it cannot be drawn as this type, as "found ...; expected ..."; None if it can."""
        known = GENERATORS.get(self.generator)
        if known is None:
            return f"found generator {self.generator[:40]!a}; expected one of {', '.join(GENERATORS)}"
        if not dtype.has_data:
            return f"found dtype {dtype}; expected one whose data can be sent"
        if not 1 <= self.repeat <= MAX_REPEAT:
            return f"found repeat {self.repeat}; expected 1 to {MAX_REPEAT}"
        if len(self.parameters) > len(known.parameters):
            names = ", ".join(known.parameters)
            return f"found {len(self.parameters)} parameters of {self.generator}; expected at most {names}"
        return _number_problem(self, dtype) or known.problem(self.completed(), dtype)


@dataclass(frozen=True)
class Generator:
    """One way of generating numbers.

    Attributes:
        doc: Description of its values for the documentation.
        parameters: Names and defaults, in the order in which they are sent.
        problem: What is wrong with parameters for a type; None if nothing is.
        values: Converts words to values, of the type or one that converts to it.
    """

    doc: str
    parameters: Mapping[str, float]
    problem: Callable[[tuple[float, ...], DType], str | None]
    values: Callable[[Words, tuple[float, ...], DType], Array]


def _number_problem(draw: Draw, dtype: DType) -> str | None:
    """Reports a parameter that is not finite, or beyond the range of floats or of exact whole numbers."""
    most = _largest(dtype) if dtype in _FLOATS else float(_EXACT)
    for name, value in zip(GENERATORS[draw.generator].parameters, draw.completed(), strict=True):
        if not math.isfinite(value) or abs(value) > most:
            return f"found {name} {value:g} of {draw.generator}; expected at most {most:g} for {dtype}"
    return None


def _largest(dtype: DType) -> float:
    """The largest number of a float type that is drawn."""
    # Floats are computed in float32, in which the difference of two bounds must be finite.
    most = float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]
    return min(most, float(np.finfo(np.float32).max) / 2)


def _whole_numbers(dtype: DType) -> range:
    """The range of whole numbers of a type that is not a float."""
    if dtype is DType.BOOL:
        return range(2)
    held = np.iinfo(dtype.numpy)
    return range(int(held.min), int(held.max) + 1)


# ------------------------------------------------------------------------------------ from words to values


def _uniform_problem(parameters: tuple[float, ...], dtype: DType) -> str | None:
    low, high = parameters
    if dtype not in _FLOATS:
        return f"found uniform for dtype {dtype}; expected a float type, or the generator integers"
    return None if low <= high else f"found low {low:g} above high {high:g}; expected low to high"


def _uniform(words: Words, parameters: tuple[float, ...], dtype: DType) -> Array:
    low, high = parameters
    values = (words >> 8).view(np.int32).astype(np.float32)  # 24 bits: exact
    values *= np.float32(2**-24)
    values *= np.float32(high) - np.float32(low)
    values += np.float32(low)
    return values


def _normal_problem(parameters: tuple[float, ...], dtype: DType) -> str | None:
    mean, std = parameters
    if dtype not in _FLOATS:
        return f"found normal for dtype {dtype}; expected a float type, or the generator integers"
    if std < 0:
        return f"found std {std:g} of normal; expected 0 or more"
    reach, most = abs(mean) + _NORMAL_BOUND * std, _largest(dtype)
    return None if reach <= most else f"found values up to {reach:g}; expected at most {most:g} for {dtype}"


def _normal(words: Words, parameters: tuple[float, ...], dtype: DType) -> Array:
    mean, std = parameters
    # An odd number of 24 bits and a sign: exact, never zero, and negative as often as positive.
    u = ((words.view(np.int32) >> 7) | 1).astype(np.float32)
    u *= np.float32(2**-24)
    square = u * u
    values: Floats = square * _NORMAL_C
    values += _NORMAL_B
    values *= square
    values += _NORMAL_A
    values *= u
    square *= -_NORMAL_D
    square += np.float32(1)
    values /= square
    if (mean, std) != (0.0, 1.0):  # these would change no bit
        values *= np.float32(std)
        values += np.float32(mean)
    return values


def _integers_problem(parameters: tuple[float, ...], dtype: DType) -> str | None:
    low, high = parameters
    if dtype is DType.BOOL:
        return "found integers for dtype bool; expected another type, or the generator bernoulli"
    if low % 1 or high % 1 or not 1 <= high - low <= 2**32:
        return f"found integers from {low:g} to below {high:g}; expected whole numbers, 1 to 2^32 of them"
    if dtype in _FLOATS:
        return None  # their range is checked for every generator
    held = _whole_numbers(dtype)
    if low < held.start:
        return f"found low {low:.0f} of integers; expected at least {held.start} for {dtype}"
    return (
        None
        if high <= held.stop
        else f"found high {high:.0f} of integers; expected at most {held.stop} for {dtype}"
    )


def _integers(words: Words, parameters: tuple[float, ...], dtype: DType) -> Array:
    low, high = (int(value) for value in parameters)
    offsets: Array = (words.astype(np.uint64) * np.uint64(high - low)) >> np.uint64(32)
    return offsets.view(np.int64) + low


def _bernoulli_problem(parameters: tuple[float, ...], dtype: DType) -> str | None:
    (p,) = parameters
    return None if 0 <= p <= 1 else f"found p {p:g} of bernoulli; expected 0 to 1"


def _bernoulli(words: Words, parameters: tuple[float, ...], dtype: DType) -> Array:
    (p,) = parameters
    return words.astype(np.uint64) < np.uint64(round(p * 2**32))


def _constant_problem(parameters: tuple[float, ...], dtype: DType) -> str | None:
    (value,) = parameters
    if dtype in _FLOATS:
        return None
    if value % 1 or int(value) not in _whole_numbers(dtype):
        return f"found value {value:g} of constant; expected a whole number that {dtype} holds"
    return None


def _constant(words: Words, parameters: tuple[float, ...], dtype: DType) -> Array:
    return np.full(words.shape, parameters[0])


GENERATORS: dict[str, Generator] = {
    "uniform": Generator(
        "Evenly between low and high, in 2^24 steps; float types.",
        {"low": 0.0, "high": 1.0},
        _uniform_problem,
        _uniform,
    ),
    "normal": Generator(
        "Nearly normal (a rational function of an even draw), at most 3.3 standard deviations from the mean; "
        "float types.",
        {"mean": 0.0, "std": 1.0},
        _normal_problem,
        _normal,
    ),
    "integers": Generator(
        "Whole numbers from low to below high, at most 2^32 of them; all types but bool.",
        {"low": 0.0, "high": 2.0},
        _integers_problem,
        _integers,
    ),
    "bernoulli": Generator(
        "1 with probability p, else 0; all types.",
        {"p": 0.5},
        _bernoulli_problem,
        _bernoulli,
    ),
    "constant": Generator(
        "The same value everywhere; all types that hold it.",
        {"value": 0.0},
        _constant_problem,
        _constant,
    ),
}
"""Every generator by name."""


# -------------------------------------------------------------------------------------------------- words


def _mix64(value: int) -> int:
    """The finaliser of SplitMix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _keys(seed: int, tile: int) -> tuple[int, int]:
    key = _mix64((_mix64((seed + _GOLDEN) & _MASK64) + tile * _GOLDEN) & _MASK64)
    return key & 0xFFFFFFFF, key >> 32


def words(seed: int, first: int, count: int) -> Words:
    """Returns words of a seed from one tile.

    Args:
        seed: 0 to 2^64 - 1.
        first: Number of the first one.
        count: How many; `first % TILE_WORDS + count` is at most `TILE_WORDS`.
    """
    tile, start = divmod(first, TILE_WORDS)
    early, late = _keys(seed, tile)
    found = np.arange(start, start + count, dtype=np.uint32)
    found += np.uint32(early)
    shifted = np.empty_like(found)
    for number, (shift, factor) in enumerate(_ROUNDS):
        if number == len(_ROUNDS) - 1:
            found += np.uint32(late)
        np.right_shift(found, shift, out=shifted)
        found ^= shifted
        found *= np.uint32(factor)
    np.right_shift(found, _LAST_SHIFT, out=shifted)
    found ^= shifted
    return found


# ------------------------------------------------------------------------------------------------ contents


@lru_cache(maxsize=32)
def _table(generator: str, parameters: tuple[float, ...], dtype: DType) -> Array:
    """The values of all half words, for types of at most two bytes."""
    halves = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(2**15)
    table = GENERATORS[generator].values(halves, parameters, dtype).astype(dtype.numpy)
    table.setflags(write=False)
    return table


def fill(target: Array, draw: Draw, seed: int, first: int = 0) -> None:
    """Writes a part of a content.

    Args:
        target: Elements to write, one axis, of a type whose data can be sent.
        draw: The distribution, valid for that type.
        seed: 0 to 2^64 - 1.
        first: Position of the first element in the content.
    """
    dtype = dtype_from_name(target.dtype)
    if draw.generator == "constant":
        target.fill(draw.completed()[0])
        return
    # Drops the sign of zero: -0.0 and 0.0 are the same key of the cached tables.
    parameters = tuple(value + 0.0 for value in draw.completed())
    narrow = dtype.itemsize <= 2
    tile = TILE_WORDS * 2 if narrow else TILE_WORDS
    done = 0
    while done < target.size:
        start, skipped = divmod(first + done, draw.repeat)
        # At most as many elements as a tile has, from at most the draws left in the tile.
        size = min(target.size - done, tile)
        count = min((skipped + size - 1) // draw.repeat + 1, tile - start % tile)
        size = min(size, count * draw.repeat - skipped)
        values = (_narrow if narrow else _wide)(draw.generator, parameters, dtype, seed, start, count)
        if draw.repeat > 1:
            values = values.take((np.arange(size) + skipped) // draw.repeat)
        target[done : done + size] = values
        done += size


def _wide(
    generator: str, parameters: tuple[float, ...], dtype: DType, seed: int, start: int, count: int
) -> Array:
    return GENERATORS[generator].values(words(seed, start, count), parameters, dtype)


def _narrow(
    generator: str, parameters: tuple[float, ...], dtype: DType, seed: int, start: int, count: int
) -> Array:
    before = start % 2
    drawn = words(seed, start // 2, (before + count + 1) // 2)
    halves = drawn.astype("<u4", copy=False).view("<u2")[before : before + count]
    # Every half word is a valid index, so clipping changes none; it saves NumPy a copy of the output.
    return _table(generator, parameters, dtype).take(halves, mode="clip")
