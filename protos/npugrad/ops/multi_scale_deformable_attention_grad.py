"""The record of aclnnMultiScaleDeformableAttentionGrad.

Sources: the two editions of the official page (Atlas A2; Atlas A2 and A3) and, where cited as a check, the
vendor's public source (ops-nn); the code for values is in `..._data`. Sizes: bs, nk = num_keys,
nq = num_queries, nh = num_heads, ch = channels, nl = num_levels, np = num_points.
"""

from __future__ import annotations

import math
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from npugrad import rules
from npugrad.changes import lengthened
from npugrad.coordinates import ATTENTION_RULES
from npugrad.dtypes import DType, Format
from npugrad.error_table import INNER_NULLPTR
from npugrad.generators import Draw
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Finding, Sample
from npugrad.ops._multi_scale_deformable_attention_grad_data import OPERATOR, check_levels, make_inputs
from npugrad.ops._multi_scale_deformable_attention_grad_points import Sampled
from npugrad.ops._multi_scale_deformable_attention_grad_workloads import WORKLOADS
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.multi_scale_deformable_attention_grad import reference
from npugrad.releases import CannRelease

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npugrad.operator import Arrays, VendorCode
    from npugrad.page import DTypes

# fmt: off
NAME = "aclnnMultiScaleDeformableAttentionGrad"
EDITIONS = (f"{NAME} (A2 edition)", f"{NAME} (A2/A3 edition)")
PRODUCTS = (Product.ATLAS_A2, Product.ATLAS_A3)
MAX_CHANNELS, MAX_LEVELS, MAX_HEADS, MAX_POINTS = 256, 16, 16, 16
_DETERMINISTIC_UNTIL, _DETERMINISTIC_AGAIN = 9, CannRelease.parse("9.2.0-beta.2")
"""The pages of the releases in between, from any 9.0 on, say that the operator has no deterministic mode."""


def _flat_heads(meta: TensorMeta) -> tuple[int, ...]:
    """(bs, nq, nh*ch), all that the device takes; a rank 4 tensor has the same elements in the same order."""
    return (*meta.shape[:2], math.prod(meta.shape[2:]))


FLOATS: DTypes = dict.fromkeys(PRODUCTS, (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16))
INDICES: DTypes = dict.fromkeys(PRODUCTS, (DType.INT32, DType.INT64))

p = Page(NAME, "ops-nn", dict(zip(PRODUCTS, EDITIONS, strict=True)), editions=EDITIONS)
p.note("ranks", "gradOutput has rank 4; npugrad: 3 as well", since="8.5.0", until="9.0.0")
p.note("ranks", "gradOutput has rank 3; npugrad: 4 as well", since="9.0.0")
p.note("codes", "161002 has no row on types that differ; npugrad: refused", since="9.2.0-beta.2")
p.input("value", FLOATS,
    "(bs, nk, nh, ch), ch a multiple of 8 up to 256, nh up to 16. The feature maps of all levels.",
    axes="bs num_keys num_heads channels")
p.input("spatial_shape", INDICES, "(nl, 2), nl up to 16. Height and width of each level.",
    axes="num_levels 2", draw=None)
p.input("level_start_index", INDICES, "(nl). First key of each level.", axes="num_levels", draw=None)
# Most points are inside; weights add up to about 1 over four levels of four points.
p.input("location", FLOATS, "(bs, nq, nh, nl, np, 2), nq below 500000, np up to 16, dtype of value. "
    "Sampling points (x, y), 0 to 1 across a level.", axes="bs num_queries num_heads num_levels num_points 2",
    draw=Draw("uniform", (-0.15, 1.15)))
p.input("attn_weight", FLOATS, "(bs, nq, nh, nl, np), dtype of value. Attention weight of each sampling "
    "point. The weight of a point outside its level, or at NaN, is ignored, even if NaN or infinite.",
    axes="bs num_queries num_heads num_levels num_points", draw=Draw("uniform", (0.0, 0.125)))
p.input("grad_output", FLOATS,
    "(bs, nq, nh, ch) or (bs, nq, nh*ch), dtype of value. Gradient of the forward output.",
    axes="bs num_queries num_heads channels", device_view=_flat_heads)
# Kernels add into the outputs, and the vendor's own callers zero them first.
p.output("grad_value", "value", "(bs, nk, nh, ch), dtype of value. Gradient of value.", zero_init=True)
p.output("grad_location", "location", "(bs, nq, nh, nl, np, 2), dtype of value. Gradient of location.",
    zero_init=True)
p.output("grad_attn_weight", "attn_weight", "(bs, nq, nh, nl, np), dtype of value. Gradient of attn_weight.",
    zero_init=True)
p.sizes("bs num_keys num_heads channels", of="value")
p.sizes("num_levels", of="spatial_shape")
p.sizes("num_queries num_points", of="location")
p.short = {"num_keys": "nk", "num_heads": "nh", "channels": "ch", "num_levels": "nl", "num_queries": "nq"}
p.short |= {"num_points": "points"}
p.smallest = {"bs": 2, "nk": 16, "nq": 3, "nh": 2, "ch": 8, "nl": 2, "points": 2}

_INPUTS = "value spatial_shape level_start_index location attn_weight grad_output"


def _when_the_kernel_is_missing(call: CallMeta) -> VendorCode:
    is_empty = any(meta is not None and not meta.size for meta in call.inputs.values())
    return "accepts" if is_empty else INNER_NULLPTR


def _channels_of_grad_output(call: CallMeta) -> Finding | None:
    found, (heads, channels) = call.tensor("grad_output").shape, call.tensor("value").shape[2:]
    expected = (heads * channels,) if len(found) == 3 else (heads, channels)
    if found[2:] == expected:
        return None
    return Finding(f"{rules.shape_text(found[2:])} from axis 2 of shape {rules.shape_text(found)}",
        f"{rules.shape_text(expected)}, num_heads and channels of value")


p.rule(rules.product, "product", code=INNER_NULLPTR,
    text="The operator exists on the Atlas A2 and Atlas A3 series.", vendor=_when_the_kernel_is_missing,
    alone=True, pick="The documents list products and give no code; the vendor's source does not look at "
    "the product and the missing kernel surfaces as 561103 (from source, inferred), but an empty input "
    "succeeds before a kernel is looked for. npugrad: 561103, before any other check.")
p.rule(rules.not_null, f"{_INPUTS} grad_value grad_location grad_attn_weight", row=1, check=1)
p.rule(rules.dtype_in(), "value spatial_shape level_start_index", row=1, check=2)
p.rule(rules.same_dtype("value"),
    "location attn_weight grad_output grad_value grad_location grad_attn_weight", row=(1, 2), check=2,
    vendor="accepts", pick="The documents refuse float operands of different data types; the vendor's "
    "source accepts them, as it looks at each on its own and casts it. npugrad: refused.")
p.rule(rules.format_not(Format.FRACTAL_NZ), _INPUTS, check=3, pick="The documents name ND without a code "
    "for another format; the vendor's source refuses FRACTAL_NZ only. npugrad: FRACTAL_NZ alone is refused.")
p.rule(rules.has_axes, "value spatial_shape", row=3, check=4)
p.rule(rules.last_axis(2, "pairs", "the documented size"), "spatial_shape", row=3, check=4)
p.rule(rules.has_axes, "level_start_index location", row=3, check=4)
p.rule(rules.last_axis(2, "pairs", "the documented size"), "location", row=3, check=4)
p.rule(rules.has_axes, "attn_weight", row=3, check=4)
p.rule(rules.rank_in(3, 4), "grad_output", row=3, check=4, text="gradOutput has the axes (bs, num_queries, "
    "num_heads, channels) or (bs, num_queries, num_heads*channels).", pick="The documents state rank 4, "
    "though an example of theirs passes rank 3; the vendor's source requires rank 3 and refuses rank 4 with "
    "161002. npugrad: both ranks, because their memory layout is the same.")

# The edition of A2 and A3 has determinism as the first entry of its constraints, and so counts one more.
p.rule(rules.size_in("channels", step=8), "value", id="channels.multiple", row=3, check=5, entry=1)
p.rule(rules.size_in("channels", high=MAX_CHANNELS), "value", id="channels.limit", row=3, check=5, entry=1)
p.rule(rules.size_in("num_queries", high=499_999), "location", id="num_queries.limit", row=3, check=5,
    entry=2)
p.rule(rules.size_in("num_levels", high=MAX_LEVELS), "spatial_shape", id="num_levels.limit", row=3, check=5,
    entry=3)
p.rule(rules.size_in("num_heads", high=MAX_HEADS), "value", id="num_heads.limit", row=3, check=5, entry=4)
p.rule(rules.size_in("num_points", high=MAX_POINTS), "location", id="num_points.limit", row=3, check=5,
    entry=5)
for _name, _sizes in {
    "level_start_index": "num_levels",
    "location": "bs num_heads num_levels",
    "attn_weight": "bs num_queries num_heads num_levels num_points",
    "grad_output": "bs num_queries",
}.items():
    for _size in _sizes.split():
        p.rule(rules.same_size(_size), _name, row=3, check=6)
p.rule(rules.special("channels", "ends with the num_heads and channels of value, apart or in one axis",
        _channels_of_grad_output, p.edited("grad_output", lengthened()), "value"), "grad_output", row=3,
    check=6, requires=("grad_output.rank", "value.rank"))
p.rule(rules.same_shape("value"), "grad_value", check=7)
p.rule(rules.same_shape("location"), "grad_location", check=7)
p.rule(rules.same_shape("attn_weight"), "grad_attn_weight", check=7)
p.not_expressible("determinism is an option of the call, not a precondition", entry=0)
p.not_expressible("empty inputs are no error; the outputs are zeros", check=8)

_PLACES = ("spatial_shape", "level_start_index", "location")
_READS = {"grad_value": (*_PLACES, "attn_weight", "grad_output"),
    "grad_location": ("value", *_PLACES, "attn_weight", "grad_output"),
    "grad_attn_weight": ("value", *_PLACES, "grad_output")}


def build(
    *, levels: tuple[tuple[int, int], ...] = ((3, 4), (2, 2)), index_dtype: DType | str = DType.INT32,
    grad_output_rank: int = 4, **sizes: Any,
) -> CallMeta:
    """A legal call: bs batches, nq queries, nh heads of ch channels, `points` sampling points in each level.

    `levels` has (height, width) of each level; value has one key for each of their pixels. `grad_output_rank`
    is 4 for (bs, nq, nh, ch) and 3 for (bs, nq, nh*ch).
    """
    call = p.calls.build(nl=len(levels), nk=sum(height * width for height, width in levels), **sizes)
    gradient, shape = call.tensor("grad_output"), call.tensor("spatial_shape").shape
    return call.with_inputs(spatial_shape=TensorMeta(index_dtype, shape),
        level_start_index=TensorMeta(index_dtype, shape[:1]),
        grad_output=gradient if grad_output_rank == 4 else TensorMeta(gradient.dtype, _flat_heads(gradient)))


def _samples(product: Product) -> Iterator[Sample]:
    if product not in PRODUCTS:
        return
    for dtype in FLOATS[product]:
        for rank in (4, 3):
            yield Sample(f"{dtype}-rank{rank}", build(dtype=dtype, product=product, grad_output_rank=rank))
    call = build(product=product)
    yield Sample("int64", build(product=product, index_dtype=DType.INT64))
    yield Sample("mixed_indices", call.with_inputs(level_start_index=TensorMeta(DType.INT64, (2,))))
    for rank in (3, 4):  # the sizes of the documents' example programs
        example = build(product=product, bs=1, nq=32, nh=1, levels=((1, 1),), points=1, grad_output_rank=rank)
        yield Sample(f"example-rank{rank}", example)
    yield Sample("limits",
        build(product=product, bs=1, nq=2, nh=MAX_HEADS, ch=MAX_CHANNELS, levels=((2, 1),) * MAX_LEVELS,
            points=MAX_POINTS))
    for size in ("bs", "nq", "nh", "ch", "points"):
        empty: dict[str, Any] = {size: 0}
        yield Sample(f"empty_{size}", build(product=product, **empty))
    yield Sample("empty_nk", build(product=product, levels=((0, 3), (2, 0))))
    yield Sample("empty_nl", build(product=product, levels=()))
    yield Sample("declared", call.with_outputs(**p.output_metas(call)))
    expanded = TensorMeta(DType.FLOAT32, call.tensor("grad_output").shape, strides=(0, 0, 0, 0))
    heads_first = TensorMeta(DType.FLOAT32, call.tensor("value").shape, Format.NCHW, strides=(256, 8, 128, 1))
    yield Sample("strided", call.with_inputs(grad_output=expanded, value=heads_first))


def _determinism_check(call: CallMeta, release: CannRelease | None) -> str | None:
    if release is not None and (release.major < _DETERMINISTIC_UNTIL or release >= _DETERMINISTIC_AGAIN):
        return None
    return (
        f"deterministic: found True; expected False with CANN {release or 'of unknown release'}, because the "
        f"operator's pages offer it before {_DETERMINISTIC_UNTIL}.0 and from {_DETERMINISTIC_AGAIN}"
    )


@wraps(reference)
def _reference(inputs: Arrays, attrs: Mapping[str, Any], outputs: Mapping[str, Any], **how: Any) -> None:
    """The reference, which takes any levels, after the check that comes before the operator everywhere."""
    check_levels(inputs)
    reference(inputs, attrs, outputs, **how)


MULTI_SCALE_DEFORMABLE_ATTENTION_GRAD = p.record(OPERATOR, wire=1,
    summary="Gradients of multi-scale deformable attention with respect to values, locations and weights.",
    reads=lambda call: _READS, reference=_reference,
    references_by_rule={rule: partial(_reference, rule=rule) for rule in ATTENTION_RULES}, build=build,
    samples=_samples, workloads=WORKLOADS, make_inputs=make_inputs, determinism_check=_determinism_check,
    min_cann="8.0", data_check=lambda inputs, attrs: check_levels(inputs), sampled=Sampled,
    checked_operands=("spatial_shape", "level_start_index"))
"""The record; order of parameters is the order of aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize."""
