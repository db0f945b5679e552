"""What our formulas can compute: all that the documents allow, more, and nothing that means nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad import OPERATORS, Product, TensorMeta
from npugrad_client._fitting import FLOATS, as_sent, fits, is_mixed

FITTED = (
    "multi_scale_deformable_attention_grad",
    "fused_floyd_attention_grad",
    "group_norm_backward",
    "layer_norm_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
)


LEGAL = [
    pytest.param(name, sample.call, id=f"{name}-{sample.name}")
    for name in FITTED
    for sample in OPERATORS[name].samples(Product.ATLAS_A2)
    if sample.name != "one_group_of_one"  # of rank 0, which has no channels to split
]


@pytest.mark.parametrize(("name", "call"), LEGAL)
def test_what_the_documents_allow_fits(name: str, call: Any) -> None:
    assert fits(name, call.inputs, call.attrs)


@pytest.mark.parametrize(("name", "call"), LEGAL)
def test_float64_fits_as_well_and_whole_numbers_do_not(name: str, call: Any) -> None:
    assert fits(name, typed(call.inputs, "float64"), call.attrs)
    assert not fits(name, typed(call.inputs, "int64"), call.attrs)


def typed(inputs: Mapping[str, TensorMeta | None], dtype: str) -> dict[str, TensorMeta | None]:
    return {
        name: TensorMeta(dtype, meta.shape) if meta is not None and meta.dtype in FLOATS else meta
        for name, meta in inputs.items()
    }


OPERANDS = {
    "multi_scale_deformable_attention_grad": ("value", "location", "attn_weight", "spatial_shape"),
    "fused_floyd_attention_grad": ("query", "key1", "value1", "key2", "value2", "atten_mask"),
    "group_norm_backward": ("gamma",),
    "layer_norm_backward": ("weight", "bias"),
    "grid_sampler_2d_backward": ("input", "grid"),
    "grid_sampler_3d_backward": ("input", "grid"),
}


@pytest.mark.parametrize(("name", "call"), LEGAL)
def test_an_axis_more_on_one_operand_does_not_fit(name: str, call: Any) -> None:
    for operand in OPERANDS[name]:
        meta = call.inputs.get(operand)
        if meta is not None:
            broken = {**call.inputs, operand: TensorMeta(meta.dtype, (*meta.shape, 1))}
            assert not fits(name, broken, call.attrs), operand


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
