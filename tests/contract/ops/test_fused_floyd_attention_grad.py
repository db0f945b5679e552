"""What the page of aclnnFusedFloydAttentionGrad says of concrete calls, and which side is taken elsewhere."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from tests.contract.ops.changes import Changes, ids

from npugrad import CallMeta, DType, Format, Product, TensorMeta, Verdict
from npugrad.ops.fused_floyd_attention_grad import FUSED_FLOYD_ATTENTION_GRAD as RECORD
from npugrad.validation import validate_call

STATISTICS = ("softmax_max", "softmax_sum")
PRODUCTS = [Product.ATLAS_A2, Product.ATLAS_A3]
OUTPUTS = {"dq": "query", "dk1": "key1", "dv1": "value1", "dk2": "key2", "dv2": "value2"}
# That of the page's example program.
SIZES = {"n": 256, "m": 256, "k": 256, "d": 128}
EXAMPLE = Changes(RECORD, RECORD.build(with_mask=True, mask_dtype="uint8", **SIZES))
INPUTS = {name: meta for name, meta in EXAMPLE.call.inputs.items() if meta is not None}
Q = K2 = (1, 1, 256, 256, 128)


def check_sizes(**sizes: int) -> Verdict:
    """Validate a consistent call of the given sizes."""
    return validate_call(RECORD, RECORD.build(with_mask=True, **{"scale_value": 0.1, **sizes}))


def half(*shape: int) -> TensorMeta:
    return TensorMeta("float16", shape)


class TestLegal:
    def test_smallest(self) -> None:
        assert check_sizes(b=1, h=1, n=16, m=128, k=128, d=32).status == 0

    def test_largest_of_each(self) -> None:
        assert check_sizes(b=2048, h=256).status == 0
        assert check_sizes(n=2**20).status == 0
        assert check_sizes(m=2**20).status == 0
        assert check_sizes(k=2**20).status == 0


class TestProduct:
    def test_atlas_training_is_decided_alone(self) -> None:
        wrong = {"query": None, "key1": half(1), "dq": None}
        assert EXAMPLE.found(wrong, Product.ATLAS_TRAINING) == (561003, ["product.supported"])

    def test_has_no_samples_and_no_line(self) -> None:
        assert list(RECORD.samples(Product.ATLAS_TRAINING)) == []
        assert list(RECORD.products) == PRODUCTS


class TestNull:
    @pytest.mark.parametrize("name", ["softmax_max", "softmax_sum", "attention_in"])
    def test_source_refuses_what_it_calls_optional_later(self, name: str) -> None:
        constraint = next(c for c in RECORD.constraints if c.id == f"{name}.not_null")
        assert (constraint.code, constraint.vendor_code) == (161001, 561002)
        assert constraint.pick

    def test_all_in_the_order_of_the_checks(self) -> None:
        order = ("query", "key1", "value1", "key2", "value2", "dy", *OUTPUTS, "softmax_max", "softmax_sum")
        expected = [f"{name}.not_null" for name in (*order, "attention_in")]
        assert EXAMPLE.found(dict.fromkeys([*INPUTS, *OUTPUTS])) == (161001, expected)


HALVES = ("key1", "value1", "key2", "value2", "dy", "attention_in")


class TestInvalid:
    @pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "complex64"])
    def test_query_type(self, dtype: str) -> None:
        wrong = {name: TensorMeta(dtype, INPUTS[name].shape) for name in ("query", *HALVES)}
        assert EXAMPLE.found(wrong) == (161002, ["query.dtype"])

    @pytest.mark.parametrize(
        ("name", "dtype", "kind"),
        [
            *((name, "bfloat16", "same_dtype") for name in HALVES),
            *((name, dtype, "dtype") for name in STATISTICS for dtype in ("float16", "float64")),
            *(("atten_mask", dtype, "dtype") for dtype in ("int8", "float16")),
        ],
    )
    def test_types_of_the_others(self, name: str, dtype: str, kind: str) -> None:
        wrong = {name: TensorMeta(dtype, INPUTS[name].shape)}
        assert EXAMPLE.found(wrong) == (161002, [f"{name}.{kind}"])

    def test_both_types_of_the_mask(self) -> None:
        for dtype in ("bool", "uint8"):
            assert EXAMPLE.check({"atten_mask": TensorMeta(dtype, (1, 1, 256, 1, 256))}).status == 0

    @pytest.mark.parametrize("name", [*INPUTS, *OUTPUTS])
    def test_format(self, name: str) -> None:
        """NCDHW and FRACTAL_NZ among them."""
        refused = dict.fromkeys(Format, (161002, [f"{name}.format"]))
        assert EXAMPLE.formats(name) == {**refused, Format.ND: (0, [])}


class TestTiling:
    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
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
            ({"d": 0}, ["key1.head_dim"]),
            ({"d": 16}, ["key1.head_dim"]),
            ({"d": 96}, ["key1.head_dim"]),
            ({"d": 256}, ["key1.head_dim"]),
        ],
        ids=str,
    )
    def test_sizes(self, sizes: dict[str, int], expected: list[str]) -> None:
        verdict = check_sizes(**sizes)
        assert (verdict.status, ids(verdict)) == (561002, expected)

    @pytest.mark.parametrize(("axis", "name"), [(0, "batch"), (1, "heads"), (2, "n"), (4, "head_dim")])
    def test_query_unlike_key1(self, axis: int, name: str) -> None:
        shape = list(Q)
        shape[axis] *= 2
        wrong = {operand: half(*shape) for operand in ("query", "dy", "attention_in")}
        assert EXAMPLE.found(wrong) == (561002, [f"query.{name}"])

    @pytest.mark.parametrize(("axis", "name"), list(enumerate(("batch", "heads", "k", "m", "head_dim"))))
    def test_key2_unlike_query_and_key1(self, axis: int, name: str) -> None:
        shape = list(K2)
        shape[axis] *= 2
        assert EXAMPLE.found({"key2": half(*shape), "value2": half(*shape)}) == (561002, [f"key2.{name}"])

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("value1", (1, 1, 256, 128, 128)),
            ("value2", (1, 1, 128, 256, 128)),
            ("dy", (1, 1, 256, 256, 64)),
            ("attention_in", (1, 2, 256, 256, 128)),
            ("atten_mask", (1, 1, 256, 256, 256)),
            ("atten_mask", (1, 1, 1, 1, 256)),
            ("softmax_max", (1, 1, 256, 256, 1)),
            ("softmax_sum", (1, 1, 256, 128, 8)),
        ],
        ids=str,
    )
    def test_shape(self, name: str, shape: tuple[int, ...]) -> None:
        wrong = {name: TensorMeta(INPUTS[name].dtype, shape)}
        assert EXAMPLE.found(wrong) == (561002, [f"{name}.shape"])

    @pytest.mark.parametrize("name", INPUTS)
    def test_rank(self, name: str) -> None:
        for shape in ((), (256, 256), (1, 1, 1, 256, 256, 128)):
            wrong = {name: TensorMeta(INPUTS[name].dtype, shape)}
            assert EXAMPLE.found(wrong) == (561002, [f"{name}.rank"])

    def test_size_is_blamed_on_the_operand_that_defines_it(self) -> None:
        verdict = EXAMPLE.check({"key1": half(1, 1, 256, 200, 128)})
        # K is that of key1: value1, key2, value2 and the mask are now the wrong ones.
        assert ids(verdict) == ["key1.k_multiple", "key2.k", "value1.shape", "atten_mask.shape"]


class TestManyAtOnce:
    def test_null_then_types_and_formats_then_sizes(self) -> None:
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
        assert {"query.dtype", "value1.same_dtype", "atten_mask.dtype", "query.format", "dk1.format"} < set(
            found
        )
        assert {"value1.rank", "query.batch", "query.n", "query.head_dim", "query.m_range"} < set(found)
        # Neither what is missing nor what has the wrong rank is compared with anything.
        assert "softmax_sum.shape" not in found
        assert "value1.shape" not in found


class TestPicks:
    def test_documented_but_unchecked_by_the_source(self) -> None:
        unchecked = {c.id: c.code for c in RECORD.constraints if c.vendor_code == "accepts"}
        key2 = [f"key2.{name}" for name in ("batch", "heads", "k", "m", "head_dim")]
        ranges = [f"key1.{name}_range" for name in ("batch", "heads", "n", "k")]
        shapes = [f"{name}.shape" for name in OUTPUTS]
        assert {name for name, code in unchecked.items() if code == 561002} == {
            *(*key2, *ranges, *shapes, "query.m_range", "query.n")
        }
        assert {name for name, code in unchecked.items() if code == 161002} == {
            "softmax_max.dtype",
            "softmax_sum.dtype",
            "attention_in.same_dtype",
            "atten_mask.format",
            "softmax_max.format",
            "softmax_sum.format",
            "attention_in.format",
        }


class TestParameters:
    def test_only_the_mask_is_optional(self) -> None:
        assert [p.name for p in RECORD.inputs if p.optional] == ["atten_mask"]

    def test_never_deterministic(self) -> None:
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
class TestMadeInputs:
    def test_statistics_and_attention_are_those_of_the_forward_pass(self, sample: Any) -> None:
        inputs = made(sample.call)
        expected = run_forward(inputs, sample.call.number("scale_value"))
        for name in ("softmax_max", "softmax_sum"):
            np.testing.assert_allclose(inputs[name], expected[name], rtol=3e-6, atol=3e-6, err_msg=name)
        rounding = unit_roundoff(sample.call) * np.abs(expected["attention_in"])
        error = np.abs(inputs["attention_in"].astype(np.float64) - expected["attention_in"])
        assert (error <= rounding + 3e-6).all()

    def test_mask_has_rows_of_every_kind(self, sample: Any) -> None:
        mask = made(sample.call)["atten_mask"]
        if mask is None:
            assert "mask" not in sample.name
            return
        masked = (mask != 0).mean(axis=-1)
        assert (masked == 1).any()
        assert (masked == 0).any()
        assert ((masked > 0.1) & (masked < 0.6)).any()
        assert set(np.unique(mask)) == {0, 1}


def unit_roundoff(call: CallMeta) -> float:
    """Largest relative error of rounding to the dtype of query."""
    return {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}[call.tensor("query").dtype]


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
