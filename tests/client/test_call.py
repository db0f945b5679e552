"""A call before it is sent and after it came back: names, attributes, declared outputs, and filling them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.client.fake_service import INFO, group_norm

from npugrad import OPERATORS, OpRecord, TensorMeta
from npugrad.call import CallOptions
from npugrad.errors import MalformedRequest
from npugrad.recipe import Recipe
from npugrad.validation import validate_call
from npugrad_client import Client
from npugrad_client._call import Answer, Prepared, finish, prepare

RECORD = OPERATORS["group_norm_backward"]
GRID = OPERATORS["grid_sampler_2d_backward"]


def split(record: OpRecord, call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [p.name for p in record.inputs]
    return {n: call.get(n) for n in names}, {n: v for n, v in call.items() if n not in names}


def prepared(out: dict[str, Any] | None = None, **changes: Any) -> Prepared:
    inputs, attrs = split(RECORD, {**group_norm(), **changes})
    return prepare(RECORD, inputs, attrs, out, CallOptions())


def grid_call(**changes: Any) -> Prepared:
    shapes = {"grad_output": (1, 2, 3, 3), "input": (1, 2, 4, 4), "grid": (1, 3, 3, 2)}
    attrs = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": False, "output_mask": (True, True)}
    inputs = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return prepare(GRID, inputs, {**attrs, **changes}, None, CallOptions())


# ------------------------------------------------------------------------------------------ attributes


def test_none_and_a_missing_operand_are_null() -> None:
    call = prepared(gamma=None, mean=None).call
    assert call.inputs["gamma"] is None
    assert call.inputs["mean"] is None
    assert "gamma" not in prepared(gamma=None).contents


@pytest.mark.parametrize(
    ("name", "given", "number"),
    [
        ("interpolation_mode", "bilinear", 0),
        ("interpolation_mode", "nearest", 1),
        ("padding_mode", "zeros", 0),
        ("padding_mode", "border", 1),
        ("padding_mode", "reflection", 2),
        ("padding_mode", np.int64(2), 2),
        ("padding_mode", 7, 7),
    ],
)
def test_modes_go_by_name_or_number(name: str, given: Any, number: int) -> None:
    assert grid_call(**{name: given}).call.attrs[name] == number


def test_an_unknown_mode_names_those_there_are() -> None:
    with pytest.raises(MalformedRequest, match=r"interpolation_mode: found 'bicubic'; expected .*'nearest'"):
        grid_call(interpolation_mode="bicubic")


@pytest.mark.parametrize("name", ["n", "c", "hxw", "group"])
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2.0, "2", True, (1,)])
def test_what_is_no_int64_is_malformed(name: str, value: Any) -> None:
    with pytest.raises(MalformedRequest, match=f"group_norm_backward: {name}: found .*expected an integer"):
        prepared(**{name: value})


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), np.int32(4), np.uint8(4)])
def test_every_int64_travels(value: Any) -> None:
    assert prepared(n=value).call.attrs["n"] == int(value)


@pytest.mark.parametrize("value", [1, "true", (0, 1)])
def test_what_is_no_bool_is_malformed(value: Any) -> None:
    with pytest.raises(MalformedRequest, match=r"align_corners: found .*; expected True or False"):
        grid_call(align_corners=value)


@pytest.mark.parametrize("value", [(1, 0), "10", 3, (True, None)])
def test_what_is_no_mask_is_malformed(value: Any) -> None:
    with pytest.raises(
        MalformedRequest, match=r"output_mask: found .*; expected a sequence of bools or None"
    ):
        grid_call(output_mask=value)


@pytest.mark.parametrize("value", [[True, False], (np.True_, np.False_), np.array([True, False])])
def test_any_sequence_of_bools_is_a_mask(value: Any) -> None:
    assert grid_call(output_mask=value).call.attrs["output_mask"] == (True, False)


def test_only_the_mask_may_be_none() -> None:
    assert prepared(output_mask=None).call.attrs["output_mask"] is None
    for name in ("n", "c", "hxw", "group"):
        with pytest.raises(TypeError, match=f"group_norm_backward: {name}: found None"):
            prepared(**{name: None})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CallOptions(priority=101), "priority: found 101; expected -100 to 100"),
        (CallOptions(label="x" * 65), "label: found 65 characters"),
        (CallOptions(label="ü"), "label: found 1 characters"),
    ],
)
def test_options_out_of_range_are_malformed_before_anything_is_sent(
    options: CallOptions, message: str
) -> None:
    inputs, attrs = split(RECORD, group_norm())
    with pytest.raises(MalformedRequest, match=f"^group_norm_backward: {message}"):
        prepare(RECORD, inputs, attrs, None, options)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("label", 3, "3"),
        ("label", b"me", "b'me'"),
        ("label", None, "None"),
        ("priority", "3", "'3'"),
        ("priority", 1.0, "1.0"),
        ("priority", True, "True"),
        ("priority", None, "None"),
        ("deterministic", "yes", "'yes'"),
        ("verify", None, "None"),
        ("verify", 3, "3"),
    ],
)
def test_an_option_of_another_type_is_named_with_what_is_expected(name: str, value: Any, found: str) -> None:
    wanted = {
        "label": "text of at most 64 printable ASCII characters",
        "priority": "an integer from -100 to 100",
    }
    message = f"group_norm_backward: {name}: found {found}; expected {wanted.get(name, 'True or False')}"
    client = Client("localhost:1", retry=None)
    with pytest.raises(MalformedRequest) as caught:
        client.group_norm_backward(**group_norm(), **{name: value})
    assert str(caught.value) == message
    assert (caught.value.operator, caught.value.operand) == ("group_norm_backward", name)


def test_options_may_be_numbers_of_numpy() -> None:
    inputs, attrs = split(RECORD, group_norm())
    options = CallOptions(np.True_, np.int64(-100), "me", np.False_)  # type: ignore[arg-type]
    assert prepare(RECORD, inputs, attrs, None, options).options == options


@pytest.mark.parametrize("out", [3, ["grad_input"], "grad_input"])
def test_declared_outputs_are_a_mapping(out: Any) -> None:
    inputs, attrs = split(RECORD, group_norm())
    message = (
        rf"^group_norm_backward: out: found {type(out).__name__}; expected a mapping of outputs by name$"
    )
    with pytest.raises(TypeError, match=message):
        prepare(RECORD, inputs, attrs, out, CallOptions())


@pytest.mark.parametrize("timeout_s", ["3", [3.0]])
def test_a_timeout_is_a_number(timeout_s: Any) -> None:
    found = type(timeout_s).__name__
    message = rf"^group_norm_backward: timeout_s: found {found}; expected seconds or None$"
    client = Client("localhost:1", retry=None)
    with pytest.raises(TypeError, match=message):
        client.group_norm_backward(**group_norm(), timeout_s=timeout_s)


# ------------------------------------------------------------------------------------ declared outputs


def test_metas_and_null_are_declared_as_they_are() -> None:
    meta = TensorMeta("float16", (3,), "NCHW")
    call = prepared({"grad_input": meta, "grad_gamma": None}).call
    assert dict(call.outputs) == {"grad_input": meta, "grad_gamma": None}


def test_an_array_is_declared_by_its_meta_and_kept() -> None:
    array = np.zeros((4, 2), ">f4").T
    found = prepared({"grad_input": array})
    assert dict(found.call.outputs) == {"grad_input": TensorMeta("float32", (2, 4))}
    assert found.targets["grad_input"] is array


def test_an_unknown_output_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="group_norm_backward: unknown output 'dx'; known are grad_input"):
        prepared({"dx": None})


def test_a_read_only_array_in_out_is_a_type_error() -> None:
    array = np.zeros((2, 4, 8), np.float32)
    array.flags.writeable = False
    with pytest.raises(TypeError, match="group_norm_backward: grad_input: found a read-only array in out"):
        prepared({"grad_input": array})


# ------------------------------------------------------------------------------------- what is expected


def large(**changes: Any) -> Prepared:
    return prepared(**{**group_norm(n=4, c=8, hxw=1024, group=2), **changes})


def sent_bytes(call: Prepared) -> int:
    return sum(content.nbytes for content in call.contents.values() if isinstance(content, memoryview))


def test_recipes_count_as_nothing_that_is_sent() -> None:
    found = large(input=Recipe("normal", shape=(4, 8, 1024)), output_mask=(False, True, False))
    assert found.nbytes == sent_bytes(found) < 2 * 4 * 8 * 1024 * 4
    assert found.contents["input"] == Recipe("normal", shape=(4, 8, 1024))


def test_outputs_are_inferred_for_all_but_small_calls() -> None:
    assert not prepared().expected
    found = large()
    assert found.expected == validate_call(RECORD, found.call).outputs
    assert found.nbytes == sent_bytes(found)


def test_an_expanded_call_counts_what_comes_back() -> None:
    expanded = np.broadcast_to(np.float32(1), (4, 8, 1024))
    found = large(grad_out=expanded, input=expanded)
    assert sent_bytes(found) < 1024
    assert found.nbytes == 4 * 8 * 1024 * 4 + 2 * 8 * 4


def test_a_call_that_no_product_takes_is_known_to_be_refused() -> None:
    assert large(group=0).is_refused
    assert not large().is_refused
    assert not large(group=0).expected


def test_a_call_that_another_product_takes_is_not_refused_here() -> None:
    """C / group above 8000 is a limit of the A2 series only."""
    call = group_norm(n=1, c=8001, hxw=2, group=1)
    inputs, attrs = split(RECORD, call)
    found = prepare(RECORD, inputs, attrs, None, CallOptions())
    assert validate_call(RECORD, found.call).status == 161002
    assert not found.is_refused
    assert found.expected["grad_gamma"] == TensorMeta("float32", (8001,))


# ---------------------------------------------------------------------------------------- what came back


def finished(found: Prepared, arrays: dict[str, Any], out: dict[str, Any] | None = None) -> dict[str, Any]:
    inputs, _ = split(RECORD, group_norm())
    return finish(found, Answer(arrays, INFO), inputs, out)


def test_results_are_the_arrays_that_came() -> None:
    arrays = {"grad_input": np.ones(2), "grad_gamma": None, "grad_beta": np.zeros(1)}
    assert finished(prepared(), arrays) == arrays


@pytest.mark.parametrize(
    "target",
    [
        np.zeros((2, 4, 8), np.float32),
        np.zeros((8, 4, 2), np.float32).T,
        np.zeros((2, 4, 16), ">f4")[..., ::-2],
    ],
    ids=["contiguous", "transposed", "big-endian, reversed"],
)
def test_arrays_in_out_are_filled_and_returned(target: Any) -> None:
    values = np.arange(64, dtype=np.float32).reshape(2, 4, 8)
    out = {"grad_input": target}
    results = finished(prepared(out), {"grad_input": values}, out)
    assert results["grad_input"] is target
    np.testing.assert_array_equal(target, values)


def test_a_masked_out_array_stays_as_it_is_and_is_answered_by_none() -> None:
    target = np.full((2, 4, 8), 7, np.float32)
    out = {"grad_input": target}
    assert finished(prepared(out), {"grad_input": None}, out) == {"grad_input": None}
    assert (target == 7).all()


def unused_input(value: Any, **changes: Any) -> Prepared:
    shapes = {"grad_output": (1, 4, 3, 3), "grid": (1, 3, 3, 2)}
    attrs = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": False, "output_mask": (True, False)}
    inputs = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return prepare(GRID, {**inputs, "input": value}, {**attrs, **changes}, None, CallOptions())


def test_an_operand_that_no_result_depends_on_travels_as_one_repeated_0() -> None:
    large = np.ones((1, 4, 128, 128), np.float32)
    sent = unused_input(large)
    assert sent.call.inputs["input"] == TensorMeta("float32", large.shape, strides=(0, 0, 0, 0))
    assert sent.contents["input"] == memoryview(bytes(4))
    assert sent.expected == GRID.infer(sent.call)
    for whole in (
        unused_input(large, output_mask=(True, True)),
        unused_input(large, padding_mode=7),  # refused by the server, which is to see what was given
    ):
        assert whole.call.inputs["input"] == TensorMeta("float32", large.shape)
        assert whole.contents["input"] == memoryview(large.tobytes())
