"""What the page of aclnnGridSampler3DBackward says of concrete calls, and which side is taken elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.contract.ops.changes import Changes, ids, meta, rows_of_161002

from npugrad import Format, Product, TensorMeta
from npugrad.ops.grid_sampler_3d_backward import GRID_SAMPLER_3D_BACKWARD as RECORD
from npugrad.validation import validate_call

# That of the page's example program.
EXAMPLE = Changes(RECORD, RECORD.build(n=1, c=1, d=1, h=3, w=3, od=1, oh=2, ow=2))
INPUTS = {name: EXAMPLE.call.tensor(name) for name in EXAMPLE.call.inputs}
# Sizes of which no two are alike, so that an axis taken for another one shows.
SHAPES = {"grad_output": (2, 4, 5, 6, 3), "input": (2, 7, 8, 9, 3), "grid": (2, 4, 5, 6, 3)}
LAST = {name: TensorMeta("float32", shape, "NDHWC") for name, shape in SHAPES.items()}


test_row_of_the_page = rows_of_161002(
    EXAMPLE,
    [
        (1, {"grad_output": meta(1, 1, 1, 2, 2, dtype="int32")}, ["grad_output.same_dtype"]),
        (1, EXAMPLE.all_of("int64"), ["input.dtype"]),
        (1, {"input_grad": meta(1, 1, 1, 3, 3, dtype="float64")}, ["input_grad.same_dtype"]),
        (2, {"interpolation_mode": 2}, ["interpolation_mode.choice"]),
        (2, {"padding_mode": -1}, ["padding_mode.choice"]),
        (3, {"input": meta(1, 1, 3, 3)}, ["input.rank"]),
        (3, {"input": meta(2, 1, 1, 3, 3)}, ["grid.batch", "grad_output.batch"]),
        (3, {"grad_output": meta(1, 2, 1, 2, 2)}, ["grad_output.channels"]),
        (3, {"grid": meta(1, 2, 2, 2, 3)}, ["grid.out_depth"]),
        (3, {"grid": meta(1, 1, 3, 2, 3)}, ["grid.out_height"]),
        (3, {"grid": meta(1, 1, 2, 3, 3)}, ["grid.out_width"]),
        (3, {"grid": meta(1, 1, 2, 2, 2)}, ["grid.coordinates"]),
        (3, {"grid_grad": meta(1, 4, 3)}, ["grid_grad.shape"]),
    ],
)


@pytest.mark.parametrize(("axis", "side"), [(2, "depth"), (3, "height"), (4, "width")])
def test_a_volume_without_extent_is_refused_where_the_source_accepts_it(axis: int, side: str) -> None:
    shape = [1, 1, 1, 3, 3]
    shape[axis] = 0
    assert ids(EXAMPLE.check({"input": meta(*shape)})) == [f"input.{side}"]
    (constraint,) = [c for c in RECORD.constraints if c.id == f"input.{side}"]
    assert constraint.vendor_code == "accepts"


@pytest.mark.parametrize("product", Product, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_double_everywhere_and_bfloat16_where_the_product_has_it(product: Product, dtype: str) -> None:
    lacks_it = dtype == "bfloat16" and product is Product.ATLAS_TRAINING
    expected = (161002, ["input.not_bfloat16"]) if lacks_it else (0, [])
    assert EXAMPLE.found(EXAMPLE.all_of(dtype), product) == expected


def test_channels_last_are_read_there_and_stay_there() -> None:
    verdict = EXAMPLE.check(LAST)
    assert verdict.status == 0
    assert verdict.outputs == {"input_grad": LAST["input"], "grid_grad": LAST["grid"]}
    assert EXAMPLE.check({**LAST, "grid": meta(2, 4, 5, 6, 3)}).status == 0
    second = {name: replace(m, format=Format.NCDHW) for name, m in INPUTS.items()}
    assert EXAMPLE.check(second).status == 0
    # The same sizes with channels second do not fit, and a message says how axes are counted.
    plain = {name: meta(*shape) for name, shape in SHAPES.items()}
    assert "grad_output.channels" in ids(EXAMPLE.check(plain))
    wide = TensorMeta("float32", (2, 7, 8, 9, 4), "NDHWC")
    (violation,) = EXAMPLE.check({**LAST, "input": wide}).violations
    assert violation.id == "grad_output.channels"
    assert violation.found == "3 on axis 1 of shape [2, 3, 4, 5, 6], of NDHWC taken as NCDHW"


def test_images_have_one_format_of_three_and_double_has_no_channels_last() -> None:
    for name in INPUTS:
        found = EXAMPLE.formats(name)
        refused = {storage for storage, (_, names) in found.items() if names == [f"{name}.format"]}
        assert refused == set(Format) - {Format.ND, Format.NCDHW, Format.NDHWC}
        assert name == "grid" or "grad_output.same_format" in found[Format.NDHWC][1]
    double = Changes(RECORD, EXAMPLE.call.with_inputs(**LAST)).all_of("float64")
    assert ids(EXAMPLE.check(double)) == ["input.double_format"]


def test_null_mask_succeeds_before_anything_else() -> None:
    wrong = {"grad_output": None, "grid": meta(), "padding_mode": 9, "output_mask": None}
    assert EXAMPLE.found(wrong) == (0, [])


def test_deterministic_up_to_2048_channels_of_narrow_types() -> None:
    for channels, can in ((2048, True), (2049, False)):
        call = RECORD.build(n=1, c=channels, d=1, h=1, w=1, od=1, oh=1, ow=1)
        image = TensorMeta("float32", (1, 1, 1, 1, channels), "NDHWC")
        last = call.with_inputs(input=image, grad_output=image)
        assert validate_call(RECORD, last).status == 0
        assert [RECORD.determinism_check(each, None) is None for each in (call, last)] == [can, can]
    complaint = RECORD.determinism_check(RECORD.build(dtype="float64"), None)
    assert str(complaint).startswith("input: found float64")
