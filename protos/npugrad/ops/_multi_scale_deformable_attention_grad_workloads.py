"""Workloads of aclnnMultiScaleDeformableAttentionGrad: sizes of models, and variants of small calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.dtypes import DType, dtype_from_name
from npugrad.ops._multi_scale_deformable_attention_grad_data import level_starts
from npugrad.ops._multi_scale_deformable_attention_grad_probes import probes
from npugrad.ties import half_pixels
from npugrad.workloads import Example, Filled, Workload, Workloads, measured, named

if TYPE_CHECKING:
    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.operator import Arrays
    from npugrad.workloads import Sizes

# fmt: off
Levels = tuple[tuple[int, int], ...]
_DETR: Levels = ((100, 134), (50, 67), (25, 34), (13, 17))
"""Feature maps of Deformable-DETR for a picture of 800 x 1066 pixels: 17,821 keys."""
_QUARTER: Levels = ((50, 67), (25, 34), (13, 17), (7, 9))
"""The same for a picture of half the height and width."""
_THREE, _OF_128 = _DETR[1:], ((80, 107), (40, 54), (20, 27), (10, 14))


def _sizes(bs: int, nq: int, levels: Levels, nh: int = 8, ch: int = 32) -> dict[str, Any]:
    return {"bs": bs, "nq": nq, "nh": nh, "ch": ch, "levels": levels, "points": 4}


def _ties(call: CallMeta, operands: Arrays) -> None:
    """Moves points onto pixels and the middles between them, inside and outside each level."""
    location, levels = operands["location"], operands["spatial_shape"]
    if location is None or levels is None:
        return
    for level, (height, width) in enumerate(levels.tolist()):
        for axis, size in ((0, width), (1, height)):
            points = location[..., level, :, axis]
            points[...] = half_pixels(points, size) / max(size, 1)


def _level_tables(sizes: Sizes) -> dict[str, npt.NDArray[Any]]:
    """Operands with the sizes of the levels, of which metas have only the number."""
    levels, dtype = sizes["levels"], dtype_from_name(sizes.get("index_dtype", "int32")).numpy
    return {
        "spatial_shape": np.array(levels, dtype).reshape(-1, 2),
        "level_start_index": np.array(level_starts(levels), dtype),
    }


def _example(rank: int) -> Filled:
    """As the programs mean it: as written, they copy 1.0, 1.0 into INT32, a huge level, which is refused."""
    gradient = (1, 32, 8) if rank == 3 else (1, 32, 1, 8)
    shapes = {"value": (1, 1, 1, 8), "attn_weight": (1, 32, 1, 1, 1), "grad_output": gradient}
    tables = {"spatial_shape": np.array([[1, 1]], np.int32), "level_start_index": np.zeros(1, np.int32)}
    location = np.zeros((1, 32, 1, 1, 1, 2), np.float32)
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    expected = {"grad_value": np.full((1, 1, 1, 8), 8.0), "grad_location": np.full(location.shape, 4.0)}
    return Filled({**ones, **tables, "location": location}, {},
        {**expected, "grad_attn_weight": np.full(shapes["attn_weight"], 2.0)})


_SINGLE, _HALF = ("float32",), ("float16", "bfloat16")
# Encoder and decoder of Deformable-DETR, bird's-eye views; in 16 bit with levels of up to 128 pixels.
_RACED = {
    "encoder 2x17821": (_sizes(2, 17_821, _DETR), _SINGLE),
    "encoder 2x11400": (_sizes(2, 11_400, _OF_128), _HALF),
    "BEV 40000": (_sizes(1, 40_000, ((200, 200),)), _SINGLE),
    "BEV 2500": (_sizes(1, 2500, ((200, 200),)), _SINGLE),
    "BEV 10000": (_sizes(1, 10_000, ((100, 100),)), _HALF),
    "decoder 2x300": (_sizes(2, 300, _DETR), _SINGLE),
    "decoder 2x300 of 128": (_sizes(2, 300, _OF_128), _HALF),
    "one head 17821": (_sizes(1, 17_821, _DETR, nh=1), _SINGLE),
    "small C64": (_sizes(1, 100, ((16, 16), (8, 8)), nh=4, ch=64), _SINGLE + _HALF),
}

WORKLOADS = Workloads(
    named=named(
        *measured(_sizes, (1, 4, ((4, 4), (2, 2)), 2, 8), (1, 32, ((8, 8), (4, 4)), 2, 8), (2, 300, _THREE),
            (2, 4484, _THREE)),
        Workload(name="detr-encoder", model="Deformable-DETR encoder", sizes=_sizes(2, 17_821, _DETR),
            reduced=_sizes(2, 4484, _QUARTER), shown=True),
        Workload(name="detr-decoder", model="Deformable-DETR decoder", shown=True,
            sizes=_sizes(2, 300, _DETR)),
        Workload(name="decoder", model="decoder of a detector with 900 queries", sizes=_sizes(2, 900, _DETR),
            simulated=_sizes(1, 60, ((20, 26), (10, 13), (5, 7)), ch=16)),
        Workload(name="encoder", model="encoder of a detector, one picture", sizes=_sizes(1, 17_821, _DETR),
            simulated=_sizes(1, 185, ((10, 14), (5, 9)), nh=4, ch=16)),
        *(Workload(name=name, sizes={**sizes, "index_dtype": "int64", "grad_output_rank": 3}, raced=types)
            for name, (sizes, types) in _RACED.items())),
    variants={"index_dtype": ("int32", "int64"), "grad_output_rank": (3, 4), "points": (1, 2), "ch": (8, 24)},
    uneven={"nq": 37, "nh": 3, "ch": 20, "levels": ((9, 7), (4, 5)), "points": 3},
    canary={"nq": 5, "nh": 3, "ch": 8, "levels": ((5, 3), (2, 4)), "points": 3},
    examples=tuple(Example(f"{edition}, as intended", DType.FLOAT32, partial(_example, rank))
        for rank, edition in ((3, "A2 edition"), (4, "A2/A3 edition"))),
    probes=tuple(probes()), fixed=_level_tables, ties=_ties)
