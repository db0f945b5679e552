"""What the page of aclnnFusedFloydAttentionGrad says of concrete calls, and which side is taken elsewhere."""

from __future__ import annotations

import tracemalloc
from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.contract.ops.changes import Changes, ids

from npugrad import CallMeta, DType, Format, Product, TensorMeta
from npugrad.operator import Sample
from npugrad.ops.fused_floyd_attention_grad import FUSED_FLOYD_ATTENTION_GRAD as RECORD
from npugrad.validation import validate_call

STATISTICS = ("softmax_max", "softmax_sum")
OUTPUTS = {"dq": "query", "dk1": "key1", "dv1": "value1", "dk2": "key2", "dv2": "value2"}
# That of the page's example program.
SIZES = {"n": 256, "m": 256, "k": 256, "d": 128}
EXAMPLE = Changes(RECORD, RECORD.build(with_mask=True, mask_dtype="uint8", **SIZES))
INPUTS = {name: meta for name, meta in EXAMPLE.call.inputs.items() if meta is not None}


def half(*shape: int) -> TensorMeta:
    return TensorMeta("float16", shape)


HALVES = ("key1", "value1", "key2", "value2", "dy", "attention_in")


def test_what_is_changed_is_what_is_named() -> None:
    """One operand of another type or rank, or a size that others share: the rest each constraint proves."""
    for dtype in ("float32", "float64", "int8", "complex64"):
        wrong = {name: TensorMeta(dtype, INPUTS[name].shape) for name in ("query", *HALVES)}
        assert EXAMPLE.found(wrong) == (161002, ["query.dtype"])
    for names, dtypes, kind in (
        (HALVES, ("bfloat16",), "same_dtype"),
        (STATISTICS, ("float16", "float64"), "dtype"),
        (("atten_mask",), ("int8", "float16"), "dtype"),
    ):
        for name, dtype in product(names, dtypes):
            changed = {name: TensorMeta(dtype, INPUTS[name].shape)}
            assert EXAMPLE.found(changed) == (161002, [f"{name}.{kind}"])
    for dtype in ("bool", "uint8"):
        assert EXAMPLE.check({"atten_mask": TensorMeta(dtype, (1, 1, 256, 1, 256))}).status == 0
    for name, shape in product(INPUTS, ((), (256, 256), (1, 1, 1, 256, 256, 128))):
        changed = {name: TensorMeta(INPUTS[name].dtype, shape)}
        assert EXAMPLE.found(changed) == (561002, [f"{name}.rank"])
    # K is that of key1: value1, key2, value2 and the mask are now the wrong ones.
    expected = ["key1.k_multiple", "key2.k", "value1.shape", "atten_mask.shape"]
    assert EXAMPLE.found({"key1": half(1, 1, 256, 200, 128)}) == (561002, expected)
    in_order = ("query", *HALVES[:5], *OUTPUTS, *STATISTICS, "attention_in")
    null = (161001, [f"{name}.not_null" for name in in_order])
    assert EXAMPLE.found(dict.fromkeys([*INPUTS, *OUTPUTS])) == null


def test_other_formats_than_nd_are_refused() -> None:
    for name in (*INPUTS, *OUTPUTS):
        refused = dict.fromkeys(Format, (161002, [f"{name}.format"]))
        assert EXAMPLE.formats(name) == {**refused, Format.ND: (0, [])}


# Sizes of a consistent call, and the constraints of 561002 that refuse them.
LIMITS: list[tuple[dict[str, int], list[str]]] = [
    ({"b": 1, "h": 1, "n": 16, "m": 128, "k": 128, "d": 32}, []),
    ({"b": 2048, "h": 256}, []),
    *(({name: 2**20}, []) for name in "nmk"),
    ({"b": 2049}, ["key1.batch_range"]),
    ({"b": 0}, ["key1.batch_range"]),
    ({"h": 257}, ["key1.heads_range"]),
    ({"h": 0}, ["key1.heads_range"]),
    ({"n": 24}, ["key1.n_multiple"]),
    ({"n": 8}, ["key1.n_range", "key1.n_multiple"]),
    ({"n": 0}, ["key1.n_range"]),
    ({"n": 2**20 + 16}, ["key1.n_range"]),
    ({"m": 192}, ["query.m_multiple"]),
    ({"m": 64}, ["query.m_range", "query.m_multiple"]),
    ({"m": 0}, ["query.m_range"]),
    ({"m": 2**20 + 128}, ["query.m_range"]),
    ({"k": 129}, ["key1.k_multiple"]),
    ({"k": 0}, ["key1.k_range"]),
    ({"k": 2**20 + 128}, ["key1.k_range"]),
    *(({"d": size}, ["key1.head_dim"]) for size in (0, 16, 96, 256)),
]


def test_limits_are_where_the_page_puts_them() -> None:
    for sizes, expected in LIMITS:
        verdict = validate_call(RECORD, RECORD.build(with_mask=True, **{"scale_value": 0.1, **sizes}))
        assert (verdict.status, ids(verdict)) == (561002 if expected else 0, expected), sizes


def test_atlas_training_is_decided_alone() -> None:
    wrong = {"query": None, "key1": half(1), "dq": None}
    assert EXAMPLE.found(wrong, Product.ATLAS_TRAINING) == (561003, ["product.supported"])
    assert list(RECORD.products) == [Product.ATLAS_A2, Product.ATLAS_A3]


def test_null_then_types_and_formats_then_sizes() -> None:
    verdict = EXAMPLE.check(
        {
            "query": TensorMeta("float32", (3, 1, 16, 100, 48), Format.NCDHW),
            "value1": TensorMeta("int8", (1,)),
            "softmax_sum": None,
            "atten_mask": TensorMeta("int32", (1, 1, 256, 1, 255), Format.NCDHW),
            **{"dq": None, "dk1": TensorMeta("int8", (2,), Format.FRACTAL_Z)},
        }
    )
    assert verdict.status == 161001
    codes = [violation.code for violation in verdict.violations]
    assert codes == sorted(codes)
    found = ids(verdict)
    assert found[:2] == ["dq.not_null", "softmax_sum.not_null"]
    assert set(found) > {"query.dtype", "value1.same_dtype", "atten_mask.dtype", "query.format", "dk1.format"}
    assert set(found) > {"value1.rank", "query.batch", "query.n", "query.head_dim", "query.m_range"}
    # Neither what is missing nor what has the wrong rank is compared with anything.
    assert not {"softmax_sum.shape", "value1.shape"} & set(found)


def test_what_the_page_has_and_the_source_does_not_check() -> None:
    unchecked = {c.id: c.code for c in RECORD.constraints if c.vendor_code == "accepts"}
    key2 = [f"key2.{name}" for name in ("batch", "heads", "k", "m", "head_dim")]
    ranges = [f"key1.{name}_range" for name in ("batch", "heads", "n", "k")]
    shapes = [f"{name}.shape" for name in OUTPUTS]
    assert {name for name, code in unchecked.items() if code == 561002} == {
        *(*key2, *ranges, *shapes, "query.m_range", "query.n")
    }
    formats = [f"{name}.format" for name in ("atten_mask", *STATISTICS, "attention_in")]
    assert {name for name, code in unchecked.items() if code == 161002} == {
        *("softmax_max.dtype", "softmax_sum.dtype", "attention_in.same_dtype", *formats)
    }
    for name in (*STATISTICS, "attention_in"):  # refused by the source, which calls them optional later
        (constraint,) = [c for c in RECORD.constraints if c.id == f"{name}.not_null"]
        assert (constraint.code, constraint.vendor_code) == (161001, 561002)
        assert constraint.pick


def test_only_the_mask_is_optional_and_nothing_is_deterministic() -> None:
    assert [p.name for p in RECORD.inputs if p.optional] == ["atten_mask"]
    assert "no deterministic mode" in str(RECORD.determinism_check(RECORD.build(), None))


Arrays = dict[str, Any]
SAMPLES = list(RECORD.samples(Product.ATLAS_A2))


def made(call: CallMeta, seed: int = 3) -> Arrays:
    return RECORD.make_inputs(call, np.random.default_rng(seed))


def run_forward(inputs: Arrays, scale: float) -> Arrays:
    """Compute statistics and attention of the rounded operands in float64, all scores in one piece."""
    q, k1, v1, k2, v2 = (np.asarray(inputs[like], np.float64) for like in OUTPUTS.values())
    scores = scale * (np.einsum("bhnmd,bhnkd->bhnmk", q, k1) + np.einsum("bhnmd,bhkmd->bhnmk", q, k2))
    if inputs["atten_mask"] is not None:
        scores[np.broadcast_to(inputs["atten_mask"] != 0, scores.shape)] = np.finfo(np.float32).min
    row_max = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - row_max)
    row_sum = exponentials.sum(axis=-1, keepdims=True)
    p = exponentials / row_sum
    attention = np.einsum("bhnmk,bhnkd->bhnmd", p, v1) + np.einsum("bhnmk,bhkmd->bhnmd", p, v2)
    return {
        "softmax_max": row_max.repeat(8, axis=-1),
        "softmax_sum": row_sum.repeat(8, axis=-1),
        "attention_in": attention,
    }


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_made_inputs_are_those_of_the_forward_pass_under_rows_of_every_mask(sample: Sample) -> None:
    inputs = made(sample.call)
    expected = run_forward(inputs, sample.call.number("scale_value"))
    for name in ("softmax_max", "softmax_sum"):
        np.testing.assert_allclose(inputs[name], expected[name], rtol=3e-6, atol=3e-6, err_msg=name)
    unit = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}[sample.call.tensor("query").dtype]
    error = np.abs(inputs["attention_in"].astype(np.float64) - expected["attention_in"])
    assert (error <= unit * np.abs(expected["attention_in"]) + 3e-6).all()
    if (mask := inputs["atten_mask"]) is None:
        assert "mask" not in sample.name
        return
    masked = (mask != 0).mean(axis=-1)
    assert (masked == 1).any()
    assert (masked == 0).any()
    assert ((masked > 0.1) & (masked < 0.6)).any()
    assert set(np.unique(mask)) == {0, 1}


def test_scores_of_a_large_call_are_never_there_at_once() -> None:
    call = RECORD.build(n=256, m=384, k=384)
    operand_bytes = sum(meta.nbytes for meta in call.inputs.values() if meta is not None)
    score_bytes = 4 * 256 * 384 * 384
    tracemalloc.start()
    try:
        made(call)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - operand_bytes < 0.8 * score_bytes
