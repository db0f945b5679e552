"""What the page of aclnnFusedFloydAttentionGrad says of concrete calls, and which side is taken elsewhere."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npugrad
from npugrad import CallMeta, DType, Format, Product, TensorMeta, Verdict
from npugrad.ops.fused_floyd_attention_grad import FUSED_FLOYD_ATTENTION_GRAD as RECORD
from npugrad.validation import validate_call

if TYPE_CHECKING:
    from collections.abc import Mapping

PRODUCTS = [Product.ATLAS_A2, Product.ATLAS_A3]
OUTPUTS = {"dq": "query", "dk1": "key1", "dv1": "value1", "dk2": "key2", "dv2": "value2"}
# The operands of the page's example program.
Q, K1, K2 = (1, 1, 256, 256, 128), (1, 1, 256, 256, 128), (1, 1, 256, 256, 128)
EXAMPLE: Mapping[str, TensorMeta] = {
    "query": TensorMeta("float16", Q),
    "key1": TensorMeta("float16", K1),
    "value1": TensorMeta("float16", K1),
    "key2": TensorMeta("float16", K2),
    "value2": TensorMeta("float16", K2),
    "dy": TensorMeta("float16", Q),
    "atten_mask": TensorMeta("uint8", (1, 1, 256, 1, 256)),
    "softmax_max": TensorMeta("float32", (1, 1, 256, 256, 8)),
    "softmax_sum": TensorMeta("float32", (1, 1, 256, 256, 8)),
    "attention_in": TensorMeta("float16", Q),
}


def check(
    inputs: Mapping[str, TensorMeta | None] | None = None,
    outputs: Mapping[str, TensorMeta | None] | None = None,
    product: Product | str = Product.ATLAS_A2,
) -> Verdict:
    """Validate the example program's call with some operands changed."""
    return npugrad.validate(
        RECORD.name,
        inputs={**EXAMPLE, **(inputs or {})},
        attrs={"scale_value": 128**-0.5},
        outputs=outputs,
        product=product,
    )


def check_sizes(**sizes: int) -> Verdict:
    """Validate a consistent call of the given sizes."""
    return validate_call(RECORD, RECORD.build(with_mask=True, **{"scale_value": 0.1, **sizes}))


def ids(verdict: Verdict) -> list[str]:
    return [violation.id for violation in verdict.violations]


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
        verdict = check({"query": None, "key1": half(1)}, {"dq": None}, product="atlas-training")
        assert (verdict.status, ids(verdict)) == (561003, ["product.supported"])

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
        verdict = check(dict.fromkeys(EXAMPLE), dict.fromkeys(OUTPUTS))
        assert verdict.status == 161001
        order = ("query", "key1", "value1", "key2", "value2", "dy", *OUTPUTS, "softmax_max", "softmax_sum")
        assert ids(verdict) == [f"{name}.not_null" for name in (*order, "attention_in")]


class TestInvalid:
    @pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "complex64"])
    def test_query_type(self, dtype: str) -> None:
        floats = [name for name, meta in EXAMPLE.items() if meta.dtype == "float16"]
        verdict = check({name: TensorMeta(dtype, EXAMPLE[name].shape) for name in floats})
        assert (verdict.status, ids(verdict)) == (161002, ["query.dtype"])

    @pytest.mark.parametrize("name", ["key1", "value1", "key2", "value2", "dy", "attention_in"])
    def test_type_unlike_query(self, name: str) -> None:
        verdict = check({name: TensorMeta("bfloat16", EXAMPLE[name].shape)})
        assert (verdict.status, ids(verdict)) == (161002, [f"{name}.same_dtype"])

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    @pytest.mark.parametrize("name", ["softmax_max", "softmax_sum"])
    def test_statistics_type(self, name: str, dtype: str) -> None:
        verdict = check({name: TensorMeta(dtype, EXAMPLE[name].shape)})
        assert (verdict.status, ids(verdict)) == (161002, [f"{name}.dtype"])

    @pytest.mark.parametrize(
        ("dtype", "status"), [("bool", 0), ("uint8", 0), ("int8", 161002), ("float16", 161002)]
    )
    def test_mask_type(self, dtype: str, status: int) -> None:
        verdict = check({"atten_mask": TensorMeta(dtype, (1, 1, 256, 1, 256))})
        assert (verdict.status, ids(verdict)) == (status, ["atten_mask.dtype"] if status else [])

    @pytest.mark.parametrize("name", EXAMPLE)
    def test_input_format(self, name: str) -> None:
        meta = EXAMPLE[name]
        verdict = check({name: TensorMeta(meta.dtype, meta.shape, Format.NCDHW)})
        assert (verdict.status, ids(verdict)) == (161002, [f"{name}.format"])

    @pytest.mark.parametrize(("name", "like"), OUTPUTS.items())
    def test_output_format(self, name: str, like: str) -> None:
        verdict = check(outputs={name: TensorMeta("float16", EXAMPLE[like].shape, Format.FRACTAL_NZ)})
        assert (verdict.status, ids(verdict)) == (161002, [f"{name}.format"])


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
        verdict = check({operand: half(*shape) for operand in ("query", "dy", "attention_in")})
        assert (verdict.status, ids(verdict)) == (561002, [f"query.{name}"])

    @pytest.mark.parametrize(("axis", "name"), list(enumerate(("batch", "heads", "k", "m", "head_dim"))))
    def test_key2_unlike_query_and_key1(self, axis: int, name: str) -> None:
        shape = list(K2)
        shape[axis] *= 2
        verdict = check({operand: half(*shape) for operand in ("key2", "value2")})
        assert (verdict.status, ids(verdict)) == (561002, [f"key2.{name}"])

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
        verdict = check({name: TensorMeta(EXAMPLE[name].dtype, shape)})
        assert (verdict.status, ids(verdict)) == (561002, [f"{name}.shape"])

    @pytest.mark.parametrize("shape", [(), (256, 256), (1, 1, 1, 256, 256, 128)], ids=str)
    @pytest.mark.parametrize("name", EXAMPLE)
    def test_rank(self, name: str, shape: tuple[int, ...]) -> None:
        verdict = check({name: TensorMeta(EXAMPLE[name].dtype, shape)})
        assert (verdict.status, ids(verdict)) == (561002, [f"{name}.rank"])

    def test_size_is_blamed_on_the_operand_that_defines_it(self) -> None:
        verdict = check({"key1": half(1, 1, 256, 200, 128)})
        # K is that of key1: value1, key2, value2 and the mask are now the wrong ones.
        assert ids(verdict) == ["key1.k_multiple", "key2.k", "value1.shape", "atten_mask.shape"]


class TestManyAtOnce:
    def test_null_then_types_and_formats_then_sizes(self) -> None:
        verdict = check(
            {
                "query": TensorMeta("float32", (3, 1, 16, 100, 48), Format.NCDHW),
                "value1": TensorMeta("int8", (1,)),
                "softmax_sum": None,
                "atten_mask": TensorMeta("int32", (1, 1, 256, 1, 255), Format.NCDHW),
            },
            {"dq": None, "dk1": TensorMeta("int8", (2,), Format.FRACTAL_Z)},
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

    def test_same_answer_every_time(self) -> None:
        wrong = {name: TensorMeta("int8", (3,), Format.NCHW) for name in EXAMPLE}
        first = check(wrong, dict.fromkeys(OUTPUTS))
        assert all(check(wrong, dict.fromkeys(OUTPUTS)) == first for _ in range(20))


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
    def test_order_of_the_c_signature(self) -> None:
        assert " ".join(p.c_name for p in RECORD.params) == (
            "query key1 value1 key2 value2 dy attenMaskOptional softmaxMax softmaxSum attentionIn scaleValue "
            "dqOut dk1Out dv1Out dk2Out dv2Out"
        )

    def test_only_the_mask_is_optional(self) -> None:
        assert [p.name for p in RECORD.inputs if p.optional] == ["atten_mask"]

    def test_never_deterministic(self) -> None:
        assert "no deterministic mode" in str(RECORD.determinism_check(RECORD.build(), None))


Arrays = dict[str, Any]
SAMPLES = list(RECORD.samples(Product.ATLAS_A2))


def made(call: CallMeta, seed: int = 3) -> Arrays:
    return RECORD.make_inputs(call, np.random.default_rng(seed))


def run_reference(call: CallMeta, inputs: Arrays) -> Arrays:
    outputs = {name: np.full(call.tensor(like).shape, np.nan) for name, like in OUTPUTS.items()}
    RECORD.reference(inputs, call.attrs, outputs)
    return outputs


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


def run_autograd(inputs: Arrays, scale: float) -> Arrays:
    """Differentiate with torch in float64; the mask replaces a score and lets its gradient pass."""
    torch = pytest.importorskip("torch")
    leaves = [
        torch.tensor(np.asarray(inputs[like], np.float64), requires_grad=True) for like in OUTPUTS.values()
    ]
    q, k1, v1, k2, v2 = leaves
    s = scale * (torch.einsum("bhnmd,bhnkd->bhnmk", q, k1) + torch.einsum("bhnmd,bhkmd->bhnmk", q, k2))
    if inputs["atten_mask"] is not None:
        masked = torch.tensor(np.asarray(inputs["atten_mask"] != 0))
        s = torch.where(masked, s + (float(np.finfo(np.float32).min) - s).detach(), s)
    p = torch.softmax(s, dim=-1)
    y = torch.einsum("bhnmk,bhnkd->bhnmd", p, v1) + torch.einsum("bhnmk,bhkmd->bhnmd", p, v2)
    grads = torch.autograd.grad(y, leaves, torch.tensor(np.asarray(inputs["dy"], np.float64)))
    return {name: grad.numpy() for name, grad in zip(OUTPUTS, grads, strict=True)}


def assert_close(actual: Arrays, expected: Arrays, tolerance: float) -> None:
    """Compare tensor by tensor, errors relative to the largest element."""
    for name, want in expected.items():
        error = np.abs(np.asarray(actual[name], np.float64) - want).max() / np.abs(want).max()
        assert error < tolerance, name


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

    @pytest.mark.torch
    def test_reference_agrees_with_autograd(self, sample: Any) -> None:
        inputs, scale = made(sample.call), sample.call.number("scale_value")
        inputs.update(run_forward(inputs, scale))
        assert_close(run_reference(sample.call, inputs), run_autograd(inputs, scale), 1e-12)

    @pytest.mark.torch
    def test_rounding_of_the_forward_pass_changes_little(self, sample: Any) -> None:
        inputs, scale = made(sample.call), sample.call.number("scale_value")
        tolerance = 4 * unit_roundoff(sample.call)
        assert_close(run_reference(sample.call, inputs), run_autograd(inputs, scale), tolerance)


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
