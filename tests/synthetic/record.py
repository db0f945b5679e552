"""aclnnSynthetic, an operator that no vendor has: its record, and the registry that carries it.

It has each kind of attribute, and each kind that may be null twice: once required, once optional. One output
computes something; the other is every byte of every attribute that the operator saw, so that an attribute
that was changed on its way, cut or left out shows in a result.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.synthetic.messages import declared

from npugrad import changes, rules
from npugrad.attributes import KINDS, MAX_ENTRIES, MAX_STRING_BYTES, AttrType, AttrValue, Scalar
from npugrad.dtypes import DATA_DTYPES, DType
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Finding, Sample
from npugrad.page import Page
from npugrad.products import Product
from npugrad.registry import Registry
from npugrad.workloads import BENCH_SIZES, Workload, Workloads, named

Array = npt.NDArray[Any]
DOCUMENT = "aclnnSynthetic"
MODES = ("sum", "mean")
"""What the string may be: the sum of all elements of input is added to each, or their mean."""
FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)
_DTYPES = dict.fromkeys(Product, (DType.FLOAT32, DType.FLOAT16))
_BYTES = dict.fromkeys(Product, (DType.UINT8,))
_ATTRS: tuple[tuple[str, str, AttrType], ...] = (
    ("count", "count", "int64"),
    ("step", "step", "int32"),
    ("level", "level", "int8"),
    ("seed", "seed", "uint64"),
    ("factor", "factor", "double"),
    ("ratio", "ratio", "float"),
    ("flag", "flag", "bool"),
    ("sizes", "sizes", "int64_array"),
    ("sizes_optional", "sizesOptional", "int64_array"),
    ("weights", "weights", "float_array"),
    ("weights_optional", "weightsOptional", "float_array"),
    ("output_mask", "outputMask", "bool_array"),
    ("mask_optional", "maskOptional", "bool_array"),
    ("alpha", "alpha", "scalar"),
    ("alpha_optional", "alphaOptional", "scalar"),
    ("mode", "mode", "string"),
    ("mode_optional", "modeOptional", "string"),
)
_FORMS = {"int64": "q", "int32": "i", "int8": "b", "uint64": "Q", "double": "d", "float": "f", "bool": "?"}
_ENTRIES = {"int64_array": "q", "float_array": "f", "bool_array": "?"}


def seen(attrs: Mapping[str, AttrValue]) -> bytes:
    """All attributes in C order; a pointer as 0 where it is null, else as 1, its length and what it has."""
    found = b""
    for name, _, kind in _ATTRS:
        value: Any = attrs[name]
        if kind in _FORMS:
            found += struct.pack("<" + _FORMS[kind], value)
        elif value is None:
            found += b"\0"
        elif kind in _ENTRIES:
            found += b"\1" + struct.pack(f"<Q{len(value)}{_ENTRIES[kind]}", len(value), *value)
        elif kind == "scalar":
            found += bytes([1, value.dtype.acl]) + value.content
        else:
            text = value.encode()
            found += b"\1" + struct.pack("<Q", len(text)) + text
    return found


def _reference(
    inputs: Mapping[str, Array | None], attrs: Mapping[str, Any], outputs: Mapping[str, Array]
) -> None:
    if "scaled" in outputs:
        values = np.array(inputs["input"], np.float64, order="C")
        with np.errstate(all="ignore"):  # as the other references
            added = values.sum() if attrs["mode"] == "sum" else values.mean()
            found = (values + added) * (attrs["factor"] * attrs["alpha"].value)
            # Which of two NaN is kept, NumPy leaves to where the arrays lie.
            outputs["scaled"][...] = np.where(np.isnan(found), np.nan, found)
    if "seen" in outputs:
        outputs["seen"][...] = np.frombuffer(seen(attrs), np.uint8)


def _sizes_fit(call: CallMeta) -> Finding | None:
    expected, found = call.tensor("input").shape, call.integers("sizes")
    return None if found == expected else Finding(str(found), f"{expected}, the shape of input")


def _longer_sizes(call: CallMeta) -> Iterator[CallMeta]:
    yield call.with_attrs(sizes=(*call.tensor("input").shape, 1))


def _alpha_is_float(call: CallMeta) -> Finding | None:
    found = call.scalar("alpha")
    return None if found and found.dtype in FLOATS else Finding(str(found), f"one of {rules.listed(FLOATS)}")


def _mode_is_known(call: CallMeta) -> Finding | None:
    return None if call.text("mode") in MODES else Finding(repr(call.text("mode")), rules.listed(MODES))


def _seen_meta(call: CallMeta) -> TensorMeta:
    return TensorMeta(DType.UINT8, (len(seen(call.attrs)),))


p = Page(DOCUMENT, "no repository", dict.fromkeys(Product, DOCUMENT))
p.input("input", _DTYPES, "Any shape of rank 0 to 8.", uncarried=(DType.COMPLEX64,))
for _name, _c_name, _kind in _ATTRS:
    p.attr(_name, _kind, "One.", c_name=_c_name, optional=_c_name.endswith("Optional"))
p.output(
    "scaled", "input", "Shape of input, dtype of input. (input + sum or mean of input) x factor x alpha."
)
p.output("seen", "input", "(bytes), uint8. Every byte of every attribute.", dtypes=_BYTES, meta=_seen_meta)

p.rule(rules.not_null, "input sizes weights output_mask alpha mode", row=1)
p.rule(rules.entries(2), "output_mask")
p.rule(rules.not_null, "scaled seen", row=1)
p.rule(rules.dtype_in(), "input")
p.rule(rules.at_least(1, "positive"), "count")
p.rule(rules.special("shape", "is the shape of input", _sizes_fit, _longer_sizes, "input"), "sizes")
_another = changes.numbered("alpha", (Scalar("int32", 1),))
p.rule(rules.special("dtype", "is a float", _alpha_is_float, _another), "alpha")
p.rule(rules.special("known", "is known", _mode_is_known, changes.numbered("mode", ("median",))), "mode")
p.rule(rules.same_dtype("input"), "scaled")
p.rule(rules.same_shape("input"), "scaled")
p.rule(rules.dtype_in(), "seen")
p.rule(rules.shape_is(lambda call: _seen_meta(call).shape, "the attributes' bytes"), "seen")


def _build(
    *,
    dtype: DType | str = DType.FLOAT32,
    product: Product = Product.ATLAS_A2,
    shape: tuple[int, ...] = (2, 3),
    **attrs: AttrValue,
) -> CallMeta:
    """A legal call with nothing that is null."""
    plain: dict[str, AttrValue] = {
        **{"count": 2**62 + 1, "step": -(2**31), "level": -128, "seed": 2**64 - 1},
        **{"factor": 0.1, "ratio": 0.10000000149011612, "flag": True},
        **{"sizes": shape, "sizes_optional": (-(2**63), 2**63 - 1)},
        **{"weights": (0.5, 0.10000000149011612), "weights_optional": (float("inf"), -0.0)},
        **{"output_mask": (True, True), "mask_optional": (False, True, False)},
        **{"alpha": Scalar("bfloat16", 1.5), "alpha_optional": Scalar("uint8", 255)},
        **{"mode": "sum", "mode_optional": "Ämter \u2192 \U0001f41f"},
    }
    return CallMeta({"input": TensorMeta(dtype, shape)}, {**plain, **attrs}, product=product)


_NULLS: dict[str, Any] = {
    name: None for name, _, kind in _ATTRS if KINDS[kind].is_pointer and name.endswith("_optional")
}


def _samples(product: Product) -> Iterator[Sample]:
    build = partial(_build, product=product)
    for dtype in _DTYPES[product]:
        yield Sample(f"{dtype}", build(dtype=dtype))
    yield Sample("nulls", build(**_NULLS))
    empty: dict[str, Any] = {"sizes_optional": (), "weights": (), "weights_optional": (), "mask_optional": ()}
    yield Sample("empty", build(shape=(), mode_optional="", **empty))
    longest: dict[str, Any] = {
        "sizes_optional": tuple(range(MAX_ENTRIES)),
        "weights_optional": (0.25,) * MAX_ENTRIES,
        "mask_optional": (True,) * MAX_ENTRIES,
        "mode_optional": "x" * MAX_STRING_BYTES,
    }
    yield Sample("longest", build(**longest))
    least: dict[str, Any] = {"count": 1, "step": 2**31 - 1, "level": 127, "seed": 0, "factor": -0.0}
    least["ratio"] = -3.4028234663852886e38
    yield Sample("other_ends", build(flag=False, mode="mean", **least))
    for dtype in FLOATS:
        yield Sample(f"alpha_{dtype}", build(alpha=Scalar(dtype, 0.5)))
    for dtype in DATA_DTYPES:
        value = True if dtype is DType.BOOL else 1
        yield Sample(f"scalar_{dtype}", build(alpha_optional=Scalar(dtype, value)))
    for mask in ((True, False), (False, True), (False, False)):
        yield Sample("mask" + "".join("01"[bit] for bit in mask), build(output_mask=mask))


def _make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, Array | None]:
    meta = call.tensor("input")
    return {"input": np.asarray(rng.standard_normal(meta.shape)).astype(meta.dtype.numpy)}


SYNTHETIC = p.record(
    "synthetic",
    wire=1,
    summary="Nothing of use.",
    reads=lambda call: {"scaled": ("input",), "seen": ()},
    reference=_reference,
    build=_build,
    samples=_samples,
    workloads=Workloads(named=named(*(Workload(name=name, sizes={}) for name in ("tiny", *BENCH_SIZES)))),
    make_inputs=_make_inputs,
    extra_tolerance=lambda inputs, attrs, output: 0.0,
    determinism_check=lambda call, release: None,
    min_cann="8.0",
)
"""The record; order of parameters is the order of aclnnSyntheticGetWorkspaceSize."""
RECORDS = {SYNTHETIC.name: SYNTHETIC}
"""What takes the place of the contract's operators."""
_SERVICES = declared(SYNTHETIC, "npugrad.synthetic.v1").services_by_name
REGISTRY = Registry(RECORDS, _SERVICES["SyntheticService"], _SERVICES["SyntheticValidationService"])
"""The operator with its messages and services."""
