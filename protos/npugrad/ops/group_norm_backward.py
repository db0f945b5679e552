"""The record of aclnnGroupNormBackward.

Sources: the official page (Atlas training series, Atlas A2) and, where cited as a check, the vendor's public
source (ops-nn), which also adds the Atlas A3 series.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.dtypes import DType
from npugrad.error_table import PARAM_INVALID
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Sample
from npugrad.ops import _normalisation as normalisation
from npugrad.ops._group_norm_backward_workloads import WORKLOADS
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.group_norm_backward import reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from npugrad.operator import Arrays, VendorCode

# fmt: off
DOCUMENT = "aclnnGroupNormBackward"
_A2_A3 = frozenset({Product.ATLAS_A2, Product.ATLAS_A3})
_SAME = "rank 0 to 8, dtype of grad_out."
_LIKE_GAMMA = "Shape of gamma, (c) without gamma, dtype of grad_out."


def build(*, shape: tuple[int, ...] | None = None, **sizes: Any) -> CallMeta:
    """A legal call: n samples, c channels in `group` groups of hxw elements; `shape`: (n, c, hxw)."""
    call = p.calls.build(**sizes)
    data = TensorMeta(call.tensor("input").dtype, call.tensor("input").shape if shape is None else shape)
    return call.with_inputs(grad_out=data, input=data)


def _gamma_shape(call: CallMeta) -> tuple[int, ...]:
    gamma = call.inputs["gamma"]
    return (call.integer("c"),) if gamma is None else gamma.shape


def _like_gamma(call: CallMeta) -> TensorMeta:
    return TensorMeta(call.tensor("grad_out").dtype, _gamma_shape(call))


p = Page(DOCUMENT, "ops-nn",
    {Product.ATLAS_TRAINING: DOCUMENT, Product.ATLAS_A2: DOCUMENT,
        Product.ATLAS_A3: "newer vendor documents and source"})
rules.only_on(p, Product.ATLAS_A2, since="8.5.0", until="9.0.0")
p.note("ranks", "gradBetaOut has rank 2; npugrad: any, as gradGammaOut", since="8.5.0", until="9.1.0")
p.note("constraints", "determinism is said for each product", since="9.2.0-beta.2")
p.smallest = {"n": 2, "c": 6, "hxw": 4, "group": 3}
p.input("grad_out", rules.FLOATS,
    "n*c*hxw elements in any shape of rank 0 to 8. Gradient of the normalised output.", axes="n c hxw")
p.input("input", "grad_out", f"n*c*hxw elements in any shape of {_SAME} The forward input.")
p.input("mean", rules.FLOATS, f"n*group elements, {_SAME} Mean of each group of each sample.",
    axes="n group", draw=normalisation.MEAN)
p.input("rstd", "mean",
    f"n*group elements, {_SAME} Reciprocal standard deviation of each group of each sample.",
    draw=normalisation.RSTD)
p.input("gamma", rules.FLOATS, f"c elements, {_SAME} Scale of each channel, ones when null.", axes="c",
    optional=True, draw=normalisation.SCALE)
p.attr("n", "int64", "Number of samples.", c_name="N")
p.attr("c", "int64", "Number of channels, a multiple of group.", c_name="C")
p.attr("hxw", "int64", "Elements of one channel of one sample.", c_name="HxW")
p.attr("group", "int64", "Number of groups, above 0.")
p.attr("output_mask", "bool_array", "Three bools: compute grad_input, grad_gamma, grad_beta.")
p.output("grad_input", "input", "Shape of input, dtype of grad_out. Gradient of input.")
p.output("grad_gamma", "gamma", f"{_LIKE_GAMMA} Gradient of gamma. 0 if hxw is 0, where PyTorch gives NaN.",
    c_name="gradGammaOut", meta=_like_gamma)
p.output("grad_beta", "gamma", f"{_LIKE_GAMMA} Gradient of beta.", c_name="gradBetaOut", meta=_like_gamma)


# The vendor's source checks no sign, but no tensor has a negative number of elements.


def _vendor_on_negative_c(call: CallMeta) -> VendorCode:
    has_counted = call.integer("n") * call.integer("hxw") or call.inputs["gamma"] is not None
    is_seen = has_counted or p.is_wanted(call, "grad_gamma") or p.is_wanted(call, "grad_beta")
    return PARAM_INVALID if is_seen else "accepts"


def _negative_c(call: CallMeta) -> Iterator[CallMeta]:
    nothing_counted = call.with_inputs(gamma=None).with_attrs(output_mask=(True, False, False))
    for each in (call,) if call.integer("n") * call.integer("hxw") else (nothing_counted,):
        yield each.with_attrs(c=-call.integer("group"))


def _vendor_on_negative_hxw(call: CallMeta) -> VendorCode:
    return PARAM_INVALID if call.integer("n") * call.integer("c") else "accepts"


_NEGATIVE = (
    "The document calls it a size; the vendor's source compares element counts only, and so accepts a "
    "negative value on which no tensor's count depends. npugrad: refused."
)
_SIZES = ("n.non_negative", "c.non_negative", "hxw.non_negative")

p.rule(rules.not_null, "grad_out input mean rstd", row=1, check=2)
p.rule(rules.not_null, "grad_input grad_gamma grad_beta", row=[2, 3, 4], check=5,
    requires=("output_mask.length",), vendor=PARAM_INVALID,
    pick="The document gives 161001, the vendor's source returns 161002. npugrad: 161001.")
p.rule(rules.not_null, "output_mask", check=3, code=PARAM_INVALID,
    pick="The document gives no code; the vendor's source returns 161002, not 161001. npugrad: 161002.")
p.rule(rules.entries(3), "output_mask", check=4)
p.rule(rules.dtype_in(), "grad_out", row=1, check=6)
p.rule(rules.same_dtype("grad_out"), "input mean rstd gamma grad_input grad_gamma grad_beta", row=2, check=8)
p.rule(rules.at_least(0, "non_negative"), "n", vendor=PARAM_INVALID, pick=_NEGATIVE)
p.rule(rules.at_least(0, "non_negative"), "c", breaks=_negative_c, vendor=_vendor_on_negative_c,
    pick=_NEGATIVE)
p.rule(rules.at_least(0, "non_negative"), "hxw", vendor=_vendor_on_negative_hxw, pick=_NEGATIVE)
p.rule(rules.at_least(1, "positive"), "group", row=6, check=9)
p.rule(rules.divisible_by("group"), "c", row=7, check=10, requires=("group.positive",),
    breaks=p.built(build, c=7, group=3))
p.rule(rules.at_most(8000, "per_group", per="group"), "c", entry=1, check=11, requires=("group.positive",),
    products=_A2_A3, breaks=p.built(build, n=1, c=8001, hxw=1, group=1))
p.rule(rules.at_most(240_000, "limit"), "c", check=12, products=_A2_A3,
    breaks=p.built(build, n=1, c=240_060, hxw=1, group=60),
    pick="Known from the vendor's source and newer documents only. npugrad: enforced.")
p.rule(rules.rank_in(0, 8), "grad_out", check=13)
p.rule(rules.rank_in(0, 8), "input mean rstd gamma", vendor="accepts",
    pick="The document says rank 0 to 8; the vendor's source checks gradOut only. npugrad: refused.")
p.rule(rules.count("n*c*hxw"), "grad_out input", row=[None, 8], check=[14, 15], requires=_SIZES)
p.rule(rules.count("n*group"), "mean rstd", row=[9, 10], check=[16, 17],
    requires=("n.non_negative", "group.positive"))
p.rule(rules.count("c"), "gamma", row=11, check=18, requires=("c.non_negative",))
p.rule(rules.same_shape("input"), "grad_input", row=3, check=19)
p.rule(rules.shape_is(_gamma_shape, "the shape of gamma or (c)", "gamma"), "grad_gamma grad_beta", row=[4, 5],
    check=[20, 21])
p.not_expressible("workspaceSize and executor are created by the service, never null", check=1)
p.not_expressible("a rule of a newer product, which the service does not serve", check=7)


def _samples(product: Product) -> Iterator[Sample]:
    for dtype in rules.FLOATS[product]:
        yield Sample(f"{dtype}", build(dtype=dtype, product=product))
        yield Sample(f"{dtype}-no_gamma", build(dtype=dtype, product=product, with_gamma=False))
    yield from normalisation.masked_samples(build, product)
    yield Sample("one_group_of_one", build(product=product, n=1, c=1, hxw=1, group=1, shape=()))
    yield Sample("rank8", build(product=product, n=1, c=4, hxw=8, group=2, shape=(1, 4, 2, 1, 2, 1, 2, 1)))
    yield Sample("empty_n", build(product=product, n=0))
    yield Sample("empty_hxw", build(product=product, hxw=0))
    flat = TensorMeta(DType.FLOAT32, (48,))
    yield Sample("flat_grad_out", build(product=product).with_inputs(grad_out=flat))
    strided = TensorMeta(DType.FLOAT32, (2, 6, 4), strides=(0, 1, 6))
    yield Sample("strided", build(product=product).with_inputs(grad_out=strided))


def _make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
    return normalisation.make_inputs(call, rng, _sizes(call.attrs))


def _extra_tolerance(inputs: Arrays, attrs: Mapping[str, Any], output: str) -> float:
    if output != "grad_input":
        return 0.0
    return normalisation.extra_tolerance(inputs["grad_out"], inputs["rstd"], inputs["gamma"], _sizes(attrs))


def _sizes(attrs: Mapping[str, Any]) -> tuple[int, int, int, int]:
    return attrs["n"], attrs["group"], attrs["c"] // attrs["group"], attrs["hxw"]


GROUP_NORM_BACKWARD = p.record(
    "group_norm_backward",
    wire=3,
    summary="Gradients of group normalisation with respect to its input, scale and shift.",
    reads=lambda call: normalisation.reads("gamma", "grad_input", "grad_gamma", "grad_beta"),
    reference=reference,
    build=build,
    samples=_samples,
    workloads=WORKLOADS,
    make_inputs=_make_inputs,
    extra_tolerance=_extra_tolerance,
    determinism_check=lambda call, release: None,  # by the pages of 8.5.0 to 9.2.0-beta.2
    min_cann="8.0",
    binding=TorchBinding(
        "aten.native_group_norm_backward",
        ("grad_out", "input", "mean", "rstd", "gamma", "n", "c", "hxw", "group", "output_mask"),
        # It takes the options of gamma's and beta's gradients from gamma even if that is null, and fails.
        takes=lambda call: call.inputs["gamma"] is not None or not any((call.mask() or ())[1:]),
    ),
)
"""The record; order of parameters is the order of aclnnGroupNormBackwardGetWorkspaceSize."""
