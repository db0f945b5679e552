"""The record of aclnnGridSampler2DBackward.

Sources: the official page "aclnnGridSampler2DBackward" (Atlas training series, Atlas A2) and, where cited
as such, the vendor's public source (ops-cv), which also adds the Atlas A3 series. The
constraints are in `_grid_sampler_2d_backward_rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.binding import TorchBinding
from npugrad.dtypes import DType
from npugrad.generators import Draw
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import AttrParam, OpRecord, Sample, TensorParam
from npugrad.ops._grid_sampler_2d_backward_rules import (
    C_NAMES,
    CONSTRAINTS,
    DOCUMENT,
    DTYPES,
    INTERPOLATION_MODES,
    LIKE,
    NOT_EXPRESSIBLE,
    PADDING_MODES,
    accepts_unchecked,
)
from npugrad.ops._grid_sampler_2d_backward_workloads import WORKLOADS
from npugrad.products import Product
from npugrad.references.grid_sampler_2d_backward import reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from npugrad.releases import CannRelease

MAX_DETERMINISTIC_CHANNELS = 2048
"""Above it, and with DOUBLE, the operator leaves the AI Core, and with it the deterministic mode; on every
release with a page of its own, 8.5.0 to 9.2.0-beta.2."""


_NORMAL = Draw("normal")


def _input(name: str, doc: str, draw: Draw = _NORMAL) -> TensorParam:
    return TensorParam(name=name, c_name=C_NAMES[name], role="input", doc=doc, dtypes=DTYPES, draw=draw)


def _output(index: int, name: str, doc: str, *, zero_init: bool = False) -> TensorParam:
    return TensorParam(
        name=name,
        c_name=C_NAMES[name],
        role="output",
        doc=doc,
        dtypes=DTYPES,
        masked_by=index,
        when_masked="allocate",  # a null output is refused whatever the mask says
        zero_init=zero_init,
    )


_PARAMS = (
    _input("grad_output", "(N, C, OH, OW), dtype of input. Gradient of the sampled output."),
    _input(
        "input",
        "(N, C, H, W) with H and W above 0, float32, float16 or (not on the Atlas training series) bfloat16. "
        "The sampled images.",
    ),
    _input(
        "grid",
        "(N, OH, OW, 2), dtype of input. Sampling points (x, y), inside the image from -1 to 1.",
        Draw("uniform", (-1.1, 1.1)),
    ),
    AttrParam(
        name="interpolation_mode",
        c_name=C_NAMES["interpolation_mode"],
        type="int64",
        doc="0 bilinear, 1 nearest.",
        choices=INTERPOLATION_MODES,
    ),
    AttrParam(
        name="padding_mode",
        c_name=C_NAMES["padding_mode"],
        type="int64",
        doc="What a point outside the image reads: 0 zeros, 1 border, 2 reflection.",
        choices=PADDING_MODES,
    ),
    AttrParam(
        name="align_corners",
        c_name=C_NAMES["align_corners"],
        type="bool",
        doc="True: -1 and 1 are the centres of the corner pixels; False: their outer edges.",
    ),
    AttrParam(
        name="output_mask",
        c_name=C_NAMES["output_mask"],
        type="bool_array",
        doc="Two bools: compute input_grad, grid_grad. None: nothing is checked and nothing computed.",
    ),
    _output(0, "input_grad", "(N, C, H, W), dtype of input. Gradient of input.", zero_init=True),
    _output(1, "grid_grad", "(N, OH, OW, 2), dtype of input. Gradient of grid."),
)


def build(
    *,
    dtype: DType | str = DType.FLOAT32,
    product: Product = Product.ATLAS_A2,
    n: int = 2,
    c: int = 3,
    h: int = 4,
    w: int = 5,
    oh: int = 3,
    ow: int = 2,
    interpolation_mode: int = 0,
    padding_mode: int = 0,
    align_corners: bool = False,
    output_mask: tuple[bool, ...] | None = (True, True),
) -> CallMeta:
    """A legal call: n images of c channels and h x w pixels, each sampled at oh x ow points."""
    return CallMeta(
        inputs={
            "grad_output": TensorMeta(dtype, (n, c, oh, ow)),
            "input": TensorMeta(dtype, (n, c, h, w)),
            "grid": TensorMeta(dtype, (n, oh, ow, 2)),
        },
        attrs={
            "interpolation_mode": interpolation_mode,
            "padding_mode": padding_mode,
            "align_corners": align_corners,
            "output_mask": output_mask,
        },
        product=product,
    )


def _output_metas(call: CallMeta) -> Mapping[str, TensorMeta]:
    return {
        name: (call.declared(name) or _inferred(call.tensor(like))).contiguous()
        for name, like in LIKE.items()
    }


def _inferred(like: TensorMeta) -> TensorMeta:
    return TensorMeta(like.dtype, like.shape)


def _reads(call: CallMeta) -> Mapping[str, tuple[str, ...]]:
    """The nearest pixel does not change with the grid, so that grid_grad is 0 whatever the operands hold."""
    is_nearest = call.attrs["interpolation_mode"] == INTERPOLATION_MODES["nearest"]
    return {
        "input_grad": ("grad_output", "grid"),
        "grid_grad": () if is_nearest else ("grad_output", "input", "grid"),
    }


def _determinism_check(call: CallMeta, release: CannRelease | None) -> str | None:
    if accepts_unchecked(call):
        return None
    image = call.tensor("input")
    if image.dtype is DType.FLOAT64:
        return "input: found float64; expected another type where deterministic is True on an NPU"
    channels = image.shape[1]
    if channels <= MAX_DETERMINISTIC_CHANNELS:
        return None
    return (
        f"input: found {channels} channels; expected at most {MAX_DETERMINISTIC_CHANNELS} where "
        "deterministic is True on an NPU"
    )


def _samples(product: Product) -> Iterator[Sample]:
    for dtype in DTYPES[product]:
        yield Sample(f"{dtype}", build(dtype=dtype, product=product))
    yield from _mode_samples(product)
    for mask in ((True, False), (False, True), (False, False)):
        yield Sample("mask" + "".join("01"[bit] for bit in mask), build(product=product, output_mask=mask))
    yield Sample("mask_null", build(product=product, output_mask=None))
    yield Sample("one_pixel", build(product=product, n=1, c=1, h=1, w=1, oh=1, ow=1))
    many = MAX_DETERMINISTIC_CHANNELS + 1
    yield Sample("many_channels", build(product=product, n=1, c=many, h=1, w=2, oh=1, ow=1))
    yield Sample("empty_n", build(product=product, n=0))
    yield Sample("empty_c", build(product=product, c=0))
    yield Sample("empty_oh", build(product=product, oh=0))
    yield Sample("empty_ow", build(product=product, ow=0))
    call = build(product=product)
    image, grid = call.tensor("input"), call.tensor("grid")
    yield Sample("declared", call.with_outputs(input_grad=image, grid_grad=grid))
    expanded = TensorMeta(DType.FLOAT32, call.tensor("grad_output").shape, strides=(0, 0, 0, 0))
    channels_last = TensorMeta(DType.FLOAT32, image.shape, strides=(60, 1, 15, 3))
    yield Sample("strided", call.with_inputs(grad_output=expanded, input=channels_last))


def _mode_samples(product: Product) -> Iterator[Sample]:
    for interpolation, interpolation_mode in INTERPOLATION_MODES.items():
        for padding, padding_mode in PADDING_MODES.items():
            for align_corners in (False, True):
                call = build(
                    product=product,
                    interpolation_mode=interpolation_mode,
                    padding_mode=padding_mode,
                    align_corners=align_corners,
                )
                yield Sample(f"{interpolation}-{padding}" + ("-aligned" if align_corners else ""), call)


def _make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
    """Normal images and gradients; points mostly inside, some outside, some exactly on the border."""

    def values(name: str, meta: TensorMeta) -> npt.NDArray[np.float32]:
        return (
            _points(meta.shape, rng) if name == "grid" else rng.standard_normal(meta.shape, dtype=np.float32)
        )

    return {
        name: None if meta is None else values(name, meta).astype(meta.dtype.numpy)
        for name, meta in call.inputs.items()
    }


def _points(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    points = rng.uniform(-1, 1, shape).astype(np.float32)
    kind = rng.random(shape, dtype=np.float32)
    points[kind < 0.1] *= 1.75
    points[kind > 0.95] = np.sign(points[kind > 0.95])
    return points


GRID_SAMPLER_2D_BACKWARD = OpRecord(
    name="grid_sampler_2d_backward",
    aclnn_name=DOCUMENT,
    summary="Gradients of two-dimensional grid sampling with respect to the sampled images and the grid.",
    documents=(DOCUMENT,),
    repositories=("ops-cv",),
    params=_PARAMS,
    products={
        Product.ATLAS_TRAINING: DOCUMENT,
        Product.ATLAS_A2: DOCUMENT,
        Product.ATLAS_A3: "newer vendor documents and source",
    },
    constraints=CONSTRAINTS,
    not_expressible=NOT_EXPRESSIBLE,
    output_metas=_output_metas,
    reads=_reads,
    reference=reference,
    build=build,
    samples=_samples,
    workloads=WORKLOADS,
    make_inputs=_make_inputs,
    extra_tolerance=lambda inputs, attrs, output: 0.0,
    determinism_check=_determinism_check,
    min_cann="8.0",
    binding=TorchBinding(
        "aten.grid_sampler_2d_backward",
        (
            "grad_output",
            "input",
            "grid",
            "interpolation_mode",
            "padding_mode",
            "align_corners",
            "output_mask",
        ),
    ),
    accepts_unchecked=accepts_unchecked,
)
"""The record; order of params is the order of aclnnGridSampler2DBackwardGetWorkspaceSize."""
