"""The constraints of group_norm_backward, in the order of the documents and of the vendor's checks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from npugrad.dtypes import DType
from npugrad.error_table import PARAM_INVALID, PARAM_NULLPTR
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Finding, NotExpressible
from npugrad.ops._group_norm_backward_layout import (
    C_NAMES,
    DOCUMENT,
    DTYPES,
    OUTPUTS,
    SIGNATURE,
    build,
    gamma_shape,
    output_metas,
)
from npugrad.products import Product
from npugrad.rules import (
    Citations,
    dtype_supported,
    element_count,
    input_not_null,
    invalid,
    output_not_null,
    rank_within,
    same_dtype,
    shape_is,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from npugrad.operator import Constraint, VendorCode
    from npugrad.rules import Check

MAX_RANK = 8
MAX_CHANNELS_PER_GROUP = 8000
MAX_CHANNELS = 240_000
_A2_A3 = frozenset({Product.ATLAS_A2, Product.ATLAS_A3})
_CITE = Citations(DOCUMENT, "ops-nn")
_codes, _parameter, _vendor = _CITE.code, _CITE.parameter, _CITE.check


def _wanted(index: int) -> Callable[[CallMeta], bool]:
    return partial(SIGNATURE.is_wanted, name=OUTPUTS[index])


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


def _declare(
    call: CallMeta, index: int, name: str, *, dtype: bool = False, shape: bool = False
) -> CallMeta | None:
    if not _wanted(index)(call):
        return None
    meta = output_metas(call)[name]
    wrong_shape = (*meta.shape, 2) if shape else meta.shape
    return call.with_outputs(**{name: TensorMeta(_other_dtype(call) if dtype else meta.dtype, wrong_shape)})


def _not_negative(call: CallMeta, name: str) -> Finding | None:
    return None if call.integer(name) >= 0 else Finding(str(call.integer(name)), "0 or more")


def _negated(call: CallMeta, name: str) -> CallMeta:
    broken = call.with_attrs(**{name: -call.integer("group")})
    if name == "c" and not call.integer("n") * call.integer("hxw"):
        # Leaves nothing that has C elements.
        return broken.with_inputs(gamma=None).with_attrs(output_mask=(True, False, False))
    return broken


# The vendor's source checks no sign, but no tensor has a negative number of elements.


def _vendor_on_negative_c(call: CallMeta) -> VendorCode:
    has_counted = call.integer("n") * call.integer("hxw") or call.inputs["gamma"] is not None
    return PARAM_INVALID if has_counted or _wanted(1)(call) or _wanted(2)(call) else "accepts"


def _vendor_on_negative_hxw(call: CallMeta) -> VendorCode:
    return PARAM_INVALID if call.integer("n") * call.integer("c") else "accepts"


def _with_rank_above_8(call: CallMeta, name: str) -> CallMeta | None:
    meta = call.inputs[name]
    return None if meta is None else _reshaped(call, name, meta.shape + (1,) * (MAX_RANK + 1))


def _with_one_more(call: CallMeta, name: str, count: Callable[[CallMeta], int]) -> CallMeta | None:
    return None if call.inputs[name] is None else _reshaped(call, name, (count(call) + 1,))


def _nulls() -> Iterator[Constraint]:
    for name in ("grad_out", "input", "mean", "rstd"):
        text = f"{C_NAMES[name]} must not be a null pointer."
        yield input_not_null(name, text, (_codes(PARAM_NULLPTR, 1), _vendor(2), _parameter(C_NAMES[name])))
    for index, name in enumerate(OUTPUTS):
        yield output_not_null(
            name,
            f"{C_NAMES[name]} must not be a null pointer when outputMask[{index}] is true.",
            (_codes(PARAM_NULLPTR, index + 2), _vendor(5)),
            wanted=_wanted(index),
            requires=("output_mask.length",),
            vendor_code=PARAM_INVALID,
            pick="The document gives 161001, the vendor's source returns 161002. npugrad: 161001.",
        )


def _mask_rules() -> Iterator[Constraint]:
    yield invalid(
        "output_mask.not_null",
        "outputMask must not be a null pointer.",
        (_vendor(3), _parameter("outputMask")),
        ("output_mask",),
        lambda call: None if call.mask() is not None else Finding("null", "three bools"),
        lambda call: call.with_attrs(output_mask=None),
        pick="The document gives no code; the vendor's source returns 161002, not 161001. npugrad: 161002.",
    )
    yield invalid(
        "output_mask.length",
        "outputMask has size 3.",
        (_vendor(4), _parameter("outputMask")),
        ("output_mask",),
        lambda call: (
            None if len(call.mask() or ()) == 3 else Finding(f"{len(call.mask() or ())} bools", "three bools")
        ),
        lambda call: call.with_attrs(output_mask=(True, True)),
        requires=("output_mask.not_null",),
    )


def _dtype_rules() -> Iterator[Constraint]:
    yield invalid(
        "grad_out.dtype",
        "gradOut has a supported data type.",
        (_codes(PARAM_INVALID, 1), _vendor(6), _parameter("gradOut")),
        ("grad_out",),
        dtype_supported("grad_out", DTYPES),
        lambda call: _with_dtype(call, DType.INT32),
        requires=("grad_out.not_null",),
    )
    for name in ("input", "mean", "rstd", "gamma"):
        optional = () if name == "gamma" else (f"{name}.not_null",)
        yield invalid(
            f"{name}.same_dtype",
            f"{C_NAMES[name]} has the data type of gradOut.",
            (_codes(PARAM_INVALID, 2), _vendor(8), _parameter(C_NAMES[name])),
            (name, "grad_out"),
            same_dtype(name, "grad_out"),
            partial(_retyped, name=name),
            requires=("grad_out.not_null", *optional),
        )
    for index, name in enumerate(OUTPUTS):
        yield invalid(
            f"{name}.same_dtype",
            f"{C_NAMES[name]} has the data type of gradOut.",
            (_codes(PARAM_INVALID, 2), _vendor(8), _parameter(C_NAMES[name])),
            (name, "grad_out"),
            _when_wanted(index, same_dtype(name, "grad_out")),
            partial(_declare, index=index, name=name, dtype=True),
            requires=("grad_out.not_null", "output_mask.length", f"{name}.not_null"),
        )


def _size_rules() -> Iterator[Constraint]:
    vendor_codes = {"n": PARAM_INVALID, "c": _vendor_on_negative_c, "hxw": _vendor_on_negative_hxw}
    for name, vendor_code in vendor_codes.items():
        yield invalid(
            f"{name}.non_negative",
            f"{C_NAMES[name]} is not negative.",
            (_parameter(C_NAMES[name]),),
            (name,),
            partial(_not_negative, name=name),
            partial(_negated, name=name),
            vendor_code=vendor_code,
            pick="The document calls it a size; the vendor's source compares element counts only, and so "
            "accepts a negative value on which no tensor's count depends. npugrad: refused.",
        )
    yield invalid(
        "group.positive",
        "group is greater than 0.",
        (_codes(PARAM_INVALID, 6), _vendor(9), _parameter("group")),
        ("group",),
        lambda call: None if call.integer("group") > 0 else Finding(str(call.integer("group")), "above 0"),
        lambda call: call.with_attrs(group=0),
    )
    yield invalid(
        "c.multiple_of_group",
        "C is divisible by group.",
        (_codes(PARAM_INVALID, 7), _vendor(10), _parameter("group")),
        ("c", "group"),
        lambda call: (
            None
            if call.integer("c") % call.integer("group") == 0
            else Finding(f"c {call.integer('c')}, group {call.integer('group')}", "c divisible by group")
        ),
        lambda call: _rebuilt(call, c=7, group=3),
        requires=("group.positive",),
    )
    yield invalid(
        "c.per_group",
        "C / group is at most 8000.",
        (_CITE.entry(1), _vendor(11)),
        ("c", "group"),
        lambda call: (
            None
            if call.integer("c") // call.integer("group") <= MAX_CHANNELS_PER_GROUP
            else Finding(
                f"c / group = {call.integer('c') // call.integer('group')}",
                f"at most {MAX_CHANNELS_PER_GROUP}",
            )
        ),
        lambda call: _rebuilt(call, n=1, c=MAX_CHANNELS_PER_GROUP + 1, hxw=1, group=1),
        requires=("group.positive",),
        products=_A2_A3,
    )
    yield invalid(
        "c.limit",
        "C is at most 240000.",
        (_vendor(12),),
        ("c",),
        lambda call: (
            None
            if call.integer("c") <= MAX_CHANNELS
            else Finding(str(call.integer("c")), f"at most {MAX_CHANNELS}")
        ),
        lambda call: _rebuilt(call, n=1, c=MAX_CHANNELS + 60, hxw=1, group=60),
        products=_A2_A3,
        pick="Known from the vendor's source and newer documents only. npugrad: enforced.",
    )


def _shape_rules() -> Iterator[Constraint]:
    for name in ("grad_out", "input", "mean", "rstd", "gamma"):
        yield invalid(
            f"{name}.rank",
            f"{C_NAMES[name]} has rank 0 to 8.",
            (_parameter(C_NAMES[name]), *((_vendor(13),) if name == "grad_out" else ())),
            (name,),
            rank_within(name, 0, MAX_RANK),
            partial(_with_rank_above_8, name=name),
            requires=() if name == "gamma" else (f"{name}.not_null",),
            vendor_code=PARAM_INVALID if name == "grad_out" else "accepts",
            pick=""
            if name == "grad_out"
            else "The document says rank 0 to 8; the vendor's source checks gradOut only. npugrad: refused.",
        )
    yield from _count_rules()
    for index, (name, like) in enumerate(
        (("grad_input", "input"), ("grad_gamma", "gamma"), ("grad_beta", "gamma"))
    ):
        shape = (lambda call: call.tensor("input").shape) if like == "input" else gamma_shape
        yield invalid(
            f"{name}.shape",
            f"{C_NAMES[name]} has the shape of {like} when outputMask[{index}] is true.",
            (_codes(PARAM_INVALID, index + 3), _vendor(19 + index), _parameter(C_NAMES[name])),
            (name, like),
            _when_wanted(
                index, shape_is(name, shape, f"the shape of {like}" + (" or (c)" if like == "gamma" else ""))
            ),
            partial(_declare, index=index, name=name, shape=True),
            requires=(
                "output_mask.length",
                f"{name}.not_null",
                *(("input.not_null",) if like == "input" else ()),
            ),
        )


def _count_rules() -> Iterator[Constraint]:
    def data(call: CallMeta) -> int:
        return call.integer("n") * call.integer("c") * call.integer("hxw")

    def groups(call: CallMeta) -> int:
        return call.integer("n") * call.integer("group")

    def channels(call: CallMeta) -> int:
        return call.integer("c")

    sizes, counts = (
        ("n.non_negative", "c.non_negative", "hxw.non_negative"),
        ("n.non_negative", "group.positive"),
    )
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
            f"{C_NAMES[name]} has {formula} elements.",
            (*((_codes(PARAM_INVALID, row),) if row else ()), _vendor(check_row), _parameter(C_NAMES[name])),
            (name,),
            element_count(name, count, formula),
            partial(_with_one_more, name=name, count=count),
            requires=(*requires, *(() if name == "gamma" else (f"{name}.not_null",))),
        )


CONSTRAINTS = (*_nulls(), *_mask_rules(), *_dtype_rules(), *_size_rules(), *_shape_rules())
NOT_EXPRESSIBLE = (
    NotExpressible(_vendor(1), "workspaceSize and executor are created by the service, never null"),
    NotExpressible(_vendor(7), "a rule of a newer product, which the service does not serve"),
    *_CITE.made_by_service(),
)
