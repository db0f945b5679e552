"""Calls whose points lie on the edges of pixels, results by every rule, and results that are wrong there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from npugrad import OPERATORS
from npugrad.agreement import Agreement, agreement
from npugrad.coordinates import CoordinateRule
from npugrad.dtypes import DType, dtype_from_name
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.references._blocks import store
from npugrad.sampled import SampledCall
from npugrad.tolerance import compare

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Results = dict[str, Array]

IMAGES = OPERATORS["grid_sampler_2d_backward"]
VOLUMES = OPERATORS["grid_sampler_3d_backward"]
ATTENTION = OPERATORS["multi_scale_deformable_attention_grad"]
SAMPLERS = tuple(record for record in OPERATORS.values() if record.sampled is not None)

KINDS = ("identity", "lattice", "random")
"""Where points lie: on each pixel, as before any training; on pixels and between them; anywhere."""
MUTANTS = ("ceil", "flipped", "shifted", "hundredth")
"""ceil - 1 instead of floor; the other side of the nearest edge; the next pixel; one point in 100 flipped."""
_BESIDE = 1e-9


@dataclass(frozen=True)
class EdgeCall:
    """A call with its data."""

    record: OpRecord
    meta: CallMeta
    inputs: Mapping[str, Array]
    name: str

    def __str__(self) -> str:
        return f"{self.record.name} {self.name}"

    @property
    def rules(self) -> tuple[CoordinateRule, ...]:
        return tuple(self.record.references_by_rule)

    @cached_property
    def sampled(self) -> SampledCall:
        """Its points."""
        assert self.record.sampled is not None
        return self.record.sampled(self.inputs, self.meta.attrs)

    def by_rule(self, rule: CoordinateRule) -> Results:
        """What a device that follows a rule answers."""
        golden = self._golden()
        self.record.references_by_rule[rule](self.inputs, self.meta.attrs, golden)
        return self._rounded(golden)

    def at(self, places: Floats) -> Results:
        """What a device answers that has points at these places, (points, axes), before padding."""
        name, sizes = self._coordinates, self.sampled.sizes(np.arange(self.sampled.count))
        if self.record is ATTENTION:
            coordinates = (places + 0.5) / sizes
        elif self.meta.attrs["align_corners"]:
            coordinates = 2 * places / np.maximum(sizes - 1, 1) - 1
        else:
            coordinates = (2 * places + 1) / sizes - 1
        golden = self._golden()
        moved = {**self.inputs, name: coordinates.reshape(self.inputs[name].shape)}
        self.record.reference(moved, self.meta.attrs, golden)
        return self._rounded(golden)

    def placed(self, rule: CoordinateRule) -> Floats:
        """Places of all points by a rule."""
        return self.sampled.placed(np.arange(self.sampled.count), rule)

    def mutated(self, mutant: str, rule: CoordinateRule, seed: int = 0) -> Results:
        """What a device answers that follows a rule, but for a mistake."""
        places = self.placed(rule)
        edges = np.rint(places - self.sampled.edge) + self.sampled.edge
        if mutant == "ceil":
            positions, *slopes = np.moveaxis(self.sampled.located(np.arange(len(places)), rule), -1, 0)
            is_on = positions == np.rint(positions - self.sampled.edge) + self.sampled.edge
            for slope in slopes:
                is_on &= slope != 0
            return self.at(np.where(is_on, 2 * edges - places, places))
        if mutant == "shifted":
            return self.at(places + 1)
        flipped = np.where(places >= edges, edges - _BESIDE, edges + _BESIDE)
        if mutant == "flipped":
            return self.at(flipped)
        chosen = np.random.default_rng(seed).random(len(places)) < 0.01
        return self.at(np.where(chosen[:, np.newaxis], flipped, places))

    def judged(self, results: Results) -> Agreement:
        """What verification says of results."""
        return agreement(self.record, self.inputs, self.meta.attrs, results)

    def differ(self, results: Results, others: Results) -> bool:
        """Whether two results differ by more than the tolerance."""
        return not all(compare(np.asarray(others[n], np.float64), results[n]).ok for n in results)

    @property
    def _coordinates(self) -> str:
        return "location" if self.record is ATTENTION else "grid"

    def _golden(self) -> dict[str, Floats]:
        wanted = self.record.infer(self.meta).items()
        return {name: np.empty(meta.shape) for name, meta in wanted if meta is not None}

    def _rounded(self, golden: Mapping[str, Floats]) -> Results:
        dtype = self.meta.tensor(self._coordinates).dtype.numpy
        results = {name: np.empty(values.shape, dtype) for name, values in golden.items()}
        for name, values in golden.items():
            store(results[name], values)
        return results


def grid_call(
    record: OpRecord,
    kind: str,
    seed: int = 0,
    *,
    dtype: DType = DType.FLOAT32,
    scale: float = 1.0,
    **attrs: Any,
) -> EdgeCall:
    """A call of a grid sampler on points of a kind; `scale` makes its image larger or smaller."""
    rng = np.random.default_rng(seed)
    sides = ("h", "w") if record is IMAGES else ("d", "h", "w")
    lengths = (96, 72) if record is IMAGES else (24, 20, 24)
    shape = [max(2, int(length * scale)) + int(rng.integers(0, 9)) for length in lengths]
    sizes = {
        **dict(zip(sides, shape, strict=True)),
        **{f"o{s}": n for s, n in zip(sides, shape, strict=True)},
    }
    meta = record.build(dtype=dtype, n=2, c=int(rng.integers(1, 5)), **sizes, **attrs)
    inputs = {name: array for name, array in record.make_inputs(meta, rng).items() if array is not None}
    align = bool(meta.attrs["align_corners"])
    axes = [_coordinates(kind, rng, size, align, (2, *shape), axis) for axis, size in enumerate(shape)]
    inputs["grid"] = np.stack(axes[::-1], axis=-1).astype(dtype.numpy)
    words = " ".join(f"{key}={int(value)}" for key, value in attrs.items())
    return EdgeCall(record, meta, inputs, f"{dtype} {kind} {words}".strip())


def _coordinates(
    kind: str, rng: np.random.Generator, size: int, align: bool, shape: tuple[int, ...], axis: int
) -> npt.NDArray[np.float32]:
    """Coordinates of all points on one axis."""
    if kind == "identity":  # as `torch.nn.functional.affine_grid` makes it
        line = np.linspace(-1, 1, size, dtype=np.float32)
        line = line if align else line * np.float32((size - 1) / size)
        return np.broadcast_to(line.reshape(-1, *(1,) * (len(shape) - 2 - axis)), shape)
    if kind == "random":  # few enough digits that some lie on a pixel, whose position nothing rounds
        return (rng.integers(-1100, 1101, shape) / 1024).astype(np.float32)
    place = rng.integers(-4, 2 * size + 4, shape) / 2
    return (2 * place / max(size - 1, 1) - 1 if align else (2 * place + 1) / size - 1).astype(np.float32)


def attention_call(kind: str, seed: int = 0, *, dtype: DType = DType.FLOAT32, scale: float = 1.0) -> EdgeCall:
    """A call of deformable attention; `identity` is Deformable-DETR's encoder at its own initialisation."""
    rng = np.random.default_rng(seed)
    levels = tuple((max(2, int(h * scale)), max(2, int(w * scale))) for h, w in ((25, 34), (13, 17), (7, 9)))
    heads, points = 4, 4
    queries = sum(h * w for h, w in levels)
    meta = ATTENTION.build(dtype=dtype, bs=1, nq=queries, nh=heads, ch=8, levels=levels, points=points)
    made = ATTENTION.make_inputs(meta, rng)
    inputs = {name: array for name, array in made.items() if array is not None}
    types = inputs["spatial_shape"].dtype
    inputs["spatial_shape"] = np.array(levels, types)
    inputs["level_start_index"] = np.cumsum([0, *(h * w for h, w in levels[:-1])]).astype(types)
    wh = np.array(levels, np.float32)[:, ::-1]
    shape = inputs["location"].shape
    if kind == "identity":
        location = _encoder(levels, heads, points, wh)
    elif kind == "lattice":
        location = (rng.integers(-4, 160, shape) / 2 % (wh[:, None] + 2) - 1).astype(np.float32) / wh[:, None]
    else:
        location = (rng.integers(-150, 1200, shape) / 1024).astype(np.float32)
    inputs["location"] = np.broadcast_to(location, shape).astype(dtype.numpy)
    return EdgeCall(ATTENTION, meta, inputs, f"{dtype} {kind}")


def _encoder(
    levels: tuple[tuple[int, int], ...], heads: int, points: int, wh: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Centres of all pixels as queries, and offsets of whole pixels in as many directions as heads."""
    centres = []
    for h, w in levels:
        y, x = (np.linspace(0.5, n - 0.5, n, dtype=np.float32) / np.float32(n) for n in (h, w))
        centres.append(np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2))
    reference = np.concatenate(centres)[:, None, None, None]
    angle = np.arange(heads, dtype=np.float32) * np.float32(2 * np.pi / heads)
    towards = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    towards = towards / np.abs(towards).max(axis=-1, keepdims=True)
    offsets = towards[:, None, None] * np.arange(1, points + 1, dtype=np.float32)[:, None]
    found: npt.NDArray[np.float32] = reference + (offsets / wh[:, None]).astype(np.float32)
    return found


def modes_of(record: OpRecord) -> list[dict[str, Any]]:
    """Attributes of each mode of the operator."""
    variants = {} if record is ATTENTION else record.workloads.variants
    names = [name for name in ("interpolation_mode", "padding_mode", "align_corners") if name in variants]
    return [dict(zip(names, mode, strict=True)) for mode in product(*(variants[name] for name in names))]


def edge_call(record: OpRecord, kind: str, seed: int = 0, mode: int = 0, **options: Any) -> EdgeCall:
    """A call of a kind in a mode, by its place in `modes_of`."""
    if record is ATTENTION:
        return attention_call(kind, seed, **options)
    return grid_call(record, kind, seed, **modes_of(record)[mode], **options)


DTYPES = tuple(dtype_from_name(name) for name in ("float32", "float16", "bfloat16"))
