"""What the page of aclnnGroupNormBackward says of concrete calls, and which side is taken elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npugrad
from npugrad import DType, Format, Product, TensorMeta, Verdict
from npugrad.ops.group_norm_backward import GROUP_NORM_BACKWARD as RECORD
from npugrad.validation import validate_call

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "group_norm_backward"
# The operands of the page's example program.
EXAMPLE = {
    "grad_out": TensorMeta("float32", (2, 3, 4)),
    "input": TensorMeta("float32", (2, 3, 4)),
    "mean": TensorMeta("float32", (2, 1)),
    "rstd": TensorMeta("float32", (2, 1)),
    "gamma": TensorMeta("float32", (3,)),
}
ATTRS: Mapping[str, Any] = {"n": 2, "c": 3, "hxw": 4, "group": 1, "output_mask": (True, True, True)}
OUTPUTS = ("grad_input", "grad_gamma", "grad_beta")


def check(
    inputs: Mapping[str, TensorMeta | None] | None = None,
    attrs: Mapping[str, Any] | None = None,
    outputs: Mapping[str, TensorMeta | None] | None = None,
    product: Product | str = Product.ATLAS_A2,
) -> Verdict:
    """Validate the example program's call with some things changed."""
    return npugrad.validate(
        NAME,
        inputs={**EXAMPLE, **(inputs or {})},
        attrs={**ATTRS, **(attrs or {})},
        outputs=outputs,
        product=product,
    )


def ids(verdict: Verdict) -> list[str]:
    return [violation.id for violation in verdict.violations]


def meta(*shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(dtype, shape)


def all_of(dtype: str) -> dict[str, TensorMeta | None]:
    return {name: meta(*m.shape, dtype=dtype) for name, m in EXAMPLE.items()}


class TestLegal:
    def test_gradients_have_the_shape_of_gamma_or_one_axis_without_it(self) -> None:
        assert check({"gamma": meta(1, 3, 1)}).outputs["grad_beta"] == meta(1, 3, 1)
        assert check({"gamma": None}).outputs["grad_gamma"] == meta(3)

    def test_only_numbers_of_elements_count(self) -> None:
        inputs = {"grad_out": meta(24), "input": meta(4, 3, 2), "mean": meta(2), "rstd": meta(1, 2, 1)}
        verdict = check(inputs)
        assert verdict.status == 0
        assert verdict.outputs["grad_input"] == meta(4, 3, 2)

    @pytest.mark.parametrize("sizes", [{"n": 0}, {"hxw": 0}, {"c": 0}, {"n": 0, "c": 0, "hxw": 0}], ids=str)
    def test_empty(self, sizes: dict[str, int]) -> None:
        assert validate_call(RECORD, RECORD.build(**sizes)).status == 0

    @pytest.mark.parametrize("storage", [Format.NCHW, Format.FRACTAL_NZ], ids=str)
    def test_any_format(self, storage: Format) -> None:
        assert check({n: TensorMeta(m.dtype, m.shape, storage) for n, m in EXAMPLE.items()}).status == 0


class TestNull:
    """aclnnGroupNormBackward, return codes, 161001."""

    @pytest.mark.parametrize("name", OUTPUTS)
    def test_rows_2_to_4_wanted_outputs(self, name: str) -> None:
        verdict = check(outputs={name: None})
        assert (verdict.status, ids(verdict)) == (161001, [f"{name}.not_null"])
        (rule,) = [c for c in RECORD.constraints if c.id == f"{name}.not_null"]
        assert rule.vendor_code == 161002
        assert "Taken: 161001" in rule.pick

    def test_null_mask_is_161002_and_leaves_outputs_unjudged(self) -> None:
        verdict = check(attrs={"output_mask": None}, outputs=dict.fromkeys(OUTPUTS))
        assert (verdict.status, ids(verdict)) == (161002, ["output_mask.not_null"])


# Row of the page's 161002 list, inputs, attributes and declared outputs that break it, and who says so.
ROWS: list[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = [
    (1, all_of("float64"), {}, {}, ["grad_out.dtype"]),
    (1, all_of("int32"), {}, {}, ["grad_out.dtype"]),
    (1, all_of("float8_e5m2"), {}, {}, ["grad_out.dtype"]),
    *(
        (2, {n: meta(*EXAMPLE[n].shape, dtype="float16")}, {}, {}, [f"{n}.same_dtype"])
        for n in list(EXAMPLE)[1:]
    ),
    (2, {}, {}, {"grad_gamma": meta(3, dtype="bfloat16")}, ["grad_gamma.same_dtype"]),
    (3, {}, {}, {"grad_input": meta(24)}, ["grad_input.shape"]),
    (4, {}, {}, {"grad_gamma": meta(4)}, ["grad_gamma.shape"]),
    (5, {}, {}, {"grad_beta": meta(1, 3)}, ["grad_beta.shape"]),
    (6, {}, {"group": 0}, {}, ["group.positive"]),
    (6, {}, {"group": -1}, {}, ["group.positive"]),
    (7, {"mean": meta(4), "rstd": meta(4)}, {"group": 2}, {}, ["c.multiple_of_group"]),
    (8, {"input": meta(2, 3, 5)}, {}, {}, ["input.count"]),
    (9, {"mean": meta(3)}, {}, {}, ["mean.count"]),
    (10, {"rstd": meta(2, 2)}, {}, {}, ["rstd.count"]),
    (11, {"gamma": meta(4)}, {}, {}, ["gamma.count"]),
]


@pytest.mark.parametrize(("row", "inputs", "attrs", "outputs", "expected"), ROWS)
def test_rows_of_161002(
    row: int, inputs: dict[str, Any], attrs: dict[str, Any], outputs: dict[str, Any], expected: list[str]
) -> None:
    verdict = check(inputs, attrs, outputs)
    assert (verdict.status, ids(verdict)) == (161002, expected)
    cited = {(s.section, s.row) for s in verdict.violations[0].sources}
    assert ("return codes, 161002", f"row {row}") in cited


@pytest.mark.parametrize(
    ("product", "status"),
    [(Product.ATLAS_TRAINING, 161002), (Product.ATLAS_A2, 0), (Product.ATLAS_A3, 0)],
    ids=str,
)
def test_bfloat16_is_not_for_the_training_series(product: Product, status: int) -> None:
    assert check(all_of("bfloat16"), product=product).status == status


@pytest.mark.parametrize(
    ("product", "c", "group", "expected"),
    [
        (Product.ATLAS_A2, 8000, 1, []),
        (Product.ATLAS_A2, 8001, 1, ["c.per_group"]),
        (Product.ATLAS_A3, 16002, 2, ["c.per_group"]),
        (Product.ATLAS_TRAINING, 8001, 1, []),
        (Product.ATLAS_A2, 240_000, 30, []),
        (Product.ATLAS_A3, 240_001, 240_001, ["c.limit"]),
        (Product.ATLAS_TRAINING, 240_001, 240_001, []),
    ],
)
def test_limits_of_channels_hold_on_the_newer_series(
    product: Product, c: int, group: int, expected: list[str]
) -> None:
    verdict = validate_call(RECORD, RECORD.build(product=product, n=1, c=c, hxw=1, group=group))
    assert ids(verdict) == expected


@pytest.mark.parametrize("name", list(EXAMPLE))
def test_ranks_up_to_8(name: str) -> None:
    shape = EXAMPLE[name].shape
    at_limit, above = shape + (1,) * (8 - len(shape)), shape + (1,) * (9 - len(shape))
    assert check({name: meta(*at_limit)}).status == 0
    assert ids(check({name: meta(*above)})) == [f"{name}.rank"]


@pytest.mark.parametrize(("sizes", "expected"), [({"n": -2, "c": -3}, {"n", "c"}), ({"hxw": -4}, {"hxw"})])
def test_negative_sizes_are_refused_though_products_may_fit(
    sizes: dict[str, int], expected: set[str]
) -> None:
    verdict = check(attrs=sizes)
    assert (verdict.status, set(ids(verdict))) == (161002, {f"{name}.non_negative" for name in expected})


def test_sizes_beyond_int64_are_compared_exactly() -> None:
    verdict = check(attrs={"n": 2**62, "c": 3, "hxw": 2**62})
    assert ids(verdict) == ["grad_out.count", "input.count", "mean.count", "rstd.count"]
    assert f"n*c*hxw = {3 * 2**124} elements" in verdict.violations[0].expected


def test_order_of_codes_is_nulls_first_and_then_that_of_the_checks() -> None:
    inputs = {"grad_out": meta(2, dtype="float64"), "rstd": None, "mean": meta(7)}
    verdict = check(inputs, {"group": 0}, {"grad_input": None})
    found = ids(verdict)
    assert verdict.status == 161001
    assert found[:3] == ["rstd.not_null", "grad_input.not_null", "grad_out.dtype"]
    assert found.index("input.same_dtype") < found.index("group.positive") < found.index("grad_out.count")


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"n": 0}, {"c": 0}, {"hxw": 0}, {"with_gamma": False}], ids=str)
def test_made_operands_fit_the_call_and_each_other(dtype: DType, sizes: dict[str, Any]) -> None:
    call = RECORD.build(dtype=dtype, **sizes)
    made = RECORD.make_inputs(call, np.random.default_rng(3))
    for name, expected in call.inputs.items():
        array = made[name]
        assert (array is None) == (expected is None)
        if array is not None and expected is not None:
            assert (array.dtype, array.shape) == (expected.dtype.numpy, expected.shape)
    if "n" not in sizes and "c" not in sizes and "hxw" not in sizes:
        data, mean, rstd = (np.asarray(made[name], np.float64) for name in ("input", "mean", "rstd"))
        groups = data.reshape(call.integer("n"), call.integer("group"), -1)
        tolerance = 0.05 if dtype is DType.BFLOAT16 else 0.01
        np.testing.assert_allclose(groups.mean(-1), mean, atol=tolerance, rtol=0)
        np.testing.assert_allclose(groups.std(-1) * rstd, 1, atol=tolerance)
