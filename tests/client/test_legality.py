"""Calls that the adapters refuse, or compute here, before their forward pass, from types and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.interpreter import printed

import npugrad
from npugrad import OPERATORS, Product, TensorMeta
from npugrad_client import (
    AsyncClient,
    Client,
    InvalidOperand,
    MalformedRequest,
    NullOperand,
    OperatorError,
    TilingError,
    UnsupportedOperator,
    _legality,
)
from npugrad_client._fitting import FLOATS, as_sent, fits, is_mixed

NOWHERE = "127.0.0.1:1"
DEFORMABLE = {
    "value": TensorMeta("bfloat16", (2, 47, 2, 8)),
    "spatial_shape": TensorMeta("int64", (2, 2)),
    "level_start_index": TensorMeta("int64", (2,)),
    "location": TensorMeta("bfloat16", (2, 6, 2, 2, 3, 2)),
    "attn_weight": TensorMeta("bfloat16", (2, 6, 2, 2, 3)),
}
FLOYD: Mapping[str, TensorMeta | None] = {
    "query": TensorMeta("float16", (1, 2, 16, 128, 32)),
    "key1": TensorMeta("float16", (1, 2, 16, 256, 32)),
    "value1": TensorMeta("float16", (1, 2, 16, 256, 32)),
    "key2": TensorMeta("float16", (1, 2, 256, 128, 32)),
    "value2": TensorMeta("float16", (1, 2, 256, 128, 32)),
    "atten_mask": TensorMeta("bool", (1, 1, 16, 1, 256)),
}


def test_a_client_is_one() -> None:
    with Client(NOWHERE) as client:
        _legality.require_client("remote", client)
    with pytest.raises(TypeError, match=r"^remote: client: found str; expected a Client$"):
        _legality.require_client("remote", NOWHERE)
    with pytest.raises(TypeError, match="found AsyncClient"):
        _legality.require_client("remote", AsyncClient(NOWHERE))


def test_what_a_product_lacks_is_refused_for_it_alone() -> None:
    rows = TensorMeta("float32", (1, 2, 16, 128, 8))
    query = FLOYD["query"]
    inputs = {**FLOYD, "dy": query, "attention_in": query, "softmax_max": rows, "softmax_sum": rows}
    attrs = {"scale_value": 1.0}
    _legality.require_legal(_legality.FLOYD_ATTENTION, inputs, attrs)
    _legality.require_legal(_legality.FLOYD_ATTENTION, inputs, attrs, "atlas-a3")
    with pytest.raises(UnsupportedOperator):
        _legality.require_legal(_legality.FLOYD_ATTENTION, inputs, attrs, "atlas-training")
    with pytest.raises(MalformedRequest, match="scale_value"):
        _legality.require_legal(_legality.FLOYD_ATTENTION, inputs, {})


def test_attention_is_held_to_what_its_gradient_will_need() -> None:
    _legality.require_legal_deformable_attention(DEFORMABLE)
    grad_output = TensorMeta("bfloat16", (2, 6, 2 * 8))
    verdict = npugrad.validate(
        _legality.DEFORMABLE_ATTENTION, inputs={**DEFORMABLE, "grad_output": grad_output}, attrs={}
    )
    assert not verdict.violations
    for mask in (FLOYD["atten_mask"], None):
        _legality.require_legal_floyd_attention({**FLOYD, "atten_mask": mask}, 0.5)


REFUSED: list[tuple[dict[str, Any], type[OperatorError], str]] = [
    ({"value": TensorMeta("bfloat16", (2, 47, 2, 5))}, InvalidOperand, "value"),
    ({"value": TensorMeta("bfloat16", (2, 47, 16))}, InvalidOperand, "value"),
    ({"location": TensorMeta("bfloat16", ())}, InvalidOperand, "location"),
    ({"attn_weight": TensorMeta("float32", (2, 6, 2, 2, 3))}, InvalidOperand, "attn_weight"),
    ({"query": TensorMeta("float32", (1, 2, 16, 128, 32))}, InvalidOperand, "query"),
    ({"key2": TensorMeta("float16", (1, 2, 128, 128, 32))}, TilingError, "key2"),
    ({"atten_mask": TensorMeta("bool", (1, 1, 16, 256))}, TilingError, "atten_mask"),
    *(({name: None}, NullOperand, name) for name in (*DEFORMABLE, *FLOYD) if name != "atten_mask"),
]


def judge(change: dict[str, Any]) -> None:
    """Of the operator whose operand it is."""
    if change.keys() <= DEFORMABLE.keys():
        _legality.require_legal_deformable_attention({**DEFORMABLE, **change})
    else:
        _legality.require_legal_floyd_attention({**FLOYD, **change}, 0.5)


def test_attention_is_refused_with_the_operand_that_does_not_fit() -> None:
    for change, cls, operand in REFUSED:
        with pytest.raises(cls, match=rf": {operand}.*: found .*; expected") as refused:
            judge(change)
        assert operand in refused.value.violations[0].operands


OPERANDS = {
    "multi_scale_deformable_attention_grad": ("value", "location", "attn_weight", "spatial_shape"),
    "fused_floyd_attention_grad": ("query", "key1", "value1", "key2", "value2", "atten_mask"),
    "group_norm_backward": ("gamma",),
    "layer_norm_backward": ("weight", "bias"),
    "grid_sampler_2d_backward": ("input", "grid"),
    "grid_sampler_3d_backward": ("input", "grid"),
}
"""Of each operator that has a formula, the operands to which an axis more does not fit."""


def typed(inputs: Mapping[str, TensorMeta | None], dtype: str) -> dict[str, TensorMeta | None]:
    return {
        name: TensorMeta(dtype, meta.shape) if meta is not None and meta.dtype in FLOATS else meta
        for name, meta in inputs.items()
    }


@pytest.mark.parametrize("name", OPERANDS)
def test_what_the_documents_allow_fits_in_every_float_and_with_no_axis_more(name: str) -> None:
    for sample in OPERATORS[name].samples(Product.ATLAS_A2):
        if sample.name == "one_group_of_one":
            continue  # of rank 0, which has no channels to split
        call = sample.call
        assert fits(name, call.inputs, call.attrs), sample.name
        assert fits(name, typed(call.inputs, "float64"), call.attrs), sample.name
        assert not fits(name, typed(call.inputs, "int64"), call.attrs), sample.name
        for operand in OPERANDS[name]:
            meta = call.inputs.get(operand)
            if meta is not None:
                broken = {**call.inputs, operand: TensorMeta(meta.dtype, (*meta.shape, 1))}
                assert not fits(name, broken, call.attrs), (sample.name, operand)


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.none() | st.builds(TensorMeta, st.sampled_from([*FLOATS, "int64"]), st.just((2, 3))),
        min_size=1,
    )
)
def test_operands_are_sent_in_one_type_of_float_or_as_they_are(
    operands: dict[str, TensorMeta | None],
) -> None:
    sent = as_sent(operands)
    floats = {meta.dtype for meta in sent.values() if meta is not None and meta.dtype in FLOATS}
    assert len(floats) <= 1 or "float64" in floats
    assert not is_mixed(sent)
    assert as_sent(sent) == sent
    for name, meta in operands.items():
        after = sent[name]
        assert (after is None) == (meta is None)
        if meta is not None and after is not None:
            assert after.shape == meta.shape
            assert after.dtype == meta.dtype or (is_mixed(operands) and after.dtype == "float32")


def test_it_needs_neither_of_the_two_libraries_and_nor_does_a_client() -> None:
    program = """
import sys
import numpy as np
import npugrad_client._legality
assert not npugrad_client._arrays.is_torch(np.zeros(2))
print({"torch", "jax"} & set(sys.modules))
"""
    assert printed(program) == "set()\n"
