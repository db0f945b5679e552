"""What is particular to aclnnMultiScaleDeformableAttentionGrad: two ranks, limits, untrusted levels."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.ops.changes import Changes, ids, meta

from npugrad.dtypes import DType, Format
from npugrad.error_table import INNER_NULLPTR, PARAM_INVALID, PARAM_NULLPTR
from npugrad.errors import UnsafeLevels, UnsupportedOperator
from npugrad.meta import TensorMeta
from npugrad.ops._multi_scale_deformable_attention_grad_data import level_sizes, level_starts
from npugrad.ops.multi_scale_deformable_attention_grad import (
    MULTI_SCALE_DEFORMABLE_ATTENTION_GRAD as RECORD,
)
from npugrad.ops.multi_scale_deformable_attention_grad import build
from npugrad.products import Product
from npugrad.releases import CannRelease
from npugrad.validation import error_from_verdict, validate_call

DEFAULT = Changes(RECORD, build())


def levels(*rows: tuple[int, int, int], keys: int = 16, dtype: Any = np.int64) -> dict[str, Any]:
    """Operands with levels of (height, width, start), as `data_check` looks at them."""
    return {
        "value": np.zeros((1, keys, 1, 8), np.float32),
        "spatial_shape": np.array([row[:2] for row in rows], dtype).reshape(-1, 2),
        "level_start_index": np.array([row[2] for row in rows], dtype),
    }


def complaint(inputs: dict[str, Any]) -> UnsafeLevels | None:
    try:
        RECORD.data_check(inputs, {})
    except UnsafeLevels as error:
        return error
    return None


def test_outputs_start_as_zeros_and_nothing_is_optional() -> None:
    assert all(p.zero_init and p.masked_by is None for p in RECORD.outputs)
    assert not any(p.optional for p in RECORD.inputs)
    assert RECORD.attrs == ()


@pytest.mark.parametrize("shape", [(1, 32, 8), (1, 32, 1, 8)], ids=["A2 edition", "A2/A3 edition"])
def test_both_example_programs_are_legal_and_send_one_shape_to_the_device(shape: tuple[int, ...]) -> None:
    call = build(bs=1, nq=32, nh=1, ch=8, levels=((1, 1),), points=1)
    verdict = Changes(RECORD, call).check({"grad_output": meta(*shape)})
    assert verdict.status == 0
    assert verdict.outputs == {
        "grad_value": meta(1, 1, 1, 8),
        "grad_location": meta(1, 32, 1, 1, 1, 2),
        "grad_attn_weight": meta(1, 32, 1, 1, 1),
    }
    view = RECORD.inputs[5].device_view
    assert view is not None
    assert view(meta(*shape)) == (1, 32, 8)


def test_other_shapes_and_types_are_refused() -> None:
    shapes: dict[str, list[tuple[int, ...]]] = {
        "grad_output.channels": [(2, 3, 15), (2, 3, 8), (2, 3, 1, 16), (2, 3, 8, 2)],
        "grad_output.num_queries": [(2, 4, 16)],
        "grad_output.bs": [(1, 3, 2, 8)],
        "grad_output.rank": [(6, 16), (2, 3, 2, 8, 1)],
    }
    for name, shape in ((name, shape) for name, wrong in shapes.items() for shape in wrong):
        assert DEFAULT.found({"grad_output": meta(*shape)}) == (PARAM_INVALID, [name]), shape
    # Float types are the same, index types may differ.
    narrow = Changes(RECORD, build(dtype="bfloat16", index_dtype="int32"))
    types: list[tuple[dict[str, Any], list[str]]] = [
        ({"attn_weight": meta(2, 3, 2, 2, 2, dtype="float16")}, ["attn_weight.same_dtype"]),
        ({"grad_value": meta(2, 16, 2, 8)}, ["grad_value.same_dtype"]),
        ({"spatial_shape": meta(2, 2, dtype="int64")}, []),
        ({"spatial_shape": meta(2, 2, dtype="uint32")}, ["spatial_shape.dtype"]),
    ]
    for change, expected in types:
        assert narrow.found(change) == (PARAM_INVALID if expected else 0, expected), change


@pytest.mark.parametrize("rank", [3, 4])
def test_limits_are_where_the_documents_put_them(rank: int) -> None:
    limits: list[tuple[dict[str, Any], list[str]]] = [
        ({"ch": 256}, []),
        ({"ch": 264}, ["channels.limit"]),
        ({"ch": 4}, ["channels.multiple"]),
        ({"ch": 257}, ["channels.multiple", "channels.limit"]),
        ({"ch": 0}, []),
        ({"nq": 499_999}, []),
        ({"nq": 500_000}, ["num_queries.limit"]),
        ({"levels": ((1, 1),) * 16}, []),
        ({"levels": ((1, 1),) * 17}, ["num_levels.limit"]),
        ({"nh": 16}, []),
        ({"nh": 17}, ["num_heads.limit"]),
        ({"points": 16}, []),
        ({"points": 17}, ["num_points.limit"]),
    ]
    for sizes, expected in limits:
        assert ids(validate_call(RECORD, build(grad_output_rank=rank, **sizes))) == expected, sizes


def test_only_fractal_nz_is_refused_and_only_on_inputs() -> None:
    for param in (*RECORD.inputs, *RECORD.outputs):
        refused = {Format.FRACTAL_NZ: (161002, [f"{param.name}.format"])} if param.role == "input" else {}
        assert DEFAULT.formats(param.name) == {**dict.fromkeys(Format, (0, [])), **refused}


def test_the_operand_that_fixes_a_size_is_named() -> None:
    violations = Changes(RECORD, build(bs=3)).check({"value": build(bs=2).inputs["value"]}).violations
    assert [v.id for v in violations] == ["location.bs", "attn_weight.bs", "grad_output.bs"]
    assert all(v.operands[1] == "value" for v in violations)
    assert violations[0].found == "3 on axis 0 of shape [3, 3, 2, 2, 2, 2]"
    assert violations[0].expected == "2, as on axis 0 of value"


def test_null_comes_first_then_types_formats_ranks_limits_and_sizes() -> None:
    assert Changes(RECORD, build(ch=4, nh=17)).found({"attn_weight": None, "grad_value": None}) == (
        PARAM_NULLPTR,
        ["attn_weight.not_null", "grad_value.not_null", "channels.multiple", "num_heads.limit"],
    )
    call = build(points=17)
    bad = {
        "location": TensorMeta("int8", call.tensor("location").shape, Format.FRACTAL_NZ),
        "level_start_index": meta(2, 1, dtype="int32"),
        "grad_output": meta(9, 3, 16),
    }
    assert Changes(RECORD, call).found(bad) == (
        PARAM_INVALID,
        [
            "location.same_dtype",
            "location.format",
            "level_start_index.rank",
            "num_points.limit",
            "grad_output.bs",
        ],
    )


def test_atlas_training_lacks_the_operator() -> None:
    verdict = DEFAULT.check(product=Product.ATLAS_TRAINING)
    assert verdict.status == INNER_NULLPTR
    error = error_from_verdict(RECORD, verdict)
    assert type(error) is UnsupportedOperator
    assert error.reason == "OPERATOR_UNSUPPORTED"
    assert "found Atlas training series" in str(error)


# Values: what may be run, and what the record makes up for tests and demos.


@pytest.mark.parametrize(
    ("release", "can"),
    [
        ("8.3.RC1", True),
        ("8.5.0", True),
        ("9.0.0-beta.1", False),
        ("9.0.0", False),
        ("9.1.0", False),
        ("9.2.0-beta.1", False),
        ("9.2.0-beta.2", True),
        ("9.2.0", True),
        (None, False),
    ],
)
def test_deterministic_by_the_pages_of_some_releases(release: str | None, can: bool) -> None:
    found = RECORD.determinism_check(RECORD.build(), CannRelease.parse(release) if release else None)
    assert (found is None) is can
    assert can or f"found True; expected False with CANN {release or 'of unknown release'}" in str(found)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_levels_inside_the_keys_may_be_run(dtype: Any) -> None:
    every: tuple[tuple[tuple[int, int, int], ...], ...] = (
        ((3, 4, 0), (2, 2, 12)),
        ((4, 4, 0), (4, 4, 0)),  # levels may overlap
        ((0, 0, 16), (0, 2**31 - 1, 0)),
        ((1, 16, 0),),
        (),
    )
    for rows in every:
        assert complaint(levels(*rows, dtype=dtype)) is None, rows


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((-1, 4, 0), "negative height"),
        ((4, -1, 0), "negative width"),
        ((-4, -4, 0), "negative height"),
        ((4, 4, -1), "negative start"),
        ((4, 4, 1), "end beyond the keys"),
        ((17, 1, 0), "end beyond the keys"),
        ((0, 0, 17), "end beyond the keys"),
        ((2**31, 0, 0), "height outside int32"),
        ((0, 2**32 + 1, 0), "width outside int32"),
        ((0, 0, 2**40), "start outside int32"),
        ((-(2**31) - 1, 0, 0), "height outside int32"),
        # Products that wrap to something small in 32 and in 64 bits.
        ((2**16, 2**16, 0), "end beyond the keys"),
        ((2**31 - 1, 2**31 - 1, 0), "end beyond the keys"),
        # The example program stores the floats 1.0, 1.0 in an INT32 tensor.
        ((0x3F800000, 0x3F800000, 0), "end beyond the keys"),
    ],
)
def test_levels_that_leave_the_keys_are_refused(row: tuple[int, int, int], expected: str) -> None:
    inputs = levels((4, 4, 0), row)
    error = complaint(inputs)
    assert error is not None
    operands = ["spatial_shape"] * ("start" not in expected) + ["level_start_index"] * ("end" in expected)
    operands = operands or ["level_start_index"]
    assert (error.operator, error.operand, error.reason) == (RECORD.name, operands[0], "UNSAFE_LEVELS")
    found = str(error)
    assert found.startswith(f"{RECORD.name}: {', '.join(operands)}: level 1: found a")
    assert expected in found
    # A message never shows what a tensor holds; the number of keys is a size.
    assert not {str(abs(number)) for number in row if abs(number) > 17} & set(found.replace(";", " ").split())
    for reference in (RECORD.reference, *RECORD.references_by_rule.values()):
        with pytest.raises(UnsafeLevels, match=f"^{re.escape(found)}$"):
            reference(inputs, {}, {})


def test_a_level_beyond_int32_is_refused_whatever_the_value_tensor_holds() -> None:
    inputs = levels((2**16, 2**15, 0))
    inputs["value"] = np.broadcast_to(np.float32(0), (1, 2**33, 1, 8))
    assert "end beyond the keys" in str(complaint(inputs))
    inputs["spatial_shape"][0, 1] -= 1
    assert complaint(inputs) is None


def test_each_index_tensor_is_read_once() -> None:
    """Memory shared with a caller may change between two looks; the check takes one."""

    class Shared:
        def __init__(self, array: Any) -> None:
            self.array, self.reads = array, 0

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            self.reads += 1
            return np.array(self.array if self.reads == 1 else self.array + 2**30, dtype)

    inputs = levels((3, 4, 0), (2, 2, 12))
    shared = {name: Shared(inputs[name]) for name in ("spatial_shape", "level_start_index")}
    assert complaint({**inputs, **shared}) is None
    assert [array.reads for array in shared.values()] == [1, 1]


@given(num_keys=st.integers(0, 20_000), num_levels=st.integers(0, 16))
def test_made_up_levels_fill_the_keys(num_keys: int, num_levels: int) -> None:
    sizes = level_sizes(num_keys, num_levels)
    assert len(sizes) == num_levels
    assert sum(h * w for h, w in sizes) == (num_keys if num_levels else 0)
    rows = [(*size, start) for size, start in zip(sizes, level_starts(sizes), strict=True)]
    assert complaint(levels(*rows, keys=num_keys)) is None


def test_made_up_levels_are_a_pyramid() -> None:
    assert level_sizes(16 * 16 + 8 * 8 + 4 * 4 + 2 * 2, 4) == ((16, 16), (8, 8), (4, 4), (2, 2))


def test_made_up_weights_add_up_to_one() -> None:
    for sample in RECORD.samples(Product.ATLAS_A2):
        weights = RECORD.make_inputs(sample.call, np.random.default_rng(5))["attn_weight"]
        assert weights is not None
        sums = weights.astype(np.float64).sum(axis=(-2, -1)) if weights.size else np.ones(1)
        limit = 0.02 if sample.call.tensor("value").dtype is not DType.FLOAT32 else 1e-5
        assert np.abs(sums - 1).max() < limit, sample.name


def test_most_made_up_locations_are_inside_and_some_are_not() -> None:
    made = RECORD.make_inputs(build(nq=500), np.random.default_rng(6))
    location = made["location"]
    assert location is not None
    inside = ((location >= 0) & (location <= 1)).all(axis=-1).mean()
    assert 0.4 < inside < 0.9
