"""Checks that operands are consistent, which is all that the local formulas need; the documents allow less.

The documented rules are in the records, not here. A call that fails the checks here is meaningless, locally
and on the service, and is refused with the documented error whatever the policy.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from npugrad.dtypes import DType
from npugrad.meta import TensorMeta
from npugrad_client._legality import DEFORMABLE_ATTENTION, FLOYD_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Metas = Mapping[str, TensorMeta | None]

FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)


def fits(operator: str, operands: Metas, attrs: Mapping[str, Any]) -> bool:
    """Whether the operands of a forward pass have consistent ranks, sizes and kinds of types.

    Args:
        operator: Name of the operator of its gradient.
        operands: Type and shape of each by name, None for missing ones.
        attrs: Attributes of the operator by name.
    """
    is_fitting = _FITS.get(operator)  # of others, the forward pass refuses what does not fit
    given = {name: meta for name, meta in operands.items() if meta is not None}
    return is_fitting is None or is_fitting(given, attrs)


def is_mixed(operands: Metas) -> bool:
    """Whether floating-point operands have several types, all of which fit into float32."""
    found = {meta.dtype for meta in operands.values() if meta is not None} & set(FLOATS)
    return len(found) > 1 and DType.FLOAT64 not in found


def as_sent(operands: Metas) -> Metas:
    """Returns the operands as sent if the documents require a single type: mixed ones as float32."""
    if not is_mixed(operands):
        return operands
    return {
        name: TensorMeta(DType.FLOAT32, meta.shape) if meta is not None and meta.dtype in FLOATS else meta
        for name, meta in operands.items()
    }


def _deformable_attention(given: Mapping[str, TensorMeta], _: Mapping[str, Any]) -> bool:
    names = ("value", "location", "attn_weight", "spatial_shape", "level_start_index")
    if not _has(given, names) or not _are_float(given[name] for name in names[:3]):
        return False
    value, location, weight, sizes, starts = (given[name].shape for name in names)
    return (
        (len(value), len(location), location[-1:]) == (4, 6, (2,))
        and weight == location[:-1]
        and (value[0], value[2]) == (location[0], location[2])
        and (sizes, starts) == ((location[3], 2), (location[3],))
        and all(given[name].dtype in (DType.INT32, DType.INT64) for name in names[3:])
    )


def _floyd_attention(given: Mapping[str, TensorMeta], _: Mapping[str, Any]) -> bool:
    names = ("query", "key1", "value1", "key2", "value2")
    if not _has(given, names) or not _are_float(given[name] for name in names):
        return False
    query, key1, value1, key2, value2 = (given[name].shape for name in names)
    if any(len(shape) != 5 for shape in (query, key1)):
        return False
    (b, h, n, m, d), k, mask = query, key1[3], given.get("atten_mask")
    return (
        k > 0
        and key1 == value1 == (b, h, n, k, d)
        and key2 == value2 == (b, h, k, m, d)
        and (mask is None or (mask.shape == (b, 1, n, 1, k) and mask.dtype in (DType.BOOL, DType.UINT8)))
    )


def _group_norm(given: Mapping[str, TensorMeta], attrs: Mapping[str, Any]) -> bool:
    if not _has(given, ("input",)) or not _are_float(given.values()):
        return False
    shape, group = given["input"].shape, attrs["group"]
    scales = (given[name].shape for name in ("gamma", "beta") if name in given)
    return len(shape) > 1 and group > 0 and shape[1] % group == 0 and all(s == shape[1:2] for s in scales)


def _layer_norm(given: Mapping[str, TensorMeta], attrs: Mapping[str, Any]) -> bool:
    if not _has(given, ("input",)) or not _are_float(given.values()):
        return False
    shape, normalized = given["input"].shape, attrs["normalized_shape"]
    scales = (given[name].shape for name in ("weight", "bias") if name in given)
    is_last = bool(normalized) and shape[-len(normalized) :] == normalized
    return is_last and all(scale == normalized for scale in scales)


def _grid_sample(given: Mapping[str, TensorMeta], attrs: Mapping[str, Any]) -> bool:
    if not _has(given, ("input", "grid")) or not _are_float(given[name] for name in ("input", "grid")):
        return False
    image, grid = given["input"].shape, given["grid"].shape
    return (
        len(image) == len(grid) in (4, 5)
        and (image[0], len(image) - 2) == (grid[0], grid[-1])
        and prod(image[2:]) > 0
        and attrs["interpolation_mode"] in (0, 1)
        and attrs["padding_mode"] in (0, 1, 2)
    )


def _has(given: Mapping[str, TensorMeta], names: Iterable[str]) -> bool:
    return all(name in given for name in names)


def _are_float(metas: Iterable[TensorMeta]) -> bool:
    return all(meta.dtype in FLOATS for meta in metas)


_FITS: Mapping[str, Callable[[Mapping[str, TensorMeta], Mapping[str, Any]], bool]] = {
    DEFORMABLE_ATTENTION: _deformable_attention,
    FLOYD_ATTENTION: _floyd_attention,
    "group_norm_backward": _group_norm,
    "layer_norm_backward": _layer_norm,
    "grid_sampler_2d_backward": _grid_sample,
    "grid_sampler_3d_backward": _grid_sample,
}
