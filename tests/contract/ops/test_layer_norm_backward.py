"""What the page of aclnnLayerNormBackward says of concrete calls, and which side is taken elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.ops.changes import Changes, ids, meta
from tests.operators import LAYER_NORM as RECORD

from npugrad import Format, Product
from npugrad.validation import validate_call

EXAMPLE = Changes(RECORD, RECORD.build(leading=(2, 6), normalized=(5,)))
TRAINING = Product.ATLAS_TRAINING
BFLOAT16 = "bfloat16"
MASKED = (True, True, False)
BARE = {"weight": None, "bias": None}


def typed(**dtypes: str) -> dict[str, Any]:
    """Inputs of these types; `others` for those that are not named."""
    others = dtypes.pop("others", "float32")
    named = {name: EXAMPLE.all_of(dtype)[name] for name, dtype in dtypes.items()}
    return {**EXAMPLE.all_of(others), **named}


def test_gradients_of_the_scale_have_its_type_and_the_normalised_shape() -> None:
    mixed = EXAMPLE.check(typed(grad_out=BFLOAT16, input=BFLOAT16)).outputs
    assert mixed == {
        "grad_input": meta(2, 6, 5, dtype=BFLOAT16),
        "grad_weight": meta(5),
        "grad_bias": meta(5),
    }
    bias_alone = EXAMPLE.check({**typed(others="float16"), "weight": None, "bias": meta(5)}).outputs
    assert bias_alone["grad_bias"] == meta(5, dtype="float16")


# Row of the checks in the order of the source; what is changed, and who says so, empty where nobody does.
ROWS: list[tuple[int, dict[str, Any], list[str]]] = [
    (1, {"output_mask": None}, ["output_mask.not_null"]),
    (1, {"normalized_shape": None}, ["normalized_shape.not_null"]),
    (2, {"output_mask": (True,) * 4}, ["output_mask.length"]),
    (2, {"output_mask": (), "grad_bias": None}, ["output_mask.length"]),
    (3, {"grad_bias": None}, ["grad_bias.not_null"]),
    (3, {"grad_bias": None, "output_mask": MASKED}, []),
    (4, typed(others="float64"), ["input.dtype", "mean.dtype", "rstd.dtype", "bias.dtype"]),
    (5, typed(grad_out="float16"), ["grad_out.same_dtype"]),
    (6, typed(weight="float16", bias="float16"), ["weight.same_dtype"]),
    (6, typed(others="float16", weight="float32", bias="float32"), []),
    (7, typed(others="float16", weight="float32"), ["bias.same_dtype"]),
    (7, {**typed(others="float16", bias=BFLOAT16), "weight": None}, ["bias.same_dtype"]),
    (8, typed(mean="float16", rstd="float16"), ["mean.width"]),
    (8, typed(others="float16", mean=BFLOAT16), ["rstd.same_dtype"]),
    (8, typed(others="float16", mean=BFLOAT16, rstd=BFLOAT16), []),
    (9, {"grad_bias": meta(9, dtype="int8"), "output_mask": MASKED}, ["grad_bias.dtype"]),
    (9, {"grad_input": meta(9), "output_mask": (False, True, True)}, []),
    (10, {"grad_weight": meta(5, dtype="float16")}, ["grad_weight.same_dtype"]),
    (11, {"rstd": meta(2, 6, *(1,) * 7)}, ["rstd.rank"]),
    (11, {"normalized_shape": (1,) * 9}, ["normalized_shape.length"]),
    (12, {"weight": meta()}, ["weight.rank"]),
    (13, {"normalized_shape": ()}, ["normalized_shape.length"]),
    (14, {"normalized_shape": (1, 2, 6, 5), **BARE}, ["input.axes"]),
    (15, {"normalized_shape": (4,), **BARE}, ["input.normalized"]),
    (16, {"weight": meta(6)}, ["weight.shape"]),
    (16, {"bias": meta(1, 5)}, ["bias.shape"]),
    (17, {"grad_out": meta(2, 5, 6)}, ["grad_out.shape"]),
    (18, {"rstd": meta(12)}, ["rstd.shape"]),
    (19, {"mean": meta(12), "rstd": meta(12)}, []),
    (19, {"mean": meta(2, 6, 2)}, ["mean.count"]),
    (20, {"grad_input": meta(60)}, ["grad_input.shape"]),
    (21, {"grad_bias": meta(1, 5)}, ["grad_bias.shape"]),
    (22, {"output_mask": (False,) * 3}, []),
    (22, {"output_mask": (False,) * 3, "weight": meta(6)}, ["weight.shape"]),
]  # fmt: skip


def test_rows_of_the_table_of_checks() -> None:
    for row, changed, expected in ROWS:
        status = 161001 if expected and expected[0].endswith("not_null") else 161002
        assert EXAMPLE.found(changed) == (status if expected else 0, expected), (row, changed)


@pytest.mark.parametrize(
    "sizes", [{"leading": (0, 3)}, {"normalized": (2, 0)}, {"leading": (), "normalized": (0,)}]
)
def test_row_23_empty_operands_are_accepted(sizes: dict[str, Any]) -> None:
    assert validate_call(RECORD, RECORD.build(**sizes)).status == 0


def test_bfloat16_is_not_for_the_training_series_in_any_tensor() -> None:
    masked = {"grad_input": meta(9, dtype=BFLOAT16), "output_mask": (False, True, True)}
    for changed in (typed(others=BFLOAT16), masked):
        assert EXAMPLE.check(changed).status == 0
        assert ids(EXAMPLE.check(changed, TRAINING)) == ["input.not_bfloat16"]


def test_other_formats_than_nd_are_refused() -> None:
    for name in (*EXAMPLE.call.inputs, *(param.name for param in RECORD.outputs)):
        refused = dict.fromkeys(Format, (161002, [f"{name}.format"]))
        assert EXAMPLE.formats(name) == {**refused, Format.ND: (0, [])}


# normalized_shape against input (2, 6, 5, 6), and whether the vendor's source lets it pass.
@pytest.mark.parametrize(
    ("shape", "mask", "accepts"),
    [
        ((7, 8), (True, False, False), True),  # none of two entries, as input has two axes more
        ((7, 8), (True, True, False), False),  # the wanted gradient has 30 elements
        ((6, 5), (True, True, True), True),  # and here as well
        ((7, 5, 6), (True, False, False), True),  # the first entry is never compared
        ((6, 5, 7), (True, False, False), False),
        ((2, 6, 5, 7), (False, False, True), False),  # all are
    ],
)
def test_row_15_what_the_vendor_compares(
    shape: tuple[int, ...], mask: tuple[bool, ...], accepts: bool
) -> None:
    call = RECORD.build(
        leading=(2, 6), normalized=(5, 6), with_weight=False, with_bias=False, output_mask=mask
    )
    call = call.with_attrs(normalized_shape=shape)
    rows = meta(*((2,) if len(shape) == 3 else (2, 6) if len(shape) == 2 else (1,)))
    call = call.with_inputs(mean=rows, rstd=rows)
    (violation,) = validate_call(RECORD, call).violations
    (rule,) = [c for c in RECORD.constraints if c.id == violation.id == "input.normalized"]
    assert rule.vendor_status(call) == (0 if accepts else 161002)
