"""The record of aclnnEmbeddingDenseBackward: the page of release 9.1.0, and checks in the vendor's ops-nn."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.changes import numbered, reshaped
from npugrad.dtypes import DType
from npugrad.error_table import PARAM_INVALID, TILING_ERROR
from npugrad.meta import INT64_MAX, TensorMeta
from npugrad.ops import _indices
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.embedding_dense_backward import reference
from npugrad.workloads import model

if TYPE_CHECKING:
    from npugrad.meta import CallMeta

NAME, DOCUMENT = "embedding_dense_backward", "aclnnEmbeddingDenseBackward"
_INTEGERS = (DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.UINT8, DType.BOOL)
_INDICES = dict.fromkeys(Product, (*_INTEGERS, DType.FLOAT32, DType.FLOAT16, DType.FLOAT64))
_ALL = "grad indices grad_weight"
NO_PADDING = 2**64 - 1


def _words(call: CallMeta) -> int:
    return call.integer("num_weights")


def _width(call: CallMeta) -> int:
    return call.tensor("grad").shape[-1]


def _rows(call: CallMeta) -> int:
    return prod(call.tensor("grad").shape[:-1])


def _first(count: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:count]


def _like_weights(call: CallMeta) -> TensorMeta:
    return TensorMeta(call.tensor("grad").dtype, (_words(call), _width(call)))


# fmt: off
p = Page(DOCUMENT, "ops-nn", dict.fromkeys(Product, DOCUMENT), release="9.1.0")
rules.only_on(p, Product.ATLAS_A2, until="9.0.0")
p.note("constraints", "determinism is an option; nothing on the Atlas training series", until="9.0.0")
p.note("constraints", "the limits of 9.1.0, in other entries", since="9.0.0", until="9.1.0")
p.input("grad", rules.FLOATS, "(..., D), rank 2 to 8. Gradient of the embedded words.", axes="*words d")
p.input("indices", _INDICES,
    "One for each row of grad, rank 1 to 8. Its word, a whole number from 0 to num_weights - 1.",
    axes="*words", below=_words)
p.attr("num_weights", "uint64", "Number of words.")
p.attr("padding_idx", "uint64",
    "Word whose gradient is 0; num_weights or more for none, such as 2^64 - 1 for PyTorch's -1.",
    (NO_PADDING, 1))
p.attr("scale_grad_by_freq", "bool", "Whether the gradient of a word is divided by how often it occurs.")
p.output("grad_weight", "grad", "(num_weights, D), dtype of grad. Gradient of the words.", c_name="out",
    meta=_like_weights)

p.rule(rules.not_null, _ALL, row=1, check=2)
p.rule(rules.dtype_in(), _ALL, row=1, check=[3, 4, 5])
p.rule(rules.same_dtype("grad"), "grad_weight", requires=("{}.dtype", "grad.dtype"), **rules.SAID)
for _name, _low in (("grad", 2), ("indices", 1)):
    _FEWER = reshaped(partial(_first, _low - 1), lambda shape: (*shape, *(1,) * 9))
    _RANK = rules.rank_in(_low, 8, is_low_checked=False)
    p.rule(_RANK, _name, row=2, check=6, breaks=p.edited(_name, _FEWER))
p.rule(rules.count("rows of grad", _rows, text="has one element for each row of grad"), "indices", row=3,
    check=7, requires=("grad.rank", "indices.rank"),
    vendor=lambda call: PARAM_INVALID if _width(call) else "accepts",
    pick="The document compares them; the vendor's source does not if grad's last axis is 0. npugrad: does.")
p.rule(rules.first_axis_of("grad_weight", lambda call: _width(call) * call.tensor("grad").dtype.itemsize),
    "num_weights", row=4, check=9, requires=("grad.rank",))
p.rule(rules.shape_is(lambda call: _like_weights(call).shape, "(num_weights, D)",
        text="has shape (numWeights, D)"), "grad_weight", row=4, check=(6, 8, 9),
    requires=("grad.rank", "num_weights.limit"))
p.rule(rules.in_range("numWeights", numbered("num_weights", (0,))), "indices", check=12, code=TILING_ERROR,
    requires=("indices.count",),
    vendor=lambda call: TILING_ERROR if call.attrs["scale_grad_by_freq"] else "accepts",
    pick="The document has indices below numWeights; the vendor's source refuses 0 only in the tiling, if "
    "scaleGradByFreq is true. npugrad: 561002.")
p.rule(rules.nd_or_public, _ALL, row=1, check=10)

p.not_expressible("workspaceSize and executor are created by the service, never null", check=1)
p.not_expressible("empty operands are no error: zeros", check=11)
p.not_expressible("how much memory a core has is the device's affair", check=13)
p.not_expressible("an unsigned number is never negative, as the page has it for no padding; num_weights or "
    "more is read so", name="padding_idx")
p.not_expressible("either value is legal", name="scale_grad_by_freq")
p.not_expressible("the limit depends on the number of cores, which no call tells", entry=(1, 2))
p.not_expressible("larger calls are no error, but less precise or slower", entry=(3, 4, 5))

EMBEDDING_DENSE_BACKWARD = p.record(NAME, wire=11,
    summary="Gradient of an embedding with respect to the vectors of its words.",
    reads=lambda call: {"grad_weight": ("grad", "indices")}, reference=reference, sizes={"num_weights": 9},
    models=(model("encoder", "transformer, 1024 of 30522 words", words=(8, 128), d=768, num_weights=30522),
        model("decoder", "language model, 2048 of 32000 words", words=(1, 2048), d=1024, num_weights=32000)),
    min_cann="8.5",
    **_indices.checked(NAME, "indices", lambda inputs, attrs: attrs["num_weights"], "num_weights"),
    binding=TorchBinding("aten.embedding_dense_backward",
        tuple(name for name in p.params if not p.is_output(name)),
        made={"indices": lambda given: given["indices"].long(),
            "padding_idx": lambda given: min(given["padding_idx"], INT64_MAX)},
        back={"padding_idx": lambda given: int(given["padding_idx"]) & NO_PADDING}))
"""The record; order of parameters is the order of aclnnEmbeddingDenseBackwardGetWorkspaceSize."""
