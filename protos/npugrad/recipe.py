"""Operands that the server generates from a few numbers, and the same bits on the client."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from npugrad import layout
from npugrad.errors import InvalidRecipe, WrongType
from npugrad.generators import GENERATORS, Draw, fill
from npugrad.meta import TensorMeta
from npugrad.representation import short_repr
from npugrad.usage import instead, reports_usage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import SupportsIndex

    from npugrad.dtypes import DType
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord

DIGEST_BYTES = 32
"""Length of a digest, SHA-256."""
MAX_SEED = 2**64 - 1
_BLOCK_BYTES = 2**20


@reports_usage
@dataclass(frozen=True, init=False)
class Recipe:
    """An operand that the server generates: distribution, tensor and seed.

    Use it in place of an array to load a server without loading the network; `array` gives the same bits
    locally. Element i of the content depends only on generator, parameters, dtype, seed and i.

    Attributes:
        draw: Generator, its parameters, and how many times in a row each value is repeated.
        meta: Dtype, shape and layout of the tensor.
        seed: 0 to 2^64 - 1.
        digest: Expected SHA-256 of the content, checked by the server; empty for no check.

    Example:
        >>> recipe = Recipe("uniform", shape=(2, 3), dtype="float16", seed=7, low=-1.0)
        >>> recipe.array().shape
        (2, 3)
    """

    __repr__ = short_repr

    draw: Draw
    meta: TensorMeta
    seed: int
    digest: bytes

    def __init__(
        self,
        generator: str,
        *,
        shape: Sequence[SupportsIndex],
        dtype: DType | str | npt.DTypeLike = "float32",
        seed: SupportsIndex = 0,
        strides: Sequence[SupportsIndex] | None = None,
        repeat: SupportsIndex = 1,
        digest: bytes = b"",
        **parameters: float,
    ) -> None:
        """Creates a recipe.

        Args:
            generator: ``"uniform"`` (low, high), ``"normal"`` (mean, std), ``"integers"`` (low, high),
                ``"bernoulli"`` (p) or ``"constant"`` (value).
            shape: Size of each axis.
            dtype: Element type.
            seed: 0 to 2^64 - 1; use different seeds for the operands of a call.
            strides: Strides in elements, 0 to repeat an element; None for row-major.
            repeat: How many times in a row each value is repeated in the content.
            digest: Expected SHA-256 of the content; see `with_digest`.
            **parameters: Parameters of the generator; defaults apply to missing ones.

        Raises:
            InvalidRecipe: RECIPE_INVALID. Unknown generator, or a parameter out of range.
            MalformedTensor: Invalid shape or strides.
            WrongType: Unknown parameter of the generator.
            WrongValue: Unknown dtype.
        """
        known = GENERATORS.get(generator)
        given = known.parameters if known else {}
        unknown = [name for name in parameters if name not in given]
        if known and unknown:
            raise WrongType(
                f"Recipe: unknown parameter {unknown[0]!r} of {generator}; {instead(unknown[0], given)}"
            )
        values = tuple(float(parameters.get(name, default)) for name, default in given.items())
        draw = Draw(generator, values, index(repeat))
        self._set(draw, TensorMeta(dtype, shape, strides=strides), index(seed), bytes(digest))
        problem = self.problem()
        if problem:
            raise InvalidRecipe(f"recipe: {problem}")

    @classmethod
    def of(cls, draw: Draw, meta: TensorMeta, seed: int, digest: bytes = b"") -> Recipe:
        """Creates a recipe from its parts without checking them; see `problem`."""
        made = cls.__new__(cls)
        made._set(draw, meta, seed, digest)
        return made

    def _set(self, draw: Draw, meta: TensorMeta, seed: int, digest: bytes) -> None:
        for name, value in (("draw", draw), ("meta", meta), ("seed", seed), ("digest", digest)):
            object.__setattr__(self, name, value)

    def problem(self) -> str | None:
        """What is wrong with it, as "found ...; expected ..."; None if nothing is."""
        if not 0 <= self.seed <= MAX_SEED:
            return f"found seed {self.seed}; expected 0 to {MAX_SEED}"
        if len(self.digest) not in (0, DIGEST_BYTES):
            return f"found a digest of {len(self.digest)} bytes; expected {DIGEST_BYTES}, or none"
        return self.draw.problem(self.meta.dtype)

    def fill(self, target: memoryview, offset: int = 0) -> None:
        """Writes a part of the content.

        Args:
            target: Writable bytes, a whole number of elements.
            offset: Position of the first byte in the content, a multiple of the element's size.
        """
        dtype = self.meta.dtype
        fill(np.frombuffer(target, dtype.numpy), self.draw, self.seed, offset // dtype.itemsize)

    def content(self) -> memoryview:
        """The whole content, as it would be sent."""
        made = memoryview(bytearray(self.meta.content_bytes))
        if made.nbytes:
            self.fill(made)
        return made.toreadonly()

    def array(self) -> npt.NDArray[Any]:
        """The tensor, bit-identical to the server's. Read-only, with the strides of `meta`."""
        return layout.view(self.meta, self.content())

    def sha256(self) -> bytes:
        """Digest of the content, which is generated block by block."""
        import hashlib  # here, because few recipes have a digest

        found = hashlib.sha256()
        block = memoryview(bytearray(min(_BLOCK_BYTES, self.meta.content_bytes)))
        for offset in range(0, self.meta.content_bytes, _BLOCK_BYTES):
            part = block[: min(_BLOCK_BYTES, self.meta.content_bytes - offset)]
            self.fill(part, offset)
            found.update(part)
        return found.digest()

    def with_digest(self) -> Recipe:
        """The same recipe with its digest, so that the server checks that it generates the same bits."""
        return self.of(self.draw, self.meta, self.seed, self.sha256())

    def __str__(self) -> str:
        """Such as ``uniform(low=0, high=1) as float16[2, 3], seed 7``."""
        known = GENERATORS.get(self.draw.generator)
        pairs = zip(known.parameters, self.draw.completed(), strict=False) if known else ()
        given = ", ".join(f"{name}={value:g}" for name, value in pairs)
        repeat = f", each {self.draw.repeat} times" if self.draw.repeat != 1 else ""
        return f"{self.draw.generator}({given}) as {self.meta}{repeat}, seed {self.seed}"


def recipes(record: OpRecord, call: CallMeta, seed: int = 0) -> dict[str, Recipe]:
    """Creates recipes for a realistic legal call, from the record's distribution for each operand.

    Args:
        record: The operator.
        call: Its metas.
        seed: Seed of the first operand; the seeds of the others count up from it.

    Returns:
        A recipe for each operand that is not null and can have one. The others, such as level tables, are
        small and sent as data.
    """
    made: dict[str, Recipe] = {}
    for number, param in enumerate(record.inputs):
        meta = call.inputs[param.name]
        if meta is not None and param.draw is not None:
            made[param.name] = Recipe.of(param.draw, meta, (seed + number) & MAX_SEED)
    return made
