"""The constraints of aclnnLayerNormBackward, and the names and types that they use.

A row is what is normalised together: the last axes of input, one for each entry of normalized_shape.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

from npugrad import rules
from npugrad.dtypes import DType, Format
from npugrad.error_table import PARAM_INVALID, PARAM_NULLPTR
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Finding, NotExpressible
from npugrad.ops._normalisation import NormalisationParams
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from npugrad.operator import Constraint, VendorCode

    Change = Callable[[CallMeta, TensorMeta], TensorMeta | None]

DOCUMENT = "aclnnLayerNormBackward"
REQUIRED = {"grad_out": "gradOut", "input": "input", "mean": "mean", "rstd": "rstd"}
OPTIONAL = {"weight": "weightOptional", "bias": "biasOptional"}
OUTPUTS = {"grad_input": "gradInputOut", "grad_weight": "gradWeightOut", "grad_bias": "gradBiasOut"}
"""Outputs in the order of the mask."""
_SCALES = ("grad_weight", "grad_bias")
ATTRS = {"normalized_shape": "normalizedShape", "output_mask": "outputMask"}
TENSORS = {**REQUIRED, **OPTIONAL, **OUTPUTS}
C_NAMES = {**TENSORS, **ATTRS}
MAX_RANK = 8
_FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
DTYPES: Mapping[Product, tuple[DType, ...]] = {
    product: _FLOATS[:2] if product is Product.ATLAS_TRAINING else _FLOATS for product in Product
}
SIGNATURE = NormalisationParams(C_NAMES, DTYPES, tuple(OPTIONAL), tuple(OUTPUTS))
_is_wanted = SIGNATURE.is_wanted
_CITE = rules.Citations(DOCUMENT, "ops-nn")
_CITED: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **{"output_mask.length": ((10,), (3,)), "normalized_shape.length": ((3, 11), (9, 10))},
    **{"dtype": ((1,), (5,)), **{f"{name}.dtype": ((), (8,)) for name in OUTPUTS}},
    **{"grad_out.same_dtype": ((1,), (5, 6)), "weight.same_dtype": ((1,), (5, 7))},
    **{"rank": ((11,), (9,)), "input.axes": ((8,), (11,)), "input.normalized": ((9,), (12,))},
    **{"weight.shape": ((6,), (13,)), "bias.shape": ((7,), (13,)), "grad_out.shape": ((2,), (14,))},
    **{"rstd.shape": ((), (15,)), "mean.count": ((4,), (16,)), "rstd.count": ((5,), (16,))},
    **{"grad_input.shape": ((), (17,)), **{f"{name}.shape": ((), (18,)) for name in _SCALES}},
}
"""The page's rows of 161002 and the numbers of the vendor's checks, by constraint or kind of constraint."""
_ACCEPTED: dict[str, Any] = {
    "vendor_code": "accepts",
    "pick": "The document's parameter section says so; the vendor's source accepts others. npugrad: refused.",
}
"""For rules that are cited nowhere else."""
_LOOSE = {"pick": "The document says rank 1 to 8; the vendor's source has no least rank. npugrad: refused."}


def normalized(call: CallMeta) -> tuple[int, ...]:
    """Sizes of the normalised axes."""
    return call.integers("normalized_shape") or ()


def output_metas(call: CallMeta) -> dict[str, TensorMeta]:
    """Metas of all outputs."""
    shapes = {"grad_input": _shape(call), **dict.fromkeys(_SCALES, normalized(call))}
    inferred = {name: TensorMeta(_dtypes(call, name)[0], shape) for name, shape in shapes.items()}
    return {name: (call.declared(name) or meta).contiguous() for name, meta in inferred.items()}


def _dtypes(call: CallMeta, name: str) -> tuple[DType, ...]:
    """The types that an operand may have, given those of the operands that lead it."""
    data, weight = call.tensor("input").dtype, call.inputs["weight"]
    if name == "rstd":
        return (call.tensor("mean").dtype,)
    if weight is not None and name in ("bias", *_SCALES):
        return (weight.dtype,)
    return (data, DType.FLOAT32) if name in OPTIONAL else (data,)


def _shape(call: CallMeta) -> tuple[int, ...]:
    return call.tensor("input").shape


def _split(call: CallMeta) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of input before the normalised ones, and the normalised ones."""
    leading = len(_shape(call)) - len(normalized(call))
    return _shape(call)[:leading], _shape(call)[leading:]


def _altered(name: str, change: Change) -> rules.Violate:
    """Changes an input that is not null, or declares a wanted output differently from the inferred one."""

    def violate(call: CallMeta) -> CallMeta | None:
        if name in OUTPUTS:
            given, put = output_metas(call)[name] if _is_wanted(call, name) else None, call.with_outputs
        else:
            given, put = call.inputs[name], call.with_inputs
        meta = given and change(call, given)
        return put(**{name: meta}) if meta else None

    return violate


def _retyped(call: CallMeta, meta: TensorMeta, name: str) -> TensorMeta | None:
    others = [dtype for dtype in DTYPES[call.product] if dtype not in _dtypes(call, name)]
    return TensorMeta(others[0], meta.shape) if others else None


def _longer(call: CallMeta, meta: TensorMeta) -> TensorMeta:
    return TensorMeta(meta.dtype, (meta.shape[0] + 1, *meta.shape[1:]))


def _with_rank(call: CallMeta, meta: TensorMeta, least: int) -> TensorMeta:
    """Gives it rank 0 if it has one element and `least` is 0; else a rank above 8."""
    return TensorMeta(meta.dtype, () if meta.size == 1 and not least else (1,) * MAX_RANK + meta.shape)


def _renormalized(call: CallMeta, shape: tuple[int, ...]) -> CallMeta:
    """Normalises other axes, and changes weight and bias with them; without axes these become null."""
    given = {name: meta for name in OPTIONAL if (meta := call.inputs[name])}
    scale = {name: TensorMeta(meta.dtype, shape) if shape else None for name, meta in given.items()}
    return call.with_attrs(normalized_shape=shape).with_inputs(**scale)


def _rule(name: str, text: str, check: rules.Check, violate: rules.Violate, **extra: Any) -> Constraint:
    """A rule about one operand; an output is checked only if wanted, its type always."""
    operand, _, kind = name.partition(".")
    rows, checks = _CITED.get(name) or _CITED.get(kind) or ((), ())
    sources = (
        *(_CITE.code(PARAM_INVALID, row) for row in rows),
        *(_CITE.check(number) for number in checks),
        *((_CITE.entry(1),) if kind == "rank" else ()),
        _CITE.parameter(C_NAMES[operand]),
    )
    required = (*(("output_mask.length",) if operand in OUTPUTS else ()), *extra.pop("requires", ()))
    required += () if operand in OPTIONAL else (f"{operand}.not_null",)
    extra = {**({} if checks else _ACCEPTED), **extra, "requires": required}
    always = operand not in OUTPUTS or kind == "dtype"

    def looked_at(call: CallMeta) -> Finding | None:
        return check(call) if always or _is_wanted(call, operand) else None

    return rules.invalid(
        name, f"{C_NAMES[operand]} {text}.", sources, (operand,), looked_at, violate, **extra
    )


def _nulls() -> Iterator[Constraint]:
    for name in (*REQUIRED, *ATTRS):
        text = f"{C_NAMES[name]} must not be a null pointer."
        sources = (_CITE.code(PARAM_NULLPTR, 1), _CITE.check(2), _CITE.parameter(C_NAMES[name]))
        yield (rules.input_not_null if name in REQUIRED else rules.attr_not_null)(name, text, sources)
    yield _rule(
        "output_mask.length",
        "has size 3",
        partial(_entries_within, name="output_mask", low=3, high=3),
        lambda call: call.with_attrs(output_mask=(True, True)),
    )
    for index, name in enumerate(OUTPUTS):
        text = f"{C_NAMES[name]} must not be a null pointer when outputMask[{index}] is true."
        sources = (_CITE.code(PARAM_NULLPTR, index + 2), _CITE.check(4), _CITE.parameter(C_NAMES[name]))
        wanted = partial(_is_wanted, name=name)
        yield rules.output_not_null(name, text, sources, wanted, requires=("output_mask.length",))


def _entries_within(call: CallMeta, name: str, low: int, high: int) -> Finding | None:
    count = len(cast("tuple[int, ...] | None", call.attrs[name]) or ())
    expected = f"{low}" if low == high else f"{low} to {high}"
    return None if low <= count <= high else Finding(f"{count} entries", expected)


def _dtype_rules() -> Iterator[Constraint]:
    for name in ("input", "mean", "rstd", "bias", *OUTPUTS):
        yield _rule(
            f"{name}.dtype",
            f"has data type {rules.listed(_FLOATS)}{', whatever outputMask says' * (name in OUTPUTS)}",
            rules.dtype_is(name, _FLOATS),
            _altered(name, lambda call, meta: TensorMeta(DType.INT32, meta.shape)),
        )
    for name, like in _LIKE.items():
        led = () if name in ("grad_out", "weight") else (f"{name}.dtype", "weight.same_dtype")
        yield _rule(
            f"{name}.same_dtype",
            f"has the data type of {like}",
            partial(_is_same_dtype, name=name),
            _altered(name, partial(_retyped, name=name)),
            requires=("input.dtype", "mean.dtype", *led),
        )
    yield _rule(
        "mean.width",
        "has a data type no narrower than that of input",
        _is_wide,
        lambda call: (
            _cast(call, ("mean", "rstd"), DType.FLOAT16)
            if call.tensor("input").dtype is DType.FLOAT32
            else None
        ),
        requires=("mean.dtype", "input.dtype"),
    )
    yield rules.invalid(
        "input.not_bfloat16",
        "No tensor has data type BFLOAT16.",
        tuple(_CITE.parameter(c_name) for c_name in TENSORS.values()),
        tuple(TENSORS),
        _is_without_bfloat16,
        lambda call: _cast(call, call.inputs, DType.BFLOAT16),
        products=frozenset({Product.ATLAS_TRAINING}),
        **_ACCEPTED,
    )


_LIKE = {
    "grad_out": "input",
    "weight": "input, or FLOAT",
    "bias": "weight; where that is null, of input, or FLOAT",
    "rstd": "mean",
    "grad_input": "input",
    **dict.fromkeys(_SCALES, "weight; where that is null, of input"),
}


def _is_same_dtype(call: CallMeta, name: str) -> Finding | None:
    return rules.dtype_is(name, _dtypes(call, name))(call)


def _is_wide(call: CallMeta) -> Finding | None:
    mean, data = call.tensor("mean").dtype, call.tensor("input").dtype
    return None if mean.itemsize >= data.itemsize else Finding(f"dtype {mean}", f"one as wide as {data}")


def _is_without_bfloat16(call: CallMeta) -> Finding | None:
    for name in TENSORS:
        meta = rules.present(call, name)
        if meta is not None and meta.dtype is DType.BFLOAT16:
            return Finding(f"dtype bfloat16 of {name}", f"float32 or float16 on {call.product.full_name}")
    return None


def _cast(call: CallMeta, names: Iterable[str], dtype: DType) -> CallMeta:
    given = {name: meta for name in names if (meta := call.inputs[name])}
    return call.with_inputs(**{name: TensorMeta(dtype, meta.shape) for name, meta in given.items()})


def _axes_rules() -> Iterator[Constraint]:
    for name in TENSORS:
        # mean and rstd of rank 0 are accepted only together, because they must have the same shape.
        yield _rule(
            f"{name}.rank",
            f"has rank 1 to {MAX_RANK}",
            rules.rank_within(name, 1, MAX_RANK),
            _altered(name, partial(_with_rank, least=0 if name in _SCALES else 1)),
            **({"vendor_code": partial(_vendor_on_rank, name=name), **_LOOSE} if name in _SCALES else {}),
        )
    yield _rule(
        "normalized_shape.length",
        f"has 1 to {MAX_RANK} entries",
        partial(_entries_within, name="normalized_shape", low=1, high=MAX_RANK),
        lambda call: _renormalized(call, ()),
    )
    yield _rule(
        "input.axes",
        "has as many axes as normalizedShape has entries, or more",
        _has_axes,
        lambda call: _renormalized(call, (1, *_shape(call))) if len(_shape(call)) < MAX_RANK else None,
        requires=("normalized_shape.length", "input.rank"),
    )
    yield _rule(
        "input.normalized",
        "ends in the axes of normalizedShape",
        _ends_in_axes,
        lambda call: _renormalized(call, (*normalized(call)[:-1], normalized(call)[-1] + 1)),
        requires=("input.axes",),
        vendor_code=_vendor_on_axes,
        pick="The document compares all entries; the vendor's source skips the first d, where input has d "
        "more axes than normalizedShape has entries, unless a wanted gradient of weight or bias reveals "
        "the mismatch. npugrad: refused.",
    )


def _has_axes(call: CallMeta) -> Finding | None:
    rank, count = len(_shape(call)), len(normalized(call))
    return None if rank >= count else Finding(f"rank {rank}", f"{count} or more")


def _ends_in_axes(call: CallMeta) -> Finding | None:
    axes, expected = _split(call)[1], normalized(call)
    found = Finding(f"last axes {rules.shape_text(axes)}", rules.shape_text(expected))
    return None if axes == expected else found


def _vendor_on_rank(call: CallMeta, name: str) -> VendorCode:
    meta = rules.present(call, name)
    return PARAM_INVALID if meta is None or meta.rank else "accepts"


def _vendor_on_axes(call: CallMeta) -> VendorCode:
    """Only entries i from d on are compared with axis i + d, d being how many more axes input has."""
    entries, (leading, axes) = normalized(call), _split(call)
    is_counted = _is_wanted(call, "grad_weight") or _is_wanted(call, "grad_bias")
    is_seen = entries[len(leading) :] != axes[len(leading) :] or (is_counted and prod(entries) != prod(axes))
    return PARAM_INVALID if is_seen else "accepts"


def _shape_rules() -> Iterator[Constraint]:
    for name in ("weight", "bias", "grad_out"):
        yield _shape_rule(name, "input" if name == "grad_out" else "", _longer)
    for name in ("mean", "rstd"):
        yield _rule(
            f"{name}.count",
            "has one element for each row of input",
            rules.element_count(name, lambda call: prod(_split(call)[0]), "rows of input"),
            _altered(name, lambda call, meta: TensorMeta(meta.dtype, (meta.size + 1,))),
            requires=(f"{name}.rank", "input.axes"),
            pick="The document's parameter section requires size 1 on the normalised axes; its error table "
            "and the vendor's source only count elements. npugrad: the count.",
        )
    yield _shape_rule("rstd", "mean", _raised, requires=("mean.count", "rstd.count"))
    yield _shape_rule("grad_input", "input", _longer)
    for name in _SCALES:
        yield _shape_rule(
            name,
            "",
            _recounted,
            vendor_code=partial(_vendor_on_scale, name=name),
            pick="The document wants the shape; the vendor's source counts elements, and with another shape "
            "may leave it unwritten. npugrad: refused.",
        )


def _shape_rule(name: str, like: str, change: Change, **extra: Any) -> Constraint:
    """A tensor has the shape of another tensor, or normalizedShape."""
    meaning = f"the shape of {like}" if like else "normalizedShape"

    def shape(call: CallMeta) -> tuple[int, ...]:
        return call.tensor(like).shape if like else normalized(call)

    required = (f"{name}.rank", "input.axes", *extra.pop("requires", ()))
    text = f"has {meaning}" if like else f"has {meaning} as its shape"
    check, violate = rules.shape_is(name, shape, meaning), _altered(name, change)
    return _rule(f"{name}.shape", text, check, violate, requires=required, **extra)


def _raised(call: CallMeta, meta: TensorMeta) -> TensorMeta | None:
    return TensorMeta(meta.dtype, (1, *meta.shape)) if meta.rank < MAX_RANK else None


def _recounted(call: CallMeta, meta: TensorMeta) -> TensorMeta | None:
    """Adds elements, which the vendor counts; in float16 only an axis."""
    return _raised(call, meta) if meta.dtype is DType.FLOAT16 else _longer(call, meta)


def _vendor_on_scale(call: CallMeta, name: str) -> VendorCode:
    meta = call.declared(name)
    return "accepts" if meta is not None and meta.size == prod(_split(call)[1]) else PARAM_INVALID


def _format_rules() -> Iterator[Constraint]:
    for name in TENSORS:
        change = _altered(name, lambda call, meta: TensorMeta(meta.dtype, meta.shape, Format.NCHW))
        yield _rule(f"{name}.format", "has format ND", rules.format_is(name, (Format.ND,)), change)


CONSTRAINTS = (*_nulls(), *_dtype_rules(), *_axes_rules(), *_shape_rules(), *_format_rules())
NOT_EXPRESSIBLE = (
    NotExpressible(_CITE.check(1), "workspaceSize and executor are created by the service, never null"),
    NotExpressible(_CITE.check(19), "masks without a true are no error, after every check"),
    NotExpressible(_CITE.check(20), "empty operands, which the page does not support, are no error: zeros"),
    NotExpressible(_CITE.entry(2), "the operator is deterministic by default"),
    *_CITE.made_by_service(),
)
