"""What the demo calls: the official example programs' inputs and realistic shapes of each operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from npugrad.dtypes import DType
from npugrad.ops import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord

MSDA, GRID, NORM, FLOYD = (
    "multi_scale_deformable_attention_grad",
    "grid_sampler_2d_backward",
    "group_norm_backward",
    "fused_floyd_attention_grad",
)
DETR_LEVELS = ((100, 134), (50, 67), (25, 34), (13, 17))
"""Feature maps of Deformable-DETR for an 800 x 1066 picture: 17,821 keys."""
QUARTER_LEVELS = ((50, 67), (25, 34), (13, 17), (7, 9))
"""The same for a picture of half the height and width."""
LITERAL_SIZE = 0x3F800000
"""What the official program's `float {1, 1}` reads as in its int32 tensor: 1065353216."""


@dataclass(frozen=True)
class Inputs:
    """Operands and attributes of one call, and what is known of its results.

    Attributes:
        operands: By name, None for null.
        attrs: By name.
        expected: Results printed in or derived by hand from the official example, by output name.
        expected_atol: Absolute tolerance of `expected`.
    """

    operands: Mapping[str, npt.NDArray[Any] | None]
    attrs: Mapping[str, Any]
    expected: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    expected_atol: float = 0.0


@dataclass(frozen=True)
class Case:
    """One call of the demo.

    Attributes:
        operator: Operator's name.
        title: What it is, for a newcomer.
        dtype: Element type of its float operands.
        make: Makes the operands; called when the case runs, because some are large.
    """

    operator: str
    title: str
    dtype: DType
    make: Callable[[], Inputs]

    @property
    def record(self) -> OpRecord:
        """Record of the operator."""
        return OPERATORS[self.operator]


def official_cases() -> Iterator[Case]:
    """The four official example programs, as written and, where that differs, as intended."""
    yield Case(GRID, "official example", DType.FLOAT32, _official_grid_sampler)
    yield Case(NORM, "official example", DType.FLOAT32, _official_group_norm)
    for rank, edition in ((3, "A2 edition"), (4, "A2/A3 edition")):
        for size, reading in ((LITERAL_SIZE, "as written"), (1, "as intended")):
            title = f"official example, {edition}, {reading}"
            yield Case(MSDA, title, DType.FLOAT32, partial(_official_msda, rank, size))
    for literal, reading in ((True, "as written"), (False, "as intended")):
        title = f"official example, {reading}: overflows"
        yield Case(FLOYD, title, DType.FLOAT16, partial(_official_floyd, literal))


def _official_grid_sampler() -> Inputs:
    points = np.array([-1, -1, 0, -1, 1, -1, -1, 0, 0, 0, 1, 0, -1, 1, 0, 1, 1, 1], np.float32)
    edge, middle, zero = [0.25, 0, 0, 0.25, 0.25, 0, 0, 0.25], [0.5, 0, 0, 0.5, 0.5, 0, 0, 0.5], [0] * 8
    grid_grad = [2, 1.25, 2, 11.25, -16, 10, 68, 10, 4, 20, -96, 10, 66, -41.25, 2, -91.25, -80, -50]
    return Inputs(
        operands={
            "grad_output": np.ones((1, 1, 3, 3), np.float32),
            "input": np.arange(1, 41, dtype=np.float32).reshape(1, 1, 5, 8),
            "grid": points.reshape(1, 3, 3, 2),
        },
        attrs={
            "interpolation_mode": 0,
            "padding_mode": 0,
            "align_corners": False,
            "output_mask": (True, True),
        },
        expected={
            "input_grad": np.array([edge, zero, middle, zero, edge]).reshape(1, 1, 5, 8),
            "grid_grad": np.array(grid_grad).reshape(1, 3, 3, 2),
        },
    )


def _official_group_norm() -> Inputs:
    values = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    return Inputs(
        operands={
            "grad_out": values,
            "input": values,
            "mean": np.array([[6.5], [18.5]], np.float32),
            "rstd": np.full((2, 1), 0.2896827, np.float32),
            "gamma": np.ones(3, np.float32),
        },
        attrs={"n": 2, "c": 3, "hxw": 4, "group": 1, "output_mask": (True, True, True)},
        # grad_input is pure cancellation: zero but for rounding.
        expected={
            "grad_input": np.zeros((2, 3, 4)),
            "grad_gamma": np.array([-75.896867, 2.896827, 155.849293]),
            "grad_beta": np.array([68.0, 100.0, 132.0]),
        },
        expected_atol=2e-5,
    )


def _official_msda(rank: int, size: int) -> Inputs:
    return Inputs(
        operands={
            "value": np.ones((1, 1, 1, 8), np.float32),
            "spatial_shape": np.array([[size, size]], np.int32),
            "level_start_index": np.zeros(1, np.int32),
            "location": np.zeros((1, 32, 1, 1, 1, 2), np.float32),
            "attn_weight": np.ones((1, 32, 1, 1, 1), np.float32),
            "grad_output": np.ones((1, 32, 8) if rank == 3 else (1, 32, 1, 8), np.float32),
        },
        attrs={},
        expected={
            "grad_value": np.full((1, 1, 1, 8), 8.0),
            "grad_location": np.full((1, 32, 1, 1, 1, 2), 4.0 * size),
            "grad_attn_weight": np.full((1, 32, 1, 1, 1), 2.0),
        },
    )


def _official_floyd(literal: bool) -> Inputs:
    """Inputs that are no consistent forward result: all gradients overflow float16."""

    def ones(*shape: int) -> npt.NDArray[Any]:
        # As written, 4-byte floats are copied into 2-byte elements: 1.0f reads as 0, 1.875.
        halves = (
            np.ones(np.prod(shape) // 2, np.float32).view(np.float16)
            if literal
            else np.ones(shape, np.float16)
        )
        return halves.reshape(shape)

    n = m = k = 256
    d, statistics = 128, np.full((1, 1, n, m, 8), 3.0, np.float32)
    return Inputs(
        operands={
            "query": ones(1, 1, n, m, d),
            "key1": ones(1, 1, n, k, d),
            "value1": ones(1, 1, n, k, d),
            "key2": ones(1, 1, k, m, d),
            "value2": ones(1, 1, k, m, d),
            "dy": ones(1, 1, n, m, d),
            "atten_mask": np.zeros((1, 1, n, 1, k), np.uint8),
            "softmax_max": statistics,
            "softmax_sum": statistics,
            "attention_in": ones(1, 1, n, m, d),
        },
        attrs={"scale_value": d**-0.5},
    )


def realistic_cases(quick: bool = False) -> Iterator[Case]:
    """Shapes that models really use, in each dtype; `quick` leaves out the largest."""
    for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16):
        full = dtype is DType.FLOAT32 and not quick
        levels = DETR_LEVELS if full else QUARTER_LEVELS
        size = "" if full else ", quarter size"
        keys = sum(h * w for h, w in levels)
        yield Case(
            MSDA,
            f"Deformable-DETR encoder{size}",
            dtype,
            _made(MSDA, dtype, bs=2, nq=keys, nh=8, ch=32, levels=levels, points=4),
        )
        yield Case(
            MSDA,
            "Deformable-DETR decoder",
            dtype,
            _made(MSDA, dtype, bs=2, nq=300, nh=8, ch=32, levels=DETR_LEVELS, points=4),
        )
        yield Case(
            GRID, "spatial transformer", dtype, _made(GRID, dtype, n=8, c=3, h=224, w=224, oh=224, ow=224)
        )
        yield Case(GRID, "feature warping", dtype, _made(GRID, dtype, n=4, c=64, h=64, w=64, oh=64, ow=64))
        yield Case(
            NORM,
            "diffusion UNet block",
            dtype,
            _made(NORM, dtype, n=8, c=320, hxw=4096, group=32, shape=(8, 320, 64, 64)),
        )
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        yield Case(
            FLOYD, "triangle attention", dtype, _made(FLOYD, dtype, b=1, h=1, n=128, m=128, k=128, d=32)
        )


def _made(operator: str, dtype: DType, **sizes: Any) -> Callable[[], Inputs]:
    def make() -> Inputs:
        record = OPERATORS[operator]
        call: CallMeta = record.build(dtype=dtype, **sizes)
        operands = record.make_inputs(call, np.random.default_rng(20240229))
        if "levels" in sizes:  # metas tell how many levels there are, not how large they are
            operands |= _level_tables(sizes["levels"], operands)
        return Inputs(operands, call.attrs)

    return make


def _level_tables(
    levels: tuple[tuple[int, int], ...], operands: Mapping[str, npt.NDArray[Any] | None]
) -> dict[str, npt.NDArray[Any] | None]:
    sizes = np.array(levels)
    starts = np.concatenate([[0], np.cumsum(sizes.prod(axis=1))[:-1]])
    tables = {"spatial_shape": sizes, "level_start_index": starts}
    return {name: table.astype(_dtype(operands[name])) for name, table in tables.items()}


def _dtype(array: npt.NDArray[Any] | None) -> np.dtype[Any]:
    return np.dtype(np.int64) if array is None else array.dtype
