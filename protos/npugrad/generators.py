"""Numbers from a counter, for operands that a server makes itself: the same bits on every machine.

A *draw* is a function of seed and position alone, so that any part of a content can be made by itself.
The draws of a content are cut into tiles of `TILE_WORDS` 32-bit words. SplitMix64 turns seed and number of a
tile into two keys; word j of the tile is a hash of j and the keys: three rounds of xor-shift and odd
multiplication, the keys added before the first and before the last one. Types of more than two bytes take a
word a draw; the smaller ones take half a word, low half first, and look their value up in a table of 65536.

Only integer operations, and IEEE 754 single-precision operations that NumPy rounds one by one, lead from a
word to a value: no logarithm and no sine, whose last bits differ between libraries. Golden digests in the
tests freeze all of it.
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
"""Words that share keys; what one tile takes stays in a core's cache."""
MAX_REPEAT = 2**32 - 1
"""Most times that one value can stand in a row."""

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST_SHIFT = 14
_FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)
# The quantile of the normal distribution at (1 + u) / 2, about: u (a + b u^2 + c u^4) / (1 - d u^2).
_NORMAL_A, _NORMAL_B, _NORMAL_C, _NORMAL_D = (
    np.float32(value) for value in (1.1983621, -0.58846885, -0.50403205, 0.9678839)
)
_NORMAL_BOUND = 3.3
_EXACT = 2**53


@dataclass(frozen=True)
class Draw:
    """What is drawn, without how much of it.

    Attributes:
        generator: Name of a row of `GENERATORS`.
        parameters: Its parameters in order; those that are left out have their defaults.
        repeat: How many times in a row each value stands.
    """

    generator: str
    parameters: tuple[float, ...] = ()
    repeat: int = 1

    def completed(self) -> tuple[float, ...]:
        """The parameters with the defaults of those that were left out."""
        defaults = tuple(GENERATORS[self.generator].parameters.values())
        return self.parameters + defaults[len(self.parameters) :]

    def problem(self, dtype: DType) -> str | None:
        """What keeps it from being drawn as this type: "found ...; expected ..."; None when nothing does."""
        known = GENERATORS.get(self.generator)
        if known is None:
            return f"found generator {self.generator[:40]!a}; expected one of {', '.join(GENERATORS)}"
        if not dtype.has_data:
            return f"found dtype {dtype}; expected one whose data travels"
        if not 1 <= self.repeat <= MAX_REPEAT:
            return f"found repeat {self.repeat}; expected 1 to {MAX_REPEAT}"
        if len(self.parameters) > len(known.parameters):
            names = ", ".join(known.parameters)
            return f"found {len(self.parameters)} parameters of {self.generator}; expected at most {names}"
        return _number_problem(self, dtype) or known.problem(self.completed(), dtype)


@dataclass(frozen=True)
class Generator:
    """One way of making numbers.

    Attributes:
        doc: What it gives, for a person.
        parameters: Names and defaults, in the order in which they travel.
        problem: What is wrong with parameters for a type; None when nothing is.
        values: Values of words, of the type or one that converts to it.
    """

    doc: str
    parameters: Mapping[str, float]
    problem: Callable[[tuple[float, ...], DType], str | None]
    values: Callable[[Words, tuple[float, ...], DType], Array]


def _number_problem(draw: Draw, dtype: DType) -> str | None:
    """Whether a parameter is not finite, or beyond what floats reach or where whole numbers are exact."""
    most = _largest(dtype) if dtype in _FLOATS else float(_EXACT)
    for name, value in zip(GENERATORS[draw.generator].parameters, draw.completed(), strict=True):
        if not math.isfinite(value) or abs(value) > most:
            return f"found {name} {value:g} of {draw.generator}; expected at most {most:g} for {dtype}"
    return None


def _largest(dtype: DType) -> float:
    """The largest number of a float type that is drawn."""
    # float32 is what floats are computed in, and the difference of two bounds has to be finite in it.
    most = float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]
    return min(most, float(np.finfo(np.float32).max) / 2)


def _whole_numbers(dtype: DType) -> range:
    """The whole numbers that a type holds that is no float."""
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
    # An odd number of 24 bits and a sign: exact, never zero, and as often below zero as above.
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
    if (mean, std) != (0.0, 1.0):  # which would change no bit
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
        return None  # whose reach is looked at for every generator
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
    """Words of a seed that lie in one tile.

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
    """The values of all halves of a word, for types of at most two bytes."""
    halves = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(2**15)
    table = GENERATORS[generator].values(halves, parameters, dtype).astype(dtype.numpy)
    table.setflags(write=False)
    return table


def fill(target: Array, draw: Draw, seed: int, first: int = 0) -> None:
    """Writes a part of a content.

    Args:
        target: Elements to write, one axis, of a type whose data travels.
        draw: What is drawn, with nothing wrong for that type.
        seed: 0 to 2^64 - 1.
        first: Position of the first of them in the content.
    """
    dtype = dtype_from_name(target.dtype)
    if draw.generator == "constant":
        target.fill(draw.completed()[0])
        return
    # A zero has no sign here: -0.0 and 0.0 are one key of the cached tables.
    parameters = tuple(value + 0.0 for value in draw.completed())
    narrow = dtype.itemsize <= 2
    tile = TILE_WORDS * 2 if narrow else TILE_WORDS
    done = 0
    while done < target.size:
        start, skipped = divmod(first + done, draw.repeat)
        # As many elements as a tile has at most, of as many draws as are left in theirs.
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
    # Every half is a row of the table, so clipping changes none; it spares NumPy a copy of the output.
    return _table(generator, parameters, dtype).take(halves, mode="clip")
