"""Argument combinations of the four operators: legal calls, and what each is about.

Plain calls vary types, sizes, masks, modes and scalars; strided ones vary how operands lie in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM, MSDA

from npugrad.meta import TensorMeta
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npugrad.meta import CallMeta

FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Combination:
    """One call, the same for both sides.

    Attributes:
        name: What is particular about it.
        call: Metas and attributes.
        deterministic: Whether the deterministic option is on.
    """

    name: str
    call: CallMeta
    deterministic: bool = False


def restride(call: CallMeta, **layouts: tuple[tuple[int, ...], int]) -> CallMeta:
    """The call with operands that have these strides and this storage offset, in elements."""
    changed = {}
    for name, (strides, offset) in layouts.items():
        meta = call.tensor(name)
        changed[name] = TensorMeta(meta.dtype, meta.shape, meta.format, strides, offset)
    return call.with_inputs(**changed)


def reshape(call: CallMeta, **shapes: tuple[int, ...]) -> CallMeta:
    """The call with operands of these shapes."""
    return call.with_inputs(
        **{name: TensorMeta(call.tensor(name).dtype, shape) for name, shape in shapes.items()}
    )


# ------------------------------------------------------------------------------------------------ GroupNorm

_NORM_SIZES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "scalar": {"n": 1, "c": 1, "hxw": 1, "group": 1, "shape": ()},
    "rank1": {"shape": (48,)},
    "rank2": {"shape": (2, 24)},
    "rank4": {"shape": (2, 6, 2, 2)},
    "rank5": {"shape": (2, 6, 1, 2, 2)},
    "rank8": {"n": 1, "c": 4, "hxw": 8, "group": 2, "shape": (1, 4, 2, 1, 2, 1, 2, 1)},
    "odd": {"n": 3, "c": 7, "hxw": 5, "group": 7},
    "one group": {"n": 2, "c": 5, "hxw": 3, "group": 1},
    "long": {"n": 1, "c": 2, "hxw": 1031, "group": 2},
    "no sample": {"n": 0},
    "no pixel": {"hxw": 0},
    "no channel": {"c": 0},
}
_NORM_LAYOUTS: Mapping[str, Callable[[CallMeta], CallMeta]] = {
    "channels last": lambda call: restride(call, grad_out=((24, 1, 6), 0), input=((24, 1, 6), 0)),
    "expanded gradient": lambda call: restride(call, grad_out=((0, 0, 0), 0)),
    "expanded samples": lambda call: restride(call, grad_out=((0, 4, 1), 0)),
    "input behind others": lambda call: restride(call, input=((24, 4, 1), 5)),
    "overlapping windows": lambda call: restride(call, input=((4, 2, 1), 0)),
    "statistics transposed": lambda call: restride(call, mean=((1, 2), 0), rstd=((1, 2), 1)),
    "every second gamma": lambda call: restride(call, gamma=((2,), 3)),
    "every third gamma": lambda call: restride(call, gamma=((3,), 0)),
    "odd step of one sample": lambda call: restride(
        GROUP_NORM.build(dtype=call.tensor("input").dtype, n=1), grad_out=((99, 4, 1), 0)
    ),
    "strides of nothing": lambda call: restride(
        GROUP_NORM.build(dtype=call.tensor("input").dtype, n=0), input=((7, 1, 6), 0)
    ),
    "flat gradient": lambda call: reshape(call, grad_out=(48,)),
    "statistics of other ranks": lambda call: reshape(call, mean=(6,), rstd=(2, 3, 1), gamma=(1, 6)),
}


def group_norm() -> Iterator[Combination]:
    """Types, sizes, masks, gamma given and null, groups, ranks, strides."""
    masks = list(product((True, False), repeat=3))
    for dtype, (size, options) in product(FLOATS, _NORM_SIZES.items()):
        for mask in masks:
            call = GROUP_NORM.build(dtype=dtype, output_mask=mask, **options)
            yield Combination(f"{dtype}, {size}, {_bits(mask)}", call)
        for mask in masks if size == "plain" else [(True, False, False)]:
            call = GROUP_NORM.build(dtype=dtype, output_mask=mask, with_gamma=False, **options)
            yield Combination(f"{dtype}, {size}, {_bits(mask)}, no gamma", call)
    for dtype, (name, layout) in product(FLOATS, _NORM_LAYOUTS.items()):
        yield Combination(f"{dtype}, {name}", layout(GROUP_NORM.build(dtype=dtype)))
        yield Combination(f"{dtype}, deterministic, {name}", layout(GROUP_NORM.build(dtype=dtype)), True)


# ---------------------------------------------------------------------------------------------- GridSampler

_GRID_SIZES: Mapping[str, Mapping[str, int]] = {
    "one of each": {"n": 1, "c": 1, "h": 1, "w": 1, "oh": 1, "ow": 1},
    "odd": {"n": 3, "c": 5, "h": 7, "w": 3, "oh": 2, "ow": 9},
    "beyond the AI Core": {"n": 1, "c": 2049, "h": 1, "w": 2, "oh": 1, "ow": 1},
    "no image": {"n": 0},
    "no channel": {"c": 0},
    "no row": {"oh": 0},
    "no column": {"ow": 0},
}
_GRID_LAYOUTS: Mapping[str, Callable[[CallMeta], CallMeta]] = {
    "channels last": lambda call: restride(call, input=((60, 1, 15, 3), 0), grad_output=((18, 1, 6, 3), 0)),
    "grid with x and y apart": lambda call: restride(call, grid=((12, 2, 1, 6), 0)),
    "expanded gradient": lambda call: restride(call, grad_output=((0, 0, 0, 0), 0)),
    "expanded channels": lambda call: restride(call, grad_output=((6, 0, 2, 1), 0)),
    "one grid for all": lambda call: restride(call, grid=((0, 4, 2, 1), 0)),
    "window of a larger image": lambda call: restride(call, input=((90, 30, 6, 1), 7)),
    "every second column": lambda call: restride(call, input=((120, 40, 10, 2), 1)),
    "every third column": lambda call: restride(call, input=((180, 60, 15, 3), 0)),
    "rows and columns swapped": lambda call: restride(
        call, input=((60, 20, 1, 4), 0), grad_output=((18, 6, 1, 3), 2)
    ),
}


def grid_sampler() -> Iterator[Combination]:
    """Types, modes, paddings, corners, masks, sizes, strides."""
    masks = list(product((True, False), repeat=2))
    modes = list(product((0, 1), (0, 1, 2), (False, True)))
    for dtype, (mode, padding, align), mask in product(FLOATS, modes, masks):
        call = GRID_SAMPLER.build(
            dtype=dtype,
            interpolation_mode=mode,
            padding_mode=padding,
            align_corners=align,
            output_mask=mask,
        )
        yield Combination(f"{dtype}, modes {mode} {padding} {align}, {_bits(mask)}", call)
    for dtype, (size, options), mode in product(FLOATS, _GRID_SIZES.items(), (0, 1)):
        call = GRID_SAMPLER.build(dtype=dtype, interpolation_mode=mode, padding_mode=mode, **options)
        yield Combination(f"{dtype}, {size}, mode {mode}", call)
    for dtype, (name, layout), mask in product(FLOATS, _GRID_LAYOUTS.items(), masks[:3]):
        call = layout(GRID_SAMPLER.build(dtype=dtype, output_mask=mask))
        yield Combination(f"{dtype}, {name}, {_bits(mask)}", call)
        yield Combination(f"{dtype}, deterministic, {name}, {_bits(mask)}", call, True)


# ---------------------------------------------------------------------------------------------------- Floyd

_SCALES = (
    *(32**-0.5, -0.17, 0.1 + 0.2, -0.0, 1e-300, 5e-324, 1.7976931348623157e308, float("-inf")),
    *(1.0, 0.0, -2.3e-308, float("inf"), 0.25, 1 / 3),
)
_FLOYD_SIZES: tuple[Mapping[str, int], ...] = (
    {"h": 2},
    {"b": 2},
    {"n": 32},
    {"m": 256},
    {"k": 256},
    {"d": 64},
    {"d": 128},
)
_FLOYD_LAYOUTS: Mapping[str, Callable[[CallMeta], CallMeta]] = {
    "expanded gradient": lambda call: restride(call, dy=((0, 0, 0, 0, 0), 0)),
    "heads inside": lambda call: restride(
        _two_heads(call), query=((131072, 32, 8192, 64, 1), 0), dy=((131072, 32, 8192, 64, 1), 64)
    ),
    "keys transposed": lambda call: restride(
        call, key1=((65536, 65536, 4096, 1, 128), 0), key2=((524288, 524288, 32, 4096, 1), 0)
    ),
    "every second element": lambda call: restride(call, query=((131072, 131072, 8192, 64, 2), 0)),
    "every third element": lambda call: restride(call, value1=((196608, 196608, 12288, 96, 3), 0)),
    "values behind others": lambda call: restride(call, value2=((524288, 524288, 4096, 32, 1), 17)),
    "one statistic for eight": lambda call: restride(
        call, softmax_max=((2048, 2048, 128, 1, 0), 0), softmax_sum=((2048, 2048, 128, 1, 0), 3)
    ),
    "one mask for all": lambda call: restride(
        FLOYD.build(dtype=call.tensor("query").dtype, with_mask=True), atten_mask=((0, 0, 0, 0, 1), 0)
    ),
}


def _two_heads(call: CallMeta) -> CallMeta:
    return FLOYD.build(dtype=call.tensor("query").dtype, h=2)


def floyd() -> Iterator[Combination]:
    """Types, mask null and of both types, scales, sizes, strides."""
    dtypes = ("float16", "bfloat16")
    masks: Mapping[str, Mapping[str, Any]] = {
        "no mask": {},
        "bool mask": {"with_mask": True},
        "uint8 mask": {"with_mask": True, "mask_dtype": "uint8"},
    }
    for dtype, (name, mask) in product(dtypes, masks.items()):
        for scale in _SCALES[:11] if mask else _SCALES:
            call = FLOYD.build(dtype=dtype, scale_value=scale, **mask)
            yield Combination(f"{dtype}, {name}, scale {scale!r}", call)
    for options, (dtype, name) in product(_FLOYD_SIZES, zip(dtypes, ("no mask", "bool mask"), strict=True)):
        call = FLOYD.build(dtype=dtype, **options, **masks[name])
        yield Combination(f"{dtype}, {dict(options)}, {name}", call)
    for dtype, (name, layout) in product(dtypes, _FLOYD_LAYOUTS.items()):
        yield Combination(f"{dtype}, {name}", layout(FLOYD.build(dtype=dtype)))


# ----------------------------------------------------------------------------------------------------- MSDA

_LEVELS = (((3, 4), (2, 2)), ((1, 1),), ((5, 1), (1, 7), (2, 3)))
_MSDA_SIZES: tuple[Mapping[str, Any], ...] = ({}, {"bs": 1, "nq": 5, "nh": 3, "ch": 16, "points": 1})


def deformable_attention() -> Iterator[Combination]:
    """Every sample of the record, and types, index types, ranks, levels, sizes."""
    for sample in MSDA.samples(Product.ATLAS_A2):
        for deterministic in (False, True):
            yield Combination(f"{sample.name}, {deterministic}", sample.call, deterministic)
    axes = product(FLOATS, ("int32", "int64"), ("int32", "int64"), (3, 4), _LEVELS, _MSDA_SIZES)
    for dtype, shapes, starts, rank, levels, sizes in axes:
        call = MSDA.build(
            dtype=dtype, index_dtype=shapes, grad_output_rank=rank, levels=levels, **sizes
        ).with_inputs(level_start_index=TensorMeta(starts, (len(levels),)))
        yield Combination(f"{dtype}, {shapes}, {starts}, rank {rank}, {levels}, {dict(sizes)}", call)


def _bits(mask: tuple[bool, ...]) -> str:
    return "mask " + "".join("01"[bit] for bit in mask)


COMBINATIONS: Mapping[str, Callable[[], Iterator[Combination]]] = {
    MSDA.name: deformable_attention,
    GRID_SAMPLER.name: grid_sampler,
    GROUP_NORM.name: group_norm,
    FLOYD.name: floyd,
}
"""Combinations of each operator, always the same and in the same order."""
