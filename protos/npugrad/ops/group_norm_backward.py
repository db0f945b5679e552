"""The record of aclnnGroupNormBackward.

Sources: the official page "aclnnGroupNormBackward" (Atlas training series, Atlas A2) and, where cited
as such, the vendor's public source (ops-nn), which also adds the Atlas A3 series.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from npugrad.dtypes import DType
from npugrad.errors import PARAM_INVALID, Source
from npugrad.products import Product
from npugrad.references.group_norm_backward import reference
from npugrad.rules import (
    dtype_supported,
    element_count,
    input_not_null,
    invalid,
    output_not_null,
    rank_within,
    same_dtype,
    shape_is,
)
from npugrad.spec import AttrParam, CallMeta, Finding, NotExpressible, OpSpec, Sample, TensorMeta, TensorParam

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from npugrad.rules import Check
    from npugrad.spec import Arrays, Constraint

DOCUMENT = "aclnnGroupNormBackward"
MAX_RANK = 8
MAX_CHANNELS_PER_GROUP = 8000
MAX_CHANNELS = 240_000
_A2_A3 = frozenset({Product.ATLAS_A2, Product.ATLAS_A3})
_OUTPUT_C_NAMES = {"grad_input": "gradInput", "grad_gamma": "gradGammaOut", "grad_beta": "gradBetaOut"}

_DTYPES: Mapping[Product, tuple[DType, ...]] = {
    Product.ATLAS_TRAINING: (DType.FLOAT32, DType.FLOAT16),
    Product.ATLAS_A2: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
    Product.ATLAS_A3: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
}


def _codes(code: int, row: int) -> Source:
    return Source(DOCUMENT, f"return codes, {code}", f"row {row}")


def _parameter(c_name: str) -> Source:
    return Source(DOCUMENT, "parameters", c_name)


def _vendor(row: int) -> Source:
    return Source("vendor source (ops-nn)", f"checks of {DOCUMENT}", f"check {row}")


def _tensor(name: str, c_name: str, doc: str, **extra: Any) -> TensorParam:
    return TensorParam(name=name, c_name=c_name, role="input", doc=doc, dtypes=_DTYPES, **extra)


def _output(index: int, name: str, doc: str) -> TensorParam:
    return TensorParam(
        name=name, c_name=_OUTPUT_C_NAMES[name], role="output", doc=doc, dtypes=_DTYPES, masked_by=index
    )


_PARAMS = (
    _tensor("grad_out", "gradOut", "n*c*hxw elements in any shape of rank 0 to 8. Gradient of the normalised output."),
    _tensor("input", "input", "n*c*hxw elements in any shape of rank 0 to 8, dtype of grad_out. The forward input."),
    _tensor("mean", "mean", "n*group elements, rank 0 to 8, dtype of grad_out. Mean of each group of each sample."),
    _tensor("rstd", "rstd", "n*group elements, rank 0 to 8, dtype of grad_out. Reciprocal standard deviations."),
    _tensor("gamma", "gamma", "c elements, rank 0 to 8, dtype of grad_out; None for ones. Scale of each channel.", optional=True),
    AttrParam(name="n", c_name="N", type="int64", doc="Number of samples."),
    AttrParam(name="c", c_name="C", type="int64", doc="Number of channels, a multiple of group."),
    AttrParam(name="hxw", c_name="HxW", type="int64", doc="Elements of one channel of one sample."),
    AttrParam(name="group", c_name="group", type="int64", doc="Number of groups, above 0."),
    AttrParam(name="output_mask", c_name="outputMask", type="bool_array", doc="Three bools: compute grad_input, grad_gamma, grad_beta."),
    _output(0, "grad_input", "Shape of input, dtype of grad_out. Gradient of input."),
    _output(1, "grad_gamma", "Shape of gamma, (c) without gamma, dtype of grad_out. Gradient of gamma."),
    _output(2, "grad_beta", "Shape of gamma, (c) without gamma, dtype of grad_out. Gradient of beta."),
)
_C_NAMES = {p.name: p.c_name for p in _PARAMS}


def build(
    *,
    dtype: DType | str = DType.FLOAT32,
    product: Product = Product.ATLAS_A2,
    n: int = 2,
    c: int = 6,
    hxw: int = 4,
    group: int = 3,
    shape: tuple[int, ...] | None = None,
    with_gamma: bool = True,
    output_mask: tuple[bool, ...] = (True, True, True),
) -> CallMeta:
    """A legal call: n samples, c channels in `group` groups, hxw elements each; `shape` defaults to (n, c, hxw)."""
    data = TensorMeta(dtype, (n, c, hxw) if shape is None else shape)
    statistics = TensorMeta(dtype, (n, group))
    return CallMeta(
        inputs={
            "grad_out": data,
            "input": data,
            "mean": statistics,
            "rstd": statistics,
            "gamma": TensorMeta(dtype, (c,)) if with_gamma else None,
        },
        attrs={"n": n, "c": c, "hxw": hxw, "group": group, "output_mask": output_mask},
        product=product,
    )


def _infer(call: CallMeta) -> Mapping[str, TensorMeta | None]:
    dtype, mask = call.tensor("grad_out").dtype, call.mask() or ()
    shapes = {"grad_input": call.tensor("input").shape, "grad_gamma": _gamma_shape(call), "grad_beta": _gamma_shape(call)}
    return {
        name: (call.declared(name) or TensorMeta(dtype, shape)).contiguous() if wanted else None
        for (name, shape), wanted in zip(shapes.items(), mask)
    }


def _gamma_shape(call: CallMeta) -> tuple[int, ...]:
    gamma = call.inputs["gamma"]
    return (call.integer("c"),) if gamma is None else gamma.shape


def _wanted(index: int) -> Any:
    def wanted(call: CallMeta) -> bool:
        mask = call.mask()
        return mask is not None and len(mask) == len(_OUTPUT_C_NAMES) and mask[index]

    return wanted


def _when_wanted(index: int, check: Check) -> Check:
    wanted = _wanted(index)
    return lambda call: check(call) if wanted(call) else None


def _with_dtype(call: CallMeta, dtype: DType) -> CallMeta:
    metas = {k: None if m is None else TensorMeta(dtype, m.shape) for k, m in call.inputs.items()}
    return call.with_inputs(**metas)


def _reshaped(call: CallMeta, name: str, shape: tuple[int, ...]) -> CallMeta:
    return call.with_inputs(**{name: TensorMeta(call.tensor("grad_out").dtype, shape)})


def _other_dtype(call: CallMeta) -> DType:
    return DType.FLOAT16 if call.tensor("grad_out").dtype is DType.FLOAT32 else DType.FLOAT32


def _retyped(call: CallMeta, name: str) -> CallMeta | None:
    meta = call.inputs[name]
    return None if meta is None else call.with_inputs(**{name: TensorMeta(_other_dtype(call), meta.shape)})


def _rebuilt(call: CallMeta, **sizes: Any) -> CallMeta:
    kept = {"dtype": call.tensor("grad_out").dtype, "product": call.product, "output_mask": call.mask()}
    return build(**{**kept, **sizes})


def _declare(call: CallMeta, index: int, name: str, *, dtype: bool = False, shape: bool = False) -> CallMeta | None:
    if not _wanted(index)(call):
        return None
    meta = _infer(call)[name]
    if meta is None:
        return None
    wrong_shape = (*meta.shape, 2) if shape else meta.shape
    return call.with_outputs(**{name: TensorMeta(_other_dtype(call) if dtype else meta.dtype, wrong_shape)})


def _nulls() -> Iterator[Constraint]:
    for name in ("grad_out", "input", "mean", "rstd"):
        text = f"{_C_NAMES[name]} must not be a null pointer."
        yield input_not_null(name, text, (_codes(161001, 1), _vendor(2), _parameter(_C_NAMES[name])))
    for index, name in enumerate(_OUTPUT_C_NAMES):
        yield output_not_null(
            name,
            f"{_C_NAMES[name]} must not be a null pointer when outputMask[{index}] is true.",
            (_codes(161001, index + 2), _vendor(5)),
            wanted=_wanted(index),
            requires=("output_mask.length",),
            vendor_code=PARAM_INVALID,
            pick=f"The document gives 161001; the vendor's source returns 161002. Taken: 161001, the document.",
        )


def _mask_rules() -> Iterator[Constraint]:
    yield invalid(
        "output_mask.not_null",
        "outputMask must not be a null pointer.",
        (_vendor(3), _parameter("outputMask")),
        ("output_mask",),
        lambda call: None if call.mask() is not None else Finding("null", "three bools"),
        lambda call: call.with_attrs(output_mask=None),
        pick="The document gives no code; the vendor's source returns 161002, not 161001. Taken: 161002.",
    )
    yield invalid(
        "output_mask.length",
        "outputMask has size 3.",
        (_vendor(4), _parameter("outputMask")),
        ("output_mask",),
        lambda call: None if len(call.mask() or ()) == 3 else Finding(f"{len(call.mask() or ())} bools", "three bools"),
        lambda call: call.with_attrs(output_mask=(True, True)),
        requires=("output_mask.not_null",),
    )


def _dtype_rules() -> Iterator[Constraint]:
    yield invalid(
        "grad_out.dtype",
        "gradOut has a supported data type.",
        (_codes(161002, 1), _vendor(6), _parameter("gradOut")),
        ("grad_out",),
        dtype_supported("grad_out", _DTYPES),
        lambda call: _with_dtype(call, DType.INT32),
        requires=("grad_out.not_null",),
    )
    for name in ("input", "mean", "rstd", "gamma"):
        optional = () if name == "gamma" else (f"{name}.not_null",)
        yield invalid(
            f"{name}.same_dtype",
            f"{_C_NAMES[name]} has the data type of gradOut.",
            (_codes(161002, 2), _vendor(8), _parameter(_C_NAMES[name])),
            (name, "grad_out"),
            same_dtype(name, "grad_out"),
            lambda call, name=name: _retyped(call, name),
            requires=("grad_out.not_null", *optional),
        )
    for index, name in enumerate(_OUTPUT_C_NAMES):
        yield invalid(
            f"{name}.same_dtype",
            f"{_C_NAMES[name]} has the data type of gradOut.",
            (_codes(161002, 2), _vendor(8), _parameter(_C_NAMES[name])),
            (name, "grad_out"),
            _when_wanted(index, same_dtype(name, "grad_out")),
            lambda call, index=index, name=name: _declare(call, index, name, dtype=True),
            requires=("grad_out.not_null", "output_mask.length", f"{name}.not_null"),
        )


def _size_rules() -> Iterator[Constraint]:
    for name in ("n", "c", "hxw"):
        yield invalid(
            f"{name}.non_negative",
            f"{_C_NAMES[name]} is a size.",
            (_parameter(_C_NAMES[name]),),
            (name,),
            lambda call, name=name: None
            if call.integer(name) >= 0
            else Finding(str(call.integer(name)), "0 or more"),
            lambda call, name=name: _rebuilt(call, n=0, hxw=0).with_attrs(**{name: -3}),
            vendor_code="accepts",
            pick="The document calls it a size; the vendor's source looks at products only. Taken: refused.",
        )
    yield invalid(
        "group.positive",
        "group is greater than 0.",
        (_codes(161002, 6), _vendor(9), _parameter("group")),
        ("group",),
        lambda call: None if call.integer("group") > 0 else Finding(str(call.integer("group")), "above 0"),
        lambda call: call.with_attrs(group=0),
    )
    yield invalid(
        "c.multiple_of_group",
        "C is divisible by group.",
        (_codes(161002, 7), _vendor(10), _parameter("group")),
        ("c", "group"),
        lambda call: None
        if call.integer("c") % call.integer("group") == 0
        else Finding(f"c {call.integer('c')}, group {call.integer('group')}", "c divisible by group"),
        lambda call: _rebuilt(call, c=7, group=3),
        requires=("group.positive",),
    )
    yield invalid(
        "c.per_group",
        "C / group is at most 8000.",
        (Source(DOCUMENT, "constraints", "entry 1"), _vendor(11)),
        ("c", "group"),
        lambda call: None
        if call.integer("c") // call.integer("group") <= MAX_CHANNELS_PER_GROUP
        else Finding(f"c / group = {call.integer('c') // call.integer('group')}", f"at most {MAX_CHANNELS_PER_GROUP}"),
        lambda call: _rebuilt(call, n=1, c=MAX_CHANNELS_PER_GROUP + 1, hxw=1, group=1),
        requires=("group.positive",),
        products=_A2_A3,
    )
    yield invalid(
        "c.limit",
        "C is at most 240000.",
        (_vendor(12),),
        ("c",),
        lambda call: None
        if call.integer("c") <= MAX_CHANNELS
        else Finding(str(call.integer("c")), f"at most {MAX_CHANNELS}"),
        lambda call: _rebuilt(call, n=1, c=MAX_CHANNELS + 60, hxw=1, group=60),
        products=_A2_A3,
        pick="Known from the vendor's source and newer documents only. Taken: enforced.",
    )


def _shape_rules() -> Iterator[Constraint]:
    for name in ("grad_out", "input", "mean", "rstd", "gamma"):
        yield invalid(
            f"{name}.rank",
            f"{_C_NAMES[name]} has rank 0 to 8.",
            (_parameter(_C_NAMES[name]), *((_vendor(13),) if name == "grad_out" else ())),
            (name,),
            rank_within(name, 0, MAX_RANK),
            lambda call, name=name: None
            if call.inputs[name] is None
            else _reshaped(call, name, call.tensor(name).shape + (1,) * (MAX_RANK + 1)),
            requires=() if name == "gamma" else (f"{name}.not_null",),
            vendor_code=PARAM_INVALID if name == "grad_out" else "accepts",
            pick="" if name == "grad_out" else "The document says rank 0 to 8; the vendor's source checks gradOut only. Taken: refused.",
        )
    yield from _count_rules()
    for index, (name, like) in enumerate((("grad_input", "input"), ("grad_gamma", "gamma"), ("grad_beta", "gamma"))):
        shape = (lambda call: call.tensor("input").shape) if like == "input" else _gamma_shape
        yield invalid(
            f"{name}.shape",
            f"{_C_NAMES[name]} has the shape of {like} when outputMask[{index}] is true.",
            (_codes(161002, index + 3), _vendor(19 + index), _parameter(_C_NAMES[name])),
            (name, like),
            _when_wanted(index, shape_is(name, shape, f"the shape of {like}" + (" or (c)" if like == "gamma" else ""))),
            lambda call, index=index, name=name: _declare(call, index, name, shape=True),
            requires=("output_mask.length", f"{name}.not_null", *(("input.not_null",) if like == "input" else ())),
        )


def _count_rules() -> Iterator[Constraint]:
    def data(call: CallMeta) -> int:
        return call.integer("n") * call.integer("c") * call.integer("hxw")

    def groups(call: CallMeta) -> int:
        return call.integer("n") * call.integer("group")

    def channels(call: CallMeta) -> int:
        return call.integer("c")

    sizes, counts = ("n.non_negative", "c.non_negative", "hxw.non_negative"), ("n.non_negative", "group.positive")
    table = (
        ("grad_out", data, "n*c*hxw", None, 14, sizes),
        ("input", data, "n*c*hxw", 8, 15, sizes),
        ("mean", groups, "n*group", 9, 16, counts),
        ("rstd", groups, "n*group", 10, 17, counts),
        ("gamma", channels, "c", 11, 18, ("c.non_negative",)),
    )
    for name, count, formula, row, check_row, requires in table:
        yield invalid(
            f"{name}.count",
            f"{_C_NAMES[name]} has {formula} elements.",
            (*((_codes(161002, row),) if row else ()), _vendor(check_row), _parameter(_C_NAMES[name])),
            (name,),
            element_count(name, count, formula),
            lambda call, name=name, count=count: None
            if call.inputs[name] is None
            else _reshaped(call, name, (count(call) + 1,)),
            requires=(*requires, *(() if name == "gamma" else (f"{name}.not_null",))),
        )


def _samples(product: Product) -> Iterator[Sample]:
    for dtype in _DTYPES[product]:
        yield Sample(f"{dtype}", build(dtype=dtype, product=product))
        yield Sample(f"{dtype}-no_gamma", build(dtype=dtype, product=product, with_gamma=False))
    for mask in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        bits = "".join("01"[bit] for bit in mask)
        yield Sample(f"mask{bits}", build(product=product, output_mask=mask))
    yield Sample("one_group_of_one", build(product=product, n=1, c=1, hxw=1, group=1, shape=()))
    yield Sample("rank8", build(product=product, n=1, c=4, hxw=8, group=2, shape=(1, 4, 2, 1, 2, 1, 2, 1)))
    yield Sample("empty_n", build(product=product, n=0))
    yield Sample("empty_hxw", build(product=product, hxw=0))
    flat = TensorMeta(DType.FLOAT32, (48,))
    yield Sample("flat_grad_out", build(product=product).with_inputs(grad_out=flat))
    strided = TensorMeta(DType.FLOAT32, (2, 6, 4), strides=(0, 1, 6))
    yield Sample("strided", build(product=product).with_inputs(grad_out=strided))


def _make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
    """Normal data with statistics that fit it, as a forward pass would leave them."""
    n, c, hxw, group = (call.integer(name) for name in ("n", "c", "hxw", "group"))
    values = rng.standard_normal((n, group, c // group * hxw), dtype=np.float32) * 2 + 0.5
    mean = values.mean(axis=2) if values.size else np.zeros((n, group), np.float32)
    variance = values.var(axis=2) if values.size else np.ones((n, group), np.float32)
    made: dict[str, npt.NDArray[Any]] = {
        "grad_out": rng.standard_normal(n * c * hxw, dtype=np.float32),
        "input": values,
        "mean": mean,
        "rstd": 1 / np.sqrt(variance + 1e-5),
        "gamma": rng.standard_normal(c, dtype=np.float32) + 1,
    }
    return {
        name: None if meta is None else made[name].reshape(meta.shape).astype(meta.dtype.numpy)
        for name, meta in call.inputs.items()
    }


def _extra_tolerance(inputs: Arrays, attrs: Mapping[str, Any], output: str) -> float:
    """grad_input is a difference of large terms: 8 eps of the largest one, max|rstd * grad_out * gamma|."""
    grad_out, rstd, gamma = inputs["grad_out"], inputs["rstd"], inputs["gamma"]
    if output != "grad_input" or grad_out is None or rstd is None or not grad_out.size:
        return 0.0
    n, c, group = attrs["n"], attrs["c"], attrs["group"]
    # One pass over the data: its largest magnitude for each (n, c), where rstd and gamma are constant.
    largest = np.abs(grad_out.reshape(n, c, -1)).max(axis=2).astype(np.float64)
    scale = np.abs(np.repeat(rstd.reshape(n, group).astype(np.float64), c // group, axis=1))
    weight = 1.0 if gamma is None else np.abs(gamma.reshape(1, c).astype(np.float64))
    return 8 * float(ml_dtypes.finfo(grad_out.dtype).eps) * float(np.max(largest * scale * weight))


GROUP_NORM_BACKWARD = OpSpec(
    name="group_norm_backward",
    aclnn_name=DOCUMENT,
    summary="Gradients of group normalisation with respect to its input, scale and shift.",
    documents=(DOCUMENT,),
    params=_PARAMS,
    products={
        Product.ATLAS_TRAINING: DOCUMENT,
        Product.ATLAS_A2: DOCUMENT,
        Product.ATLAS_A3: "newer vendor documents and source",
    },
    constraints=(*_nulls(), *_mask_rules(), *_dtype_rules(), *_size_rules(), *_shape_rules()),
    not_expressible=(
        NotExpressible(_vendor(1), "workspaceSize and executor are made by the service itself, never null"),
    ),
    infer=_infer,
    reference=reference,
    build=build,
    samples=_samples,
    make_inputs=_make_inputs,
    extra_tolerance=_extra_tolerance,
    deterministic=lambda call: True,
    min_cann="8.0",
)
"""The record; order of params is the order of aclnnGroupNormBackwardGetWorkspaceSize."""
