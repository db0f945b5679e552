"""What the page of aclnnGridSampler2DBackward says of concrete calls, and which side is taken elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.ops.changes import Changes, ids, meta, rows_of_161002

from npugrad import CallMeta, Format, Product
from npugrad.ops.grid_sampler_2d_backward import GRID_SAMPLER_2D_BACKWARD as RECORD

# That of the page's example program.
EXAMPLE = Changes(RECORD, RECORD.build(n=1, c=1, h=5, w=8, oh=3, ow=3))


def test_any_format() -> None:
    for name in (*EXAMPLE.call.inputs, "input_grad", "grid_grad"):
        assert EXAMPLE.formats(name) == dict.fromkeys(Format, (0, []))


def test_null_mask_succeeds_before_anything_else() -> None:
    wrong = {"grad_output": None, "input": meta(0, dtype="int32"), "grid": meta(), "output_mask": None}
    modes = {"interpolation_mode": 7, "padding_mode": -1}
    verdict = EXAMPLE.check({**wrong, **modes, "input_grad": None, "grid_grad": meta(3, dtype="bool")})
    assert (verdict.status, verdict.violations) == (0, ())
    assert verdict.outputs == {"input_grad": None, "grid_grad": None}
    call = RECORD.build(output_mask=None)
    assert [constraint.id for constraint in RECORD.constraints if constraint.violate(call) is not None] == []
    made = RECORD.make_inputs(call.with_inputs(grid=None), np.random.default_rng(0))
    assert made["grid"] is None


# Row of the page's 161002 list, the change that breaks it, and the constraints that say so.
ROWS: list[tuple[int, dict[str, Any], list[str]]] = [
    (1, {"grad_output": meta(1, 1, 3, 3, dtype="int32")}, ["grad_output.same_dtype"]),
    (1, {"grid": meta(1, 3, 3, 2, dtype="float16")}, ["grid.same_dtype"]),
    (1, dict(EXAMPLE.all_of("int64")), ["input.dtype"]),
    (1, dict(EXAMPLE.all_of("float64")), ["input.not_double"]),
    (2, {"grad_output": meta(1, 1, 9)}, ["grad_output.rank"]),
    (2, {"input": meta(1, 1, 5, 8, 1)}, ["input.rank"]),
    (2, {"grid": meta()}, ["grid.rank"]),
    (3, {"interpolation_mode": -1}, ["interpolation_mode.choice"]),
    (3, {"interpolation_mode": 2}, ["interpolation_mode.not_bicubic"]),
    (3, {"interpolation_mode": 2**63 - 1}, ["interpolation_mode.choice"]),
    (3, {"padding_mode": 3}, ["padding_mode.choice"]),
    (3, {"padding_mode": -1}, ["padding_mode.choice"]),
    (4, {"grid": meta(2, 3, 3, 2)}, ["grid.batch"]),
    (4, {"grad_output": meta(0, 1, 3, 3)}, ["grad_output.batch"]),
    (4, {"input": meta(2, 1, 5, 8)}, ["grid.batch", "grad_output.batch"]),
    (5, {"grad_output": meta(1, 2, 3, 3)}, ["grad_output.channels"]),
    (6, {"grid": meta(1, 4, 3, 2)}, ["grid.out_height"]),
    (7, {"grid": meta(1, 3, 4, 2)}, ["grid.out_width"]),
    (8, {"input": meta(1, 1, 0, 8)}, ["input.height"]),
    (8, {"input": meta(1, 1, 5, 0)}, ["input.width"]),
    (8, {"input": meta(1, 1, 0, 0)}, ["input.height", "input.width"]),
    (9, {"grid": meta(1, 3, 3, 3)}, ["grid.coordinates"]),
    (9, {"grid": meta(1, 3, 3, 0)}, ["grid.coordinates"]),
    (10, {"input_grad": meta(1, 1, 8, 5)}, ["input_grad.shape"]),
    (10, {"grid_grad": meta(1, 9, 2)}, ["grid_grad.shape"]),
    (1, {"input_grad": meta(1, 1, 5, 8, dtype="float16")}, ["input_grad.same_dtype"]),
    (1, {"grid_grad": meta(1, 3, 3, 2, dtype="int8")}, ["grid_grad.same_dtype"]),
]


test_row_of_the_page = rows_of_161002(EXAMPLE, ROWS)


@pytest.mark.parametrize("product", list(Product), ids=str)
def test_bfloat16_where_the_product_has_it_and_double_nowhere(product: Product) -> None:
    has_it = product is not Product.ATLAS_TRAINING
    expected = (0, []) if has_it else (161002, ["input.dtype"])
    assert EXAMPLE.found(EXAMPLE.all_of("bfloat16"), product) == expected
    assert EXAMPLE.found(EXAMPLE.all_of("float64"), product) == (161002, ["input.not_double"])


def test_masks_of_another_length_and_what_is_checked_although_nothing_is_wanted() -> None:
    for mask in ((), (True,), (True, True, True)):
        assert EXAMPLE.found({"output_mask": mask}) == (161002, ["output_mask.length"])
    nothing = {"output_mask": (False, False)}
    wrong = {"input_grad": meta(2, dtype="int8"), "grid_grad": meta(1, 3, 3, 2)}
    expected = ["input_grad.same_dtype", "input_grad.shape"]
    assert EXAMPLE.found({**nothing, **wrong}) == (161002, expected)
    assert EXAMPLE.found({**nothing, "grid": meta(1, 9, 2)}) == (161002, ["grid.rank"])


def test_null_comes_first_then_the_rows_in_order() -> None:
    names = ("grad_output", "input", "grid", "input_grad", "grid_grad")
    assert EXAMPLE.found(dict.fromkeys(names)) == (161001, [f"{name}.not_null" for name in names])
    verdict = EXAMPLE.check(
        {
            "grad_output": meta(3, 2, 4, 5, dtype="int32"),
            "input": meta(2, 1, 0, 0),
            "grid": meta(1, 3, 3, 3),
            **{"interpolation_mode": 2, "padding_mode": 9, "output_mask": (True,)},
            **{"input_grad": meta(7, dtype="bool"), "grid_grad": None},
        }
    )
    assert verdict.status == 161001
    assert verdict.outputs == {}
    assert ids(verdict) == [
        "grid_grad.not_null",
        *("grad_output.same_dtype", "input_grad.same_dtype"),
        *("interpolation_mode.not_bicubic", "padding_mode.choice"),
        *("grid.batch", "grad_output.batch", "grad_output.channels", "input.height", "input.width"),
        *("grid.out_height", "grid.out_width", "grid.coordinates", "input_grad.shape", "output_mask.length"),
    ]


@pytest.mark.parametrize(
    ("constraint_id", "vendor_code"),
    [
        ("input.not_double", "accepts"),
        ("interpolation_mode.not_bicubic", "accepts"),
        ("output_mask.length", 161002),
    ],
)
def test_where_page_and_source_differ_both_are_named(constraint_id: str, vendor_code: int | str) -> None:
    (constraint,) = [c for c in RECORD.constraints if c.id == constraint_id]
    assert (constraint.code, constraint.vendor_code) == (161002, vendor_code)
    assert all(word in constraint.pick for word in ("The document", "vendor's source", "npugrad:"))


def test_outputs_are_allocated_although_masked_out_and_what_is_accumulated_starts_as_zeros() -> None:
    assert [(p.name, p.masked_by, p.when_masked, p.zero_init) for p in RECORD.outputs] == [
        ("input_grad", 0, "allocate", True),
        ("grid_grad", 1, "allocate", False),
    ]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (RECORD.build(c=0), None),
        (RECORD.build(c=2048), None),
        (RECORD.build(c=2049), "found 2049 channels; expected at most 2048"),
        (RECORD.build(dtype="float64"), "input: found float64"),
        (RECORD.build(output_mask=None).with_inputs(**dict.fromkeys(EXAMPLE.call.inputs)), None),
    ],
    ids=["no channel", "2048", "2049", "float64", "nothing computed"],
)
def test_deterministic_up_to_2048_channels_of_narrow_types(call: CallMeta, complaint: str | None) -> None:
    found = RECORD.determinism_check(call, None)
    assert found is None if complaint is None else complaint in str(found)


def test_made_points_are_inside_outside_and_on_the_border() -> None:
    grid = RECORD.make_inputs(RECORD.build(oh=200, ow=200), np.random.default_rng(0))["grid"]
    assert grid is not None
    beyond, border = np.abs(grid) > 1, np.abs(grid) == 1
    inside = (np.abs(grid) < 1).all(axis=-1)
    assert inside.mean() > 0.75
    assert 0.02 < beyond.mean() < 0.1
    assert 0.02 < border.mean() < 0.1
