"""Operands of aclnnFusedFloydAttentionGrad as a forward pass would leave them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.references._blocks import tiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from npugrad.meta import CallMeta

    Array = npt.NDArray[Any]
    Floats = npt.NDArray[np.float32]

STATISTICS_REPEATS = 8
"""How often the statistics of a row are repeated on the last axis of softmax_max and softmax_sum."""
_RANDOM = ("query", "key1", "value1", "key2", "value2", "dy")
_MASKED_SCORE = np.finfo(np.float32).min
_TILE_BYTES = 64 * 2**20
_SCORE_BYTES = (
    12  # float32: a score, and the product that is being added to it or computed from it, with its copy
)


def make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, Array | None]:
    """Creates normal data, a random mask, and the forward pass's results for their rounded values."""
    made: dict[str, Array] = {}
    for name in _RANDOM:
        meta = call.tensor(name)
        made[name] = rng.standard_normal(meta.shape, dtype=np.float32).astype(meta.dtype.numpy)
    mask = call.inputs["atten_mask"]
    if mask is not None:
        made["atten_mask"] = _make_mask(mask.shape, rng)
    made.update(_forward(made, call.number("scale_value")))
    return {
        name: None if meta is None else made[name].astype(meta.dtype.numpy, copy=False)
        for name, meta in call.inputs.items()
    }


def _make_mask(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Masks a third of the keys, but all of them in the first row of every batch and none in the second."""
    mask = rng.random(shape) < 1 / 3
    mask[:, :, 0] = True
    mask[:, :, 1:2] = False
    return mask


def _forward(operands: Mapping[str, Array], scale: float) -> dict[str, Array]:
    """Computes Floyd attention in float32, by tiles, so that not all scores (N, M, K) exist at once.

    Args:
        operands: `query` (B, H, N, M, D), `key1` and `value1` (B, H, N, K, D), `key2` and `value2`
            (B, H, K, M, D) and, if there is one, `atten_mask` (B, 1, N, 1, K) of bools.
        scale: Factor of the scores.

    Returns:
        `softmax_max` and `softmax_sum` (B, H, N, M, 8) in float32, `attention_in` like query.
    """
    query, keys = operands["query"], operands["key1"].shape[-2]
    statistics = (*query.shape[:-1], STATISTICS_REPEATS)
    row_max, row_sum = np.empty(statistics, np.float32), np.empty(statistics, np.float32)
    attention = np.empty_like(query)
    for batch, head in np.ndindex(query.shape[:2]):
        for rows, columns in tiles(query.shape[2:4], keys * _SCORE_BYTES, _TILE_BYTES):
            here = (batch, head, rows, columns)
            by_row, by_column = (batch, head, rows), (batch, head, slice(None), columns)
            mask = operands["atten_mask"][batch, 0, rows] if "atten_mask" in operands else None
            row_max[here], row_sum[here], attention[here] = _attend(
                query[here].astype(np.float32) * np.float32(scale),
                operands["key1"][by_row].astype(np.float32),
                operands["value1"][by_row].astype(np.float32),
                operands["key2"][by_column].astype(np.float32),
                operands["value2"][by_column].astype(np.float32),
                mask,
            )
    return {"softmax_max": row_max, "softmax_sum": row_sum, "attention_in": attention}


def _attend(
    query: Floats, key1: Floats, value1: Floats, key2: Floats, value2: Floats, mask: Array | None
) -> tuple[Floats, Floats, Floats]:
    """One tile: scaled query (n, m, d), first keys (n, k, d), second keys (k, m, d), mask (n, 1, k)."""
    scores: Floats = query @ key1.swapaxes(1, 2)
    scores += (query.swapaxes(0, 1) @ key2.transpose(1, 2, 0)).swapaxes(0, 1)
    if mask is not None:
        np.copyto(scores, _MASKED_SCORE, where=mask)
    row_max: Floats = scores.max(axis=2, keepdims=True)
    scores -= row_max
    np.exp(scores, out=scores)
    row_sum: Floats = scores.sum(axis=2, keepdims=True)
    attention: Floats = scores @ value1
    attention += (scores.swapaxes(0, 1) @ value2.swapaxes(0, 1)).swapaxes(0, 1)
    attention /= row_sum
    return row_max, row_sum, attention
