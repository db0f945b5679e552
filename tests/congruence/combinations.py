"""Argument combinations of each operator: legal calls, and what each is about.

Plain calls vary types, sizes, masks, modes and scalars; strided ones vary how operands lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from allpairspy import AllPairs
from tests.operators import FLOYD, GRID_SAMPLER, GRID_SAMPLER_3D, GROUP_NORM, LAYER_NORM, MSDA

from npugrad.meta import CallMeta, TensorMeta
from npugrad.products import Product

FLOATS = ("float32", "float16", "bfloat16")
Sizes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Combination:
    """One call, the same for both sides."""

    name: str
    call: CallMeta
    deterministic: bool = False


@dataclass(frozen=True)
class Layout:
    """How operands lie in memory: strides and storage offset in elements; sizes of the call, other shapes."""

    strides: Mapping[str, tuple[tuple[int, ...], int]]
    sizes: Mapping[str, Any] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None

    def of(self, build: Callable[..., CallMeta], **options: Any) -> CallMeta:
        """The call with operands that lie so."""
        call = build(**options, **(self.sizes or {}))
        changed = {}
        for name in {**self.strides, **(self.shapes or {})}:
            meta = call.tensor(name)
            shape = (self.shapes or {}).get(name, meta.shape)
            changed[name] = TensorMeta(meta.dtype, shape, meta.format, *self.strides.get(name, (None, 0)))
        return call.with_inputs(**changed)


def pairs(*axes: Sequence[Any]) -> list[list[Any]]:
    """Each pair of two axes' values at least once, and in the same order in each process."""
    return [list(row) for row in AllPairs([list(axis) for axis in axes])]


def bits(mask: tuple[bool, ...]) -> str:
    """A mask for a name."""
    return "mask " + "".join("01"[bit] for bit in mask)


def combinations(operator: str) -> Iterator[Combination]:
    """Combinations of an operator, always the same and in the same order."""
    return COMBINED[operator]()


MASKS_OF_2 = list(product((True, False), repeat=2))
MASKS_OF_3 = list(product((True, False), repeat=3))
# --------------------------------------------------------------------------------- Floyd attention

_SCALES = (
    *(32**-0.5, -0.17, 0.1 + 0.2, -0.0, 1e-300, 5e-324, 1.7976931348623157e308, float("-inf")),
    *(1.0, 0.0, -2.3e-308, float("inf"), 0.25, 1 / 3),
)
_FLOYD_SIZES: tuple[Mapping[str, int], ...] = (
    *({"h": 2}, {"b": 2}, {"n": 32}, {"m": 256}, {"k": 256}, {"d": 64}, {"d": 128}),
)
_FLOYD_LAYOUTS = {
    "expanded gradient": Layout({"dy": ((0, 0, 0, 0, 0), 0)}),
    "heads inside": Layout(
        {"query": ((131072, 32, 8192, 64, 1), 0), "dy": ((131072, 32, 8192, 64, 1), 64)}, {"h": 2}
    ),
    "keys transposed": Layout(
        {"key1": ((65536, 65536, 4096, 1, 128), 0), "key2": ((524288, 524288, 32, 4096, 1), 0)}
    ),
    "every second element": Layout({"query": ((131072, 131072, 8192, 64, 2), 0)}),
    "every third element": Layout({"value1": ((196608, 196608, 12288, 96, 3), 0)}),
    "values behind others": Layout({"value2": ((524288, 524288, 4096, 32, 1), 17)}),
    "one statistic for eight": Layout(
        {name: ((2048, 2048, 128, 1, 0), 3) for name in ("softmax_max", "softmax_sum")}
    ),
    "one mask for all": Layout({"atten_mask": ((0, 0, 0, 0, 1), 0)}, {"with_mask": True}),
}


def _floyd() -> Iterator[Combination]:
    """Types, mask null and of both types, scales, sizes, strides."""
    dtypes = ("float16", "bfloat16")
    masks: Sizes = {
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
        yield Combination(f"{dtype}, {name}", layout.of(FLOYD.build, dtype=dtype))


# ----------------------------------------------------------------------------------- grid sampling

_IMAGES: Sizes = {
    "one of each": {"n": 1, "c": 1, "h": 1, "w": 1, "oh": 1, "ow": 1},
    "odd": {"n": 3, "c": 5, "h": 7, "w": 3, "oh": 2, "ow": 9},
    "beyond the AI Core": {"n": 1, "c": 2049, "h": 1, "w": 2, "oh": 1, "ow": 1},
    "no image": {"n": 0},
    "no channel": {"c": 0},
    "no row": {"oh": 0},
    "no column": {"ow": 0},
}
"""Those of volumes are the same, with the depth of the default."""
_IMAGE_LAYOUTS = {
    "channels last": Layout({"input": ((60, 1, 15, 3), 0), "grad_output": ((18, 1, 6, 3), 0)}),
    "grid with x and y apart": Layout({"grid": ((12, 2, 1, 6), 0)}),
    "expanded gradient": Layout({"grad_output": ((0, 0, 0, 0), 0)}),
    "expanded channels": Layout({"grad_output": ((6, 0, 2, 1), 0)}),
    "one grid for all": Layout({"grid": ((0, 4, 2, 1), 0)}),
    "window of a larger image": Layout({"input": ((90, 30, 6, 1), 7)}),
    "every second column": Layout({"input": ((120, 40, 10, 2), 1)}),
    "every third column": Layout({"input": ((180, 60, 15, 3), 0)}),
    "rows and columns swapped": Layout({"input": ((60, 20, 1, 4), 0), "grad_output": ((18, 6, 1, 3), 2)}),
}


def _modes(dtypes: Sequence[str], build: Callable[..., CallMeta]) -> Iterator[Combination]:
    """Modes, paddings, corners and masks, in each type."""
    of_type, modes = list(product(dtypes, MASKS_OF_2)), list(product((0, 1), (0, 1, 2)))
    for (dtype, mask), (mode, padding), align in pairs(of_type, modes, (False, True)):
        attrs = {"interpolation_mode": mode, "padding_mode": padding, "align_corners": align}
        call = build(dtype=dtype, output_mask=mask, **attrs)
        yield Combination(f"{dtype}, modes {mode} {padding} {align}, {bits(mask)}", call)
    for dtype, (size, options), mode in product(dtypes, _IMAGES.items(), (0, 1)):
        call = build(dtype=dtype, interpolation_mode=mode, padding_mode=mode, **options)
        yield Combination(f"{dtype}, {size}, mode {mode}", call)


def _images() -> Iterator[Combination]:
    """Types, modes, paddings, corners, masks, sizes, strides."""
    yield from _modes(FLOATS, GRID_SAMPLER.build)
    options = list(product(FLOATS, (False, True)))
    for (name, layout), (dtype, is_deterministic), mask in pairs(
        list(_IMAGE_LAYOUTS.items()), options, MASKS_OF_2[:3]
    ):
        call = layout.of(GRID_SAMPLER.build, dtype=dtype, output_mask=mask)
        yield Combination(f"{dtype}, {name}, {bits(mask)}, {is_deterministic}", call, is_deterministic)


def _volumes() -> Iterator[Combination]:
    """Types with DOUBLE, modes, paddings, masks, sizes, strides."""
    dtypes = (*FLOATS, "float64")
    yield from _modes(dtypes, GRID_SAMPLER_3D.build)
    last = Layout({"input": ((180, 1, 60, 15, 3), 0), "grad_output": ((36, 1, 18, 6, 3), 0)})
    for dtype in dtypes:
        call = last.of(GRID_SAMPLER_3D.build, dtype=dtype)
        yield Combination(f"{dtype}, channels last", call)
        expanded = Layout({"grad_output": ((0, 0, 0, 0, 0), 0)}).of(GRID_SAMPLER_3D.build, dtype=dtype)
        yield Combination(f"{dtype}, expanded", expanded)
        if dtype != "float64":  # leaves the AI Core, where nothing is deterministic
            yield Combination(f"{dtype}, deterministic, channels last", call, True)


# ------------------------------------------------------------------------------------------- norms

_GROUPS: Sizes = {
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
_GROUP_LAYOUTS = {
    "channels last": Layout({"grad_out": ((24, 1, 6), 0), "input": ((24, 1, 6), 0)}),
    "expanded gradient": Layout({"grad_out": ((0, 0, 0), 0)}),
    "expanded samples": Layout({"grad_out": ((0, 4, 1), 0)}),
    "input behind others": Layout({"input": ((24, 4, 1), 5)}),
    "overlapping windows": Layout({"input": ((4, 2, 1), 0)}),
    "statistics transposed": Layout({"mean": ((1, 2), 0), "rstd": ((1, 2), 1)}),
    "every second gamma": Layout({"gamma": ((2,), 3)}),
    "every third gamma": Layout({"gamma": ((3,), 0)}),
    "odd step of one sample": Layout({"grad_out": ((99, 4, 1), 0)}, {"n": 1}),
    "strides of nothing": Layout({"input": ((7, 1, 6), 0)}, {"n": 0}),
    "flat gradient": Layout({}, shapes={"grad_out": (48,)}),
    "statistics of other ranks": Layout({}, shapes={"mean": (6,), "rstd": (2, 3, 1), "gamma": (1, 6)}),
}


def _group_norm() -> Iterator[Combination]:
    """Types, sizes, masks, gamma given and null, groups, ranks, strides."""
    for (size, options), dtype, mask in pairs(list(_GROUPS.items()), FLOATS, MASKS_OF_3):
        call = GROUP_NORM.build(dtype=dtype, output_mask=mask, **options)
        yield Combination(f"{dtype}, {size}, {bits(mask)}", call)
    for dtype, (size, options) in product(FLOATS, _GROUPS.items()):
        for mask in MASKS_OF_3 if size == "plain" else MASKS_OF_3[3:4]:
            call = GROUP_NORM.build(dtype=dtype, output_mask=mask, with_gamma=False, **options)
            yield Combination(f"{dtype}, {size}, {bits(mask)}, no gamma", call)
    yield from _laid_out(GROUP_NORM.build, _GROUP_LAYOUTS)


def _laid_out(
    build: Callable[..., CallMeta], layouts: Mapping[str, Layout], **options: Any
) -> Iterator[Combination]:
    for (name, layout), dtype, is_deterministic in product(layouts.items(), FLOATS, (False, True)):
        call = layout.of(build, dtype=dtype, **options)
        yield Combination(f"{dtype}, {name}, {is_deterministic}", call, is_deterministic)


_ROWS: Sizes = {
    "plain": {},
    "one of one": {"leading": (), "normalized": (1,)},
    "rank1": {"leading": (), "normalized": (48,)},
    "two axes": {"normalized": (2, 4)},
    "all axes": {"leading": (), "normalized": (2, 3, 4)},
    "rank8": {"leading": (1, 2, 1, 3), "normalized": (2, 1, 2, 1)},
    "odd": {"leading": (3, 5), "normalized": (7,)},
    "long": {"leading": (2,), "normalized": (1031,)},
    "no row": {"leading": (0, 3)},
    "rows of nothing": {"normalized": (2, 0)},
}
_ROW_LAYOUTS = {
    "axes swapped": Layout({"grad_out": ((4, 8, 1), 0), "input": ((4, 8, 1), 0)}),
    "expanded gradient": Layout({"grad_out": ((0, 0, 0), 0)}),
    "expanded rows": Layout({"grad_out": ((0, 4, 1), 0)}),
    "input behind others": Layout({"input": ((12, 4, 1), 5)}),
    "overlapping windows": Layout({"input": ((4, 2, 1), 0)}),
    "every third element": Layout({"grad_out": ((36, 12, 3), 0)}),
    "statistics transposed": Layout({"mean": ((1, 2, 1), 0), "rstd": ((1, 2, 1), 1)}),
    "every second weight": Layout({"weight": ((2,), 3), "bias": ((2,), 0)}),
}


def _layer_norm() -> Iterator[Combination]:
    """Types, sizes, masks, ranks, strides; weight and bias in float32, as the binding takes them."""
    for (size, options), dtype, mask in pairs(list(_ROWS.items()), FLOATS, MASKS_OF_3):
        call = LAYER_NORM.build(dtype=dtype, is_mixed=True, output_mask=mask, **options)
        yield Combination(f"{dtype}, {size}, {bits(mask)}", call)
    yield from _laid_out(LAYER_NORM.build, _ROW_LAYOUTS, is_mixed=True)


# ---------------------------------------------------------------------------- deformable attention

_LEVELS = (((3, 4), (2, 2)), ((1, 1),), ((5, 1), (1, 7), (2, 3)))
_MSDA_SIZES: tuple[Mapping[str, Any], ...] = ({}, {"bs": 1, "nq": 5, "nh": 3, "ch": 16, "points": 1})


def _deformable_attention() -> Iterator[Combination]:
    """Every sample of the record, and types, index types, ranks, levels, sizes."""
    for sample in MSDA.samples(Product.ATLAS_A2):
        for is_deterministic in (False, True):
            yield Combination(f"{sample.name}, {is_deterministic}", sample.call, is_deterministic)
    axes = product(FLOATS, ("int32", "int64"), ("int32", "int64"), (3, 4), _LEVELS, _MSDA_SIZES)
    for dtype, shapes, starts, rank, levels, sizes in axes:
        call = MSDA.build(
            dtype=dtype, index_dtype=shapes, grad_output_rank=rank, levels=levels, **sizes
        ).with_inputs(level_start_index=TensorMeta(starts, (len(levels),)))
        yield Combination(f"{dtype}, {shapes}, {starts}, rank {rank}, {levels}, {dict(sizes)}", call)


COMBINED: Mapping[str, Callable[[], Iterator[Combination]]] = {
    FLOYD.name: _floyd,
    GRID_SAMPLER.name: _images,
    GRID_SAMPLER_3D.name: _volumes,
    GROUP_NORM.name: _group_norm,
    LAYER_NORM.name: _layer_norm,
    MSDA.name: _deformable_attention,
}
