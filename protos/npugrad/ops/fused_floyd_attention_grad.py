"""The record of aclnnFusedFloydAttentionGrad.

Sources: the official page (Atlas A2, Atlas A3) and, where cited as a check, the vendor's public source
(ops-transformer). The page's B, H, N, M, K and D are batch, heads, n, m, k and head_dim: M is defined by
query, the others by key1. Entries of its constraint section are counted sentence by sentence: 1 determinism,
2 package versions, 3 to 8 the ranges of B, H, N, M, K and D, 9 to 13 the operands that share axes or shapes,
14 D again, 15 speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.dtypes import DType, Format
from npugrad.error_table import FIND_KERNEL_ERROR, TILING_ERROR
from npugrad.generators import Draw
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Sample
from npugrad.ops._fused_floyd_attention_grad_data import STATISTICS_REPEATS, make_inputs
from npugrad.ops._fused_floyd_attention_grad_workloads import WORKLOADS
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.fused_floyd_attention_grad import reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.operator import VendorCode
    from npugrad.page import DTypes

# fmt: off
DOCUMENT = "aclnnFusedFloydAttentionGrad"
PRODUCTS = (Product.ATLAS_A2, Product.ATLAS_A3)
LIKE = {"dq": "query", "dk1": "key1", "dv1": "value1", "dk2": "key2", "dv2": "value2"}
"""The input of which each output is the gradient."""
_HALF: DTypes = dict.fromkeys(PRODUCTS, (DType.FLOAT16, DType.BFLOAT16))
_FLOAT: DTypes = dict.fromkeys(PRODUCTS, (DType.FLOAT32,))
_MASK: DTypes = dict.fromkeys(PRODUCTS, (DType.BOOL, DType.UINT8))
_QUERIES, _KEYS1, _KEYS2 = "batch heads n m head_dim", "batch heads n k head_dim", "batch heads k m head_dim"
_STATISTICS = f"batch heads n m {STATISTICS_REPEATS}"

p = Page(DOCUMENT, "ops-transformer", dict.fromkeys(PRODUCTS, DOCUMENT), release="9.1.0")
p.input("query", _HALF, "(B, H, N, M, D), float16 or bfloat16. Queries; M is a multiple of 128.",
    axes=_QUERIES)
p.input("key1", _HALF,
    "(B, H, N, K, D), dtype of query. First keys; N is a multiple of 16, K of 128, D is 32, 64 or 128.",
    axes=_KEYS1)
p.input("value1", _HALF, "(B, H, N, K, D), dtype of query. First values.", axes=_KEYS1)
p.input("key2", _HALF, "(B, H, K, M, D), dtype of query. Second keys.", axes=_KEYS2)
p.input("value2", _HALF, "(B, H, K, M, D), dtype of query. Second values.", axes=_KEYS2)
p.input("dy", _HALF, "(B, H, N, M, D), dtype of query. Gradient of the attention.", axes=_QUERIES)
p.input("atten_mask", _MASK, "(B, 1, N, 1, K), bool or uint8; None for no mask. 1 excludes a key for all "
    "heads and all of M. In a row without keys the gradient passes through the mask, by the vendor's "
    "formula; the functions for PyTorch and JAX give that of their own forward pass, the mean of the values.",
    c_name="attenMaskOptional", axes="batch 1 n 1 k", optional=True, draw=Draw("bernoulli", (0.25,)))
# With normal queries and keys and scale_value 1 / sqrt(D), scores have a standard deviation of 1.4:
# no exponential of score - softmax_max comes near the largest float16.
p.input("softmax_max", _FLOAT,
    "(B, H, N, M, 8), float32. Largest score of each row of the forward pass, repeated 8 times.",
    axes=_STATISTICS, draw=Draw("uniform", (4.0, 7.0), STATISTICS_REPEATS))
p.input("softmax_sum", _FLOAT,
    "(B, H, N, M, 8), float32. Sum of exp(score - softmax_max) of each row, repeated 8 times.",
    axes=_STATISTICS, draw=Draw("uniform", (1.0, 4.0), STATISTICS_REPEATS))
p.input("attention_in", _HALF, "(B, H, N, M, D), dtype of query. Attention, the result of the forward pass.",
    axes=_QUERIES, draw=Draw("normal", (0.0, 0.25)))
p.attr("scale_value", "double", "Factor of the scores, usually 1 / sqrt(D); no other scaling is applied.",
    (1.0,))
for _name, _like in LIKE.items():
    _letters = {"dq": "N, M", "dk1": "N, K", "dv1": "N, K", "dk2": "K, M", "dv2": "K, M"}[_name]
    _doc = f"(B, H, {_letters}, D), dtype of query. Gradient of {_like}."
    p.output(_name, _like, _doc, c_name=f"{_name}Out")
p.sizes("batch heads n k head_dim", of="key1")
p.sizes("m", of="query")
p.short = {"batch": "b", "heads": "h", "head_dim": "d"}
p.smallest = {"b": 1, "h": 1, "n": 16, "m": 128, "k": 128, "d": 32}


def build(
    *, dtype: DType | str = DType.FLOAT16, mask_dtype: DType | str = DType.BOOL, with_mask: bool = False,
    scale_value: float | None = None, **sizes: Any,
) -> CallMeta:
    """A legal call in the sizes of the document; `scale_value` is 1 / sqrt(d) by default."""
    scale = max(sizes.get("d", p.smallest["d"]), 1) ** -0.5 if scale_value is None else scale_value
    call = p.calls.build(dtype=dtype, scale_value=float(scale), **sizes)
    mask = TensorMeta(mask_dtype, call.tensor("atten_mask").shape) if with_mask else None
    return call.with_inputs(atten_mask=mask)


# Required by the document, optional in the vendor's operator definition: refused late, and hardly checked.
_LATE = "softmax_max softmax_sum attention_in"
_OUTPUTS = " ".join(LIKE)
_UNSEEN: dict[str, Any] = {"vendor": "accepts",
    "pick": "The document gives 161002; the vendor's source does not look at it. npugrad: 161002."}
_TILING: dict[str, Any] = {"code": TILING_ERROR, "row": 1}
"""The page has one row of its error table for all ranks, sizes and shapes."""
_UNCHECKED: dict[str, Any] = {**_TILING, "vendor": "accepts", "pick": "The document gives the shape; the "
    "vendor's source does not check it. npugrad: the document, 561002."}
_OTHER_AXES = "The document names axes 0, 2 and 4; the vendor's source compares axes 0, 1 and 4. "


def _vendor_on_head_dim(call: CallMeta) -> VendorCode:
    return TILING_ERROR if call.tensor("key1").shape[4] else "accepts"


p.rule(rules.product, "product", code=FIND_KERNEL_ERROR,
    text="The product is of the Atlas A2 or the Atlas A3 series.", check=3, alone=True)
p.rule(rules.not_null, f"query key1 value1 key2 value2 dy {_OUTPUTS}", row=1, check=1)
p.rule(rules.not_null, _LATE, row=1, check=6, vendor=TILING_ERROR, pick="The document requires it, so a "
    "null is 161001; the vendor's source returns 561002. npugrad: 161001.")
p.rule(rules.dtype_in(), "query", row=1, check=4, pick="The document lists FLOAT16 and BFLOAT16; the "
    "vendor's operator definition lists FLOAT as well, but no kernel has it. npugrad: FLOAT is refused like "
    "every other type.")
p.rule(rules.same_dtype("query"), "key1 value1 key2 value2 dy", row=1, check=4)
p.rule(rules.same_dtype("query"), "attention_in", row=1, **_UNSEEN)
p.rule(rules.same_dtype("query"), _OUTPUTS, row=1, check=4)
p.rule(rules.dtype_in(), "softmax_max softmax_sum", row=1, **_UNSEEN)
p.rule(rules.dtype_in(), "atten_mask", row=1, check=9, vendor=TILING_ERROR,
    pick="The document gives 161002; the vendor's source returns 561002. npugrad: 161002.")
p.rule(rules.format_in(Format.ND), "query key1 value1 key2 value2 dy", row=1, check=4)
p.rule(rules.format_in(Format.ND), f"atten_mask {_LATE}", row=1, **_UNSEEN)
p.rule(rules.format_in(Format.ND), _OUTPUTS, row=1, check=4)

p.rule(rules.has_axes, "query key1 value1 key2 value2 dy", check=11, **_TILING)
p.rule(rules.has_axes, "atten_mask softmax_max softmax_sum attention_in", check=[12, 13, 13, 11], **_TILING)
p.rule(rules.same_size("batch"), "query", entry=9, check=7, **_TILING)
p.rule(rules.same_size("heads"), "query", check=7,
    pick=f"{_OTHER_AXES}npugrad: axis 1 as well, as the documented shapes have it.", **_TILING)
p.rule(rules.same_size("n"), "query", entry=9, vendor="accepts",
    pick=f"{_OTHER_AXES}npugrad: axis 2 as well, the document.", **_TILING)
p.rule(rules.same_size("head_dim"), "query", entry=9, check=7, **_TILING)
for _size, _low, _high, _entry, _check in (
    ("batch", 1, 2048, 3, 5),
    ("heads", 1, 256, 4, 5),
    ("n", 16, 2**20, 5, 8),
    ("m", 128, 2**20, 6, 8),
    ("k", 128, 2**20, 7, 8),
):
    _leader, _reading = p.leaders[_size][0], f", reading 1M as {_high}" if _high == 2**20 else ""
    p.rule(rules.size_in(_size, _low, _high, kind_name=f"{_size}_range"), _leader, entry=_entry, check=_check,
        vendor="accepts", pick="The document gives the range; the vendor's source has no upper limit, and "
        f"with a size of 0 it succeeds without computing. npugrad: the document{_reading}.", **_TILING)
    if _low > 1:
        _multiple = rules.size_in(_size, step=_low, kind_name=f"{_size}_multiple")
        p.rule(_multiple, _leader, entry=_entry, check=10, **_TILING)
p.rule(rules.size_in("head_dim", among=(32, 64, 128)), "key1", entry=(8, 14), check=(5, 10),
    vendor=_vendor_on_head_dim, pick="The document and the vendor's source agree but for D = 0, where all "
    "outputs are empty and the vendor's source succeeds without computing. npugrad: the document, 561002.",
    **_TILING)
for _size in _KEYS2.split():
    p.rule(rules.same_size(_size), "key2", **_UNCHECKED)
for _name, _like, _entry in (
    ("value1", "key1", 10),
    ("value2", "key2", 11),
    ("dy", "query", 12),
    ("attention_in", "query", 12),
):
    p.rule(rules.same_shape(_like), _name, entry=_entry, check=11, requires=(f"{_like}.rank", "{}.rank"),
        **_TILING)
p.rule(rules.of_sizes, "atten_mask", check=12, **_TILING)
p.rule(rules.of_sizes, "softmax_sum softmax_max", entry=13, check=13, **_TILING)
for _name, _like in LIKE.items():
    p.rule(rules.same_shape(_like), _name, **_UNCHECKED)

p.not_expressible("workspaceSize and executor are created by the service, never null", check=2)
p.not_expressible("no operand breaks it; the deterministic option is refused for the operator", entry=1)
p.not_expressible("versions of the packages on the server, which its own check looks at", entry=2)
p.not_expressible("advice: from M*D or K*D of 65536 on the operator is slow, but right", entry=15)
p.not_expressible("every double is legal, and none can be null", name="scale_value")

_SCORED = ("query", "key1", "key2", "dy", "atten_mask", "softmax_max", "softmax_sum")
_READS = {name: _SCORED if name in ("dv1", "dv2") else tuple(each.name for each in p.inputs) for name in LIKE}


def _samples(product: Product) -> Iterator[Sample]:
    """Few, because the smallest legal call already has 3 MiB of operands."""
    if product not in PRODUCTS:
        return
    yield Sample("float16", build(product=product))
    yield Sample("bfloat16-bool_mask", build(dtype=DType.BFLOAT16, product=product, with_mask=True))
    masked = build(product=product, h=2, with_mask=True, mask_dtype=DType.UINT8, scale_value=0.5)
    yield Sample("float16-uint8_mask-two_heads", masked)
    wide = build(dtype=DType.BFLOAT16, product=product, d=64)
    yield Sample("bfloat16-d64-declared",
        wide.with_outputs(**{name: wide.tensor(LIKE[name]) for name in LIKE}))
    call = build(product=product)
    expanded = TensorMeta(DType.FLOAT16, call.tensor("dy").shape, strides=(0, 0, 0, 0, 0))
    yield Sample("strided", call.with_inputs(dy=expanded))


FUSED_FLOYD_ATTENTION_GRAD = p.record("fused_floyd_attention_grad", wire=4,
    summary="Gradients of Floyd attention, which attends over two sets of keys and values at once.",
    reads=lambda call: _READS, reference=reference, build=build, samples=_samples, workloads=WORKLOADS,
    make_inputs=make_inputs,
    determinism_check=lambda call, release: (
        "deterministic: found True; expected False, because the operator has no deterministic mode on an NPU"
    ),
    min_cann="9.0",
    binding=TorchBinding("npu.npu_fused_floyd_attention_backward",
        ("dy", "query", "key1", "value1", "key2", "value2", "attention_in", "softmax_max", "softmax_sum"),
        ("atten_mask", "scale_value")))
"""The record; order of parameters is the order of aclnnFusedFloydAttentionGradGetWorkspaceSize."""
