"""What our formulas can compute: all that the documents allow, more, and nothing that means nothing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad import OPERATORS, Product, TensorMeta
from npugrad_client._fitting import FLOATS, as_sent, fits, is_mixed

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
