"""Data of aclnnMultiScaleDeformableAttentionGrad: levels, plausible operands, and the check of levels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.errors import UnsafeLevels

if TYPE_CHECKING:
    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.operator import Arrays

OPERATOR = "multi_scale_deformable_attention_grad"
_LEVELS = ("spatial_shape", "level_start_index")
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def level_sizes(num_keys: int, num_levels: int) -> tuple[tuple[int, int], ...]:
    """Sizes of a pyramid of feature maps that fills the keys of a value tensor.

    A call's metas tell only how many keys and levels there are. Each level takes about four times the
    keys of the next one and is nearly square; the last one takes whatever is left, so the sizes fill
    `num_keys` exactly. With fewer keys than a level needs, sizes of 0 appear.

    Args:
        num_keys: Keys of the value tensor, 0 or more.
        num_levels: Levels, 0 or more.

    Returns:
        (height, width) of each level; the products add up to `num_keys` unless there is no level.
    """
    sizes: list[tuple[int, int]] = []
    left = num_keys
    for remaining in range(num_levels, 1, -1):
        # Share of the first of `remaining` levels when each is a quarter of the one before.
        share = math.ceil(left * 3 / (4 - 4 ** (1 - remaining)))
        height = math.isqrt(min(share, left))
        sizes.append((height, min(share, left) // height if height else 0))
        left -= math.prod(sizes[-1])
    if num_levels:
        height = next((h for h in range(math.isqrt(left), 0, -1) if left % h == 0), 0)
        sizes.append((height, left // height if height else 0))
    return tuple(sizes)


def level_starts(levels: tuple[tuple[int, int], ...]) -> list[int]:
    """First key of each level if the levels are stored one after another."""
    return [sum(math.prod(size) for size in levels[:index]) for index in range(len(levels))]


def make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
    """Creates levels that fill the keys, locations mostly inside, and weights that add up to 1.

    Args:
        call: A legal call; shapes and dtypes of the operands are its own, contiguous.
        rng: Source of the values.
    """
    shapes = {name: call.tensor(name).shape for name in call.inputs}
    levels = level_sizes(shapes["value"][1], shapes["spatial_shape"][0])
    scores = np.exp(rng.standard_normal(shapes["attn_weight"], dtype=np.float32))
    scores /= scores.sum(axis=(-2, -1), keepdims=True)
    made: dict[str, npt.NDArray[Any]] = {
        "value": rng.standard_normal(shapes["value"], dtype=np.float32),
        "spatial_shape": np.array(levels, np.int64).reshape(-1, 2),
        "level_start_index": np.array(level_starts(levels), np.int64),
        "location": rng.random(shapes["location"], dtype=np.float32) * np.float32(1.3) - np.float32(0.15),
        "attn_weight": scores,
        "grad_output": rng.standard_normal(shapes["grad_output"], dtype=np.float32),
    }
    return {name: array.astype(call.tensor(name).dtype.numpy, copy=False) for name, array in made.items()}


def check_levels(inputs: Arrays) -> None:
    """Refuses levels that leave the value tensor.

    The vendor's kernel reads `spatial_shape` and `level_start_index` as int32 and computes addresses from
    them without a check. Levels may share keys, leave some out, and have no pixels. Both tensors are the
    caller's data: run the operator with the copies that were checked.

    Args:
        inputs: Operands of a legal call by name; only `value`'s shape and the two index tensors are used.

    Raises:
        UnsafeLevels: A height, a width or a start is negative or does not fit int32, or a level ends beyond
            the keys. The message says which level, without any value of the tensors.
    """
    value, sizes, starts = (inputs[name] for name in ("value", "spatial_shape", "level_start_index"))
    if value is None or sizes is None or starts is None:
        raise _unsafe(("value", *_LEVELS), "found null; expected tensors")
    num_keys = value.shape[1]
    # Python integers: the product of two int64 may not fit int64.
    levels = zip(np.array(sizes).tolist(), np.array(starts).tolist(), strict=True)
    for index, ((height, width), start) in enumerate(levels):
        for operand, name, number in (
            ("spatial_shape", "height", height),
            ("spatial_shape", "width", width),
            ("level_start_index", "start", start),
        ):
            if not _INT32_MIN <= number <= _INT32_MAX:
                raise _unsafe(
                    (operand,), f"level {index}: found a {name} outside int32; expected 0 to {_INT32_MAX}"
                )
            if number < 0:
                raise _unsafe((operand,), f"level {index}: found a negative {name}; expected 0 or more")
        if start + height * width > min(num_keys, _INT32_MAX):
            raise _unsafe(
                _LEVELS,
                f"level {index}: found an end beyond the keys; expected start + height*width of at most "
                f"num_keys = {num_keys}",
            )


def _unsafe(operands: tuple[str, ...], problem: str) -> UnsafeLevels:
    return UnsafeLevels(
        f"{OPERATOR}: {', '.join(operands)}: {problem}", operator=OPERATOR, operand=operands[0]
    )
