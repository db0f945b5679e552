"""The record of aclnnLayerNormBackward.

Sources: the official page (release 9.1.0) and, where cited as a check, the vendor's public source (ops-nn). A
row is what is normalised together: the last axes of input, one for each entry of normalized_shape.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.changes import retyped
from npugrad.dtypes import DType, Format
from npugrad.error_table import PARAM_INVALID
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Finding, Sample
from npugrad.ops import _normalisation as normalisation
from npugrad.ops._layer_norm_backward_workloads import WORKLOADS
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.layer_norm_backward import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from npugrad.changes import Candidates
    from npugrad.operator import Arrays, VendorCode

# fmt: off
DOCUMENT = "aclnnLayerNormBackward"
_F = rules.FLOATS
_FLOATS = _F[Product.ATLAS_A2]
_ROWS = "A1*...*Ai elements, rank 1 to 8, a dtype no narrower than that of input."
_SCALE = "(R1, ..., Rj), dtype of input or float32."
_LIKE_WEIGHT = "(R1, ..., Rj), dtype of weight, of input without it."


def build(
    *, dtype: DType | str = DType.FLOAT32, normalized: tuple[int, ...] = (4,), is_mixed: bool = False,
    **sizes: Any,
) -> CallMeta:
    """A legal call on input with the axes `leading` and `normalized`; mixed: all but the data is float32."""
    call = p.calls.build(dtype=DType.FLOAT32 if is_mixed else dtype, normalized_shape=normalized, **sizes)
    data, mean = call.tensor("input"), call.tensor("mean")
    statistics = TensorMeta(mean.dtype, (*mean.shape, *(1,) * len(normalized)))
    made = call.with_inputs(mean=statistics, rstd=statistics)
    return made.with_inputs(**dict.fromkeys(("grad_out", "input"), TensorMeta(dtype, data.shape)))


def _normalized(call: CallMeta) -> tuple[int, ...]:
    return call.integers("normalized_shape") or ()


def _split(call: CallMeta) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of input before the normalised ones, and the normalised ones."""
    shape = call.tensor("input").shape
    leading = len(shape) - len(_normalized(call))
    return shape[:leading], shape[leading:]


def _scales(call: CallMeta, name: str) -> tuple[DType, ...]:
    """Types of weight and what follows it: its own; while it is null, that of input or FLOAT."""
    data, weight = call.tensor("input").dtype, call.inputs["weight"]
    if weight is not None and name != "weight":
        return (weight.dtype,)
    return (data,) if p.is_output(name) else (data, DType.FLOAT32)


def _like_weight(call: CallMeta) -> TensorMeta:
    return TensorMeta(_scales(call, "grad_weight")[0], _normalized(call))


p = Page(DOCUMENT, "ops-nn", dict.fromkeys(Product, DOCUMENT), release="9.1.0")
rules.only_on(p, Product.ATLAS_A2, Product.ATLAS_A3, until="9.0.0")
p.note("ranks", "the page gives no ranks; npugrad: those of later pages", until="9.0.0")
p.smallest = {"leading": (2, 3), "normalized_shape": (4,)}
p.input("grad_out", _F, "(A1, ..., Ai, R1, ..., Rj), rank 1 to 8. Gradient of the normalised output.",
    axes="*leading *normalized_shape")
p.input("input", "grad_out", "(A1, ..., Ai, R1, ..., Rj), dtype of grad_out. The forward input.")
p.attr("normalized_shape", "int64_array",
    "(R1, ..., Rj), 1 to 8 entries: the trailing axes of input, over which it is normalised.")
p.input("mean", _F, f"{_ROWS} Mean of each row.", axes="*leading", draw=normalisation.MEAN)
p.input("rstd", "mean", "Shape and dtype of mean. Reciprocal standard deviation of each row.",
    draw=normalisation.RSTD)
p.input("weight", _F, f"{_SCALE} Scale of each element of a row, ones when null.", axes="*normalized_shape",
    c_name="weightOptional", optional=True, draw=normalisation.SCALE)
p.input("bias", "weight", f"{_SCALE} Shift of each element of a row; its values do not affect the results.",
    c_name="biasOptional", optional=True)
p.attr("output_mask", "bool_array", "Three bools: compute grad_input, grad_weight, grad_bias.")
p.output("grad_input", "input", "Shape and dtype of input. Gradient of input.", c_name="gradInputOut")
for _name in ("weight", "bias"):
    p.output(f"grad_{_name}", _name, f"{_LIKE_WEIGHT} Gradient of {_name}.",
        c_name=f"grad{_name.capitalize()}Out", meta=_like_weight)

_INPUTS = "grad_out input mean rstd weight bias"
_OUTPUTS = "grad_input grad_weight grad_bias"


def _is_wide(call: CallMeta) -> Finding | None:
    mean, data = call.tensor("mean").dtype, call.tensor("input").dtype
    return None if mean.itemsize >= data.itemsize else Finding(f"dtype {mean}", f"one as wide as {data}")


def _is_without_bfloat16(call: CallMeta) -> Finding | None:
    for name in (*_INPUTS.split(), *_OUTPUTS.split()):
        meta = rules.present(call, name)
        if meta is not None and meta.dtype is DType.BFLOAT16:
            return Finding(f"dtype bfloat16 of {name}", f"float32 or float16 on {call.product.full_name}")
    return None


def _renormalized(*shapes: Callable[[CallMeta], tuple[int, ...]]) -> Candidates:
    """Normalises other axes, and changes weight and bias with them; without axes these become null."""

    def candidates(call: CallMeta) -> Iterator[CallMeta]:
        for shape in (made(call) for made in shapes):
            given = {name: meta for name in ("weight", "bias") if (meta := call.inputs[name])}
            scale = {name: TensorMeta(meta.dtype, shape) if shape else None for name, meta in given.items()}
            yield call.with_attrs(normalized_shape=shape).with_inputs(**scale)

    return candidates


def _has_axes(call: CallMeta) -> Finding | None:
    rank, number = call.tensor("input").rank, len(_normalized(call))
    return None if rank >= number else Finding(f"rank {rank}", f"{number} or more")


def _ends_in_axes(call: CallMeta) -> Finding | None:
    axes, expected = _split(call)[1], _normalized(call)
    found = Finding(f"last axes {rules.shape_text(axes)}", rules.shape_text(expected))
    return None if axes == expected else found


def _vendor_on_axes(call: CallMeta) -> VendorCode:
    """Only entries i from d on are compared with axis i + d, d being how many more axes input has."""
    shape, (leading, axes) = _normalized(call), _split(call)
    is_counted = p.is_wanted(call, "grad_weight") or p.is_wanted(call, "grad_bias")
    is_seen = shape[len(leading) :] != axes[len(leading) :] or (is_counted and prod(shape) != prod(axes))
    return PARAM_INVALID if is_seen else "accepts"


def _vendor_on_scale(name: str) -> Callable[[CallMeta], VendorCode]:
    def code(call: CallMeta) -> VendorCode:
        meta = call.declared(name)
        return "accepts" if meta is not None and meta.size == prod(_split(call)[1]) else PARAM_INVALID

    return code


p.rule(rules.not_null, "grad_out input mean rstd normalized_shape output_mask", row=1, check=2)
p.rule(rules.entries(3), "output_mask", row=10, check=3)
p.rule(rules.not_null, _OUTPUTS, row=[2, 3, 4], check=4)

p.rule(rules.dtype_in(*_FLOATS), "input mean rstd bias", row=1, check=5)
p.rule(rules.dtype_in(*_FLOATS, is_always=True), _OUTPUTS, check=8)
_LEAD = ("input.dtype", "mean.dtype")
_LED = (*_LEAD, "{}.dtype", "weight.same_dtype")
p.rule(rules.same_dtype("input"), "grad_out", row=1, check=(5, 6), requires=_LEAD)
p.rule(rules.same_dtype("input, or FLOAT", _scales), "weight", row=1, check=(5, 7), requires=_LEAD)
p.rule(rules.same_dtype("weight; where that is null, of input, or FLOAT", _scales), "bias", requires=_LED,
    **rules.SAID)
p.rule(rules.same_dtype("mean"), "rstd", requires=_LED, **rules.SAID)
p.rule(rules.same_dtype("input"), "grad_input", requires=_LED, **rules.SAID)
p.rule(rules.same_dtype("weight; where that is null, of input", _scales), "grad_weight grad_bias",
    requires=_LED, **rules.SAID)
p.rule(rules.special("width", "has a data type no narrower than that of input", _is_wide,
        p.edited("mean", retyped())), "mean", requires=("mean.dtype", "input.dtype"), **rules.SAID)
p.rule(rules.special("not_bfloat16", "", _is_without_bfloat16, p.edited("input", retyped()),
        *("grad_out", "mean", "rstd", "weight", "bias", *_OUTPUTS.split()), is_nullable=True), "input",
    text="No tensor has data type BFLOAT16.", products=frozenset({Product.ATLAS_TRAINING}), **rules.SAID)

# mean and rstd of rank 0 are accepted only together, because they must have the same shape.
p.rule(rules.rank_in(1, 8), f"{_INPUTS} grad_input", row=11, check=9, entry=1)
p.rule(rules.rank_in(1, 8, is_low_checked=False), "grad_weight grad_bias", row=11, check=9, entry=1)
p.rule(rules.entries(1, 8), "normalized_shape", row=(3, 11), check=(9, 10),
    breaks=_renormalized(lambda call: ()))
p.rule(rules.special("axes", "has as many axes as normalizedShape has entries, or more", _has_axes,
        _renormalized(lambda call: (1, *call.tensor("input").shape))), "input", row=8, check=11,
    requires=("normalized_shape.length", "input.rank"))
p.rule(rules.special("normalized", "ends in the axes of normalizedShape", _ends_in_axes,
        _renormalized(lambda call: (*_normalized(call)[:-1], _normalized(call)[-1] + 1))), "input", row=9,
    check=12, requires=("input.axes",), vendor=_vendor_on_axes, pick="The document compares all entries; "
    "the vendor's source skips the first d, where input has d more axes than normalizedShape has entries, "
    "unless a wanted gradient of weight or bias reveals the mismatch. npugrad: refused.")

_RANKED = ("{}.rank", "input.axes")
_is_normalized = rules.shape_is(_normalized, "normalizedShape", text="has normalizedShape as its shape")
p.rule(_is_normalized, "weight bias", row=[6, 7], check=13, requires=_RANKED)
p.rule(rules.same_shape("input"), "grad_out", row=2, check=14, requires=_RANKED)
p.rule(rules.count("rows of input", lambda call: prod(_split(call)[0]),
        text="has one element for each row of input"), "mean rstd", row=[4, 5], check=16, requires=_RANKED,
    pick="The document's parameter section requires size 1 on the normalised axes; its error table and the "
    "vendor's source only count elements. npugrad: the count.")
p.rule(rules.same_shape("mean"), "rstd", check=15, requires=(*_RANKED, "mean.count", "rstd.count"))
p.rule(rules.same_shape("input"), "grad_input", check=17, requires=_RANKED)
for _name in ("grad_weight", "grad_bias"):
    p.rule(_is_normalized, _name, check=18, requires=_RANKED, vendor=_vendor_on_scale(_name),
        pick="The document wants the shape; the vendor's source counts elements, and with another shape may "
        "leave it unwritten. npugrad: refused.")
p.rule(rules.format_in(Format.ND), f"{_INPUTS} {_OUTPUTS}", **rules.SAID)

p.not_expressible("workspaceSize and executor are created by the service, never null", check=1)
p.not_expressible("masks without a true are no error, after every check", check=19)
p.not_expressible("empty operands, which the page does not support, are no error: zeros", check=20)
p.not_expressible("the operator is deterministic by default", entry=2)


def _samples(product: Product) -> Iterator[Sample]:
    for dtype in _F[product]:
        yield Sample(f"{dtype}", build(dtype=dtype, product=product))
        yield Sample(f"{dtype}-no_weight", build(dtype=dtype, product=product, with_weight=False))
    narrow = _F[product][-1]
    yield Sample("mixed", build(dtype=narrow, product=product, is_mixed=True, normalized=(2, 4)))
    mean = TensorMeta(narrow, (2, 3, 1))
    two = build(dtype=DType.FLOAT16, product=product, with_bias=False).with_inputs(mean=mean, rstd=mean)
    yield Sample("two_narrow_types", two)
    yield from normalisation.masked_samples(build, product)
    yield Sample("one_of_one", build(product=product, leading=(), normalized=(1,)))
    yield Sample("rank8", build(product=product, leading=(1, 2, 1, 3), normalized=(2, 1, 2, 1)))
    yield Sample("empty_rows", build(product=product, leading=(0, 3)))
    yield Sample("rows_of_nothing", build(product=product, normalized=(2, 0)))
    flat = TensorMeta(DType.FLOAT32, (6,))
    yield Sample("flat_statistics", build(product=product).with_inputs(mean=flat, rstd=flat))
    strided = TensorMeta(DType.FLOAT32, (2, 3, 4), strides=(0, 1, 3))
    yield Sample("strided", build(product=product).with_inputs(grad_out=strided))


# A row is normalised like a group with a channel of one element for each element of the row.


def _make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
    return normalisation.make_inputs(call, rng, (call.tensor("mean").size, 1, prod(_normalized(call)), 1))


def _extra_tolerance(inputs: Arrays, attrs: Mapping[str, Any], output: str) -> float:
    rstd = inputs["rstd"]
    if output != "grad_input" or rstd is None:
        return 0.0
    sizes = (rstd.size, 1, prod(attrs["normalized_shape"]), 1)
    return normalisation.extra_tolerance(inputs["grad_out"], rstd, inputs["weight"], sizes)


def _is_bound(call: CallMeta) -> bool:
    """Whether torch_npu passes the call on unchanged.

    It gives the statistics the rank of input, creates null operands with other kernels, and returns gradients
    of weight and bias in float32 only.
    """
    scales = [call.inputs[name] for name in ("weight", "bias")]
    has_rank = call.tensor("mean").rank == call.tensor("input").rank
    return has_rank and all(meta is not None and meta.dtype is DType.FLOAT32 for meta in scales)


LAYER_NORM_BACKWARD = p.record(
    "layer_norm_backward",
    wire=5,
    summary="Gradients of layer normalisation with respect to its input, weight and bias.",
    reads=lambda call: normalisation.reads("weight", "grad_input", "grad_weight", "grad_bias"),
    reference=reference,
    build=build,
    samples=_samples,
    workloads=WORKLOADS,
    make_inputs=_make_inputs,
    extra_tolerance=_extra_tolerance,
    determinism_check=lambda call, release: None,  # by the pages of 8.5.0 to 9.2.0-beta.1
    min_cann="8.5",
    binding=TorchBinding(
        "aten.native_layer_norm_backward",
        ("grad_out", "input", "normalized_shape", "mean", "rstd", "weight", "bias", "output_mask"),
        takes=_is_bound,
    ),
)
"""The record; order of parameters is the order of aclnnLayerNormBackwardGetWorkspaceSize."""
