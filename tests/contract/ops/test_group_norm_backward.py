"""What the page of aclnnGroupNormBackward says of concrete calls, and which side is taken elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.ops.changes import Changes, ids, meta, rows_of_161002

from npugrad import DType, Format, Product
from npugrad.ops.group_norm_backward import GROUP_NORM_BACKWARD as RECORD
from npugrad.validation import validate_call

# That of the page's example program.
EXAMPLE = Changes(RECORD, RECORD.build(n=2, c=3, hxw=4, group=1, shape=(2, 3, 4)))
OUTPUTS = ("grad_input", "grad_gamma", "grad_beta")


def test_gradients_have_the_shape_of_gamma_and_else_only_numbers_of_elements_count() -> None:
    assert EXAMPLE.check({"gamma": meta(1, 3, 1)}).outputs["grad_beta"] == meta(1, 3, 1)
    assert EXAMPLE.check({"gamma": None}).outputs["grad_gamma"] == meta(3)
    shapes = {"grad_out": meta(24), "input": meta(4, 3, 2), "mean": meta(2), "rstd": meta(1, 2, 1)}
    verdict = EXAMPLE.check(shapes)
    assert verdict.status == 0
    assert verdict.outputs["grad_input"] == meta(4, 3, 2)
    for sizes in ({"n": 0}, {"hxw": 0}, {"c": 0}, {"n": 0, "c": 0, "hxw": 0}):
        assert validate_call(RECORD, RECORD.build(**sizes)).status == 0


def test_any_format_and_ranks_up_to_8() -> None:
    for name in (*EXAMPLE.call.inputs, *OUTPUTS):
        assert EXAMPLE.formats(name) == dict.fromkeys(Format, (0, []))
    for name in EXAMPLE.call.inputs:
        shape = EXAMPLE.call.tensor(name).shape
        for rank, expected in ((8, (0, [])), (9, (161002, [f"{name}.rank"]))):
            assert EXAMPLE.found({name: meta(*shape, *[1] * (rank - len(shape)))}) == expected


def test_bfloat16_is_not_for_the_training_series() -> None:
    found = {product: EXAMPLE.check(EXAMPLE.all_of("bfloat16"), product).status for product in Product}
    assert {product for product, status in found.items() if status} == {Product.ATLAS_TRAINING}


def test_null() -> None:
    """aclnnGroupNormBackward, return codes, 161001, rows 2 to 4; a null mask leaves outputs unjudged."""
    for name in OUTPUTS:
        assert EXAMPLE.found({name: None}) == (161001, [f"{name}.not_null"])
        (rule,) = [c for c in RECORD.constraints if c.id == f"{name}.not_null"]
        assert rule.vendor_code == 161002
        assert "npugrad: 161001" in rule.pick
    nothing = {"output_mask": None, **dict.fromkeys(OUTPUTS)}
    assert EXAMPLE.found(nothing) == (161002, ["output_mask.not_null"])


# Row of the page's 161002 list, what breaks it, and who says so.
ROWS: list[tuple[int, dict[str, Any], str]] = [
    *((1, dict(EXAMPLE.all_of(dtype)), "grad_out.dtype") for dtype in ("float64", "int32", "float8_e5m2")),
    *(
        (2, {name: EXAMPLE.all_of("float16")[name]}, f"{name}.same_dtype")
        for name in ("input", "mean", "rstd", "gamma")
    ),
    (2, {"grad_gamma": meta(3, dtype="bfloat16")}, "grad_gamma.same_dtype"),
    (3, {"grad_input": meta(24)}, "grad_input.shape"),
    (4, {"grad_gamma": meta(4)}, "grad_gamma.shape"),
    (5, {"grad_beta": meta(1, 3)}, "grad_beta.shape"),
    (6, {"group": 0}, "group.positive"),
    (6, {"group": -1}, "group.positive"),
    (7, {"mean": meta(4), "rstd": meta(4), "group": 2}, "c.multiple_of_group"),
    (8, {"input": meta(2, 3, 5)}, "input.count"),
    (9, {"mean": meta(3)}, "mean.count"),
    (10, {"rstd": meta(2, 2)}, "rstd.count"),
    (11, {"gamma": meta(4)}, "gamma.count"),
]


test_rows_of_161002 = rows_of_161002(EXAMPLE, [(row, changed, [name]) for row, changed, name in ROWS])


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


@pytest.mark.parametrize("sizes", [{"n": -2, "c": -3}, {"hxw": -4}], ids=str)
def test_negative_sizes_are_refused_though_products_may_fit(sizes: dict[str, int]) -> None:
    status, found = EXAMPLE.found(sizes)
    assert (status, set(found)) == (161002, {f"{name}.non_negative" for name in sizes})


def test_sizes_beyond_int64_are_compared_exactly() -> None:
    verdict = EXAMPLE.check({"n": 2**62, "c": 3, "hxw": 2**62})
    assert ids(verdict) == ["grad_out.count", "input.count", "mean.count", "rstd.count"]
    assert f"n*c*hxw = {3 * 2**124} elements" in verdict.violations[0].expected


def test_order_of_codes_is_nulls_first_and_then_that_of_the_checks() -> None:
    wrong = {"grad_out": meta(2, dtype="float64"), "rstd": None, "mean": meta(7), "group": 0}
    status, found = EXAMPLE.found({**wrong, "grad_input": None})
    assert status == 161001
    assert found[:3] == ["rstd.not_null", "grad_input.not_null", "grad_out.dtype"]
    assert found.index("input.same_dtype") < found.index("group.positive") < found.index("grad_out.count")


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16], ids=str)
def test_made_statistics_are_those_of_the_data(dtype: DType) -> None:
    call = RECORD.build(dtype=dtype)
    made = RECORD.make_inputs(call, np.random.default_rng(3))
    data, mean, rstd = (np.asarray(made[name], np.float64) for name in ("input", "mean", "rstd"))
    groups = data.reshape(call.integer("n"), call.integer("group"), -1)
    tolerance = 0.05 if dtype is DType.BFLOAT16 else 0.01
    np.testing.assert_allclose(groups.mean(-1), mean, atol=tolerance, rtol=0)
    np.testing.assert_allclose(groups.std(-1) * rstd, 1, atol=tolerance)
