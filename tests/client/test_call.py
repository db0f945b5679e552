"""A call before it is sent: names, attributes, declared outputs, and what is expected of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.client.fake_service import group_norm

from npugrad import OPERATORS, OpRecord, TensorMeta
from npugrad.call import CallOptions
from npugrad.errors import MalformedRequest
from npugrad.recipe import Recipe
from npugrad.validation import validate_call
from npugrad_client import Client
from npugrad_client._call import Prepared, prepare

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


def test_none_and_a_missing_operand_are_null() -> None:
    call = prepared(gamma=None, mean=None).call
    assert call.inputs["gamma"] is None
    assert call.inputs["mean"] is None
    assert "gamma" not in prepared(gamma=None).contents


LEGAL: list[tuple[str, Any, Any]] = [
    ("interpolation_mode", "bilinear", 0),
    ("interpolation_mode", "nearest", 1),
    ("padding_mode", "zeros", 0),
    ("padding_mode", "border", 1),
    ("padding_mode", "reflection", 2),
    ("padding_mode", np.int64(2), 2),
    ("padding_mode", 7, 7),
    ("output_mask", [True, False], (True, False)),
    ("output_mask", (np.True_, np.False_), (True, False)),
    ("output_mask", np.array([True, False]), (True, False)),
    ("output_mask", None, None),
    *(("n", value, int(value)) for value in (2**63 - 1, -(2**63), np.int32(4), np.uint8(4))),
]


@pytest.mark.parametrize(("name", "given", "expected"), LEGAL)
def test_modes_go_by_name_or_number_masks_as_sequences_and_every_int64_travels(
    name: str, given: Any, expected: Any
) -> None:
    call = prepared(n=given).call if name == "n" else grid_call(**{name: given}).call
    assert call.attrs[name] == expected


MALFORMED: dict[str, tuple[list[Any], str]] = {
    "interpolation_mode": (["bicubic"], r"found 'bicubic'; expected .*'nearest'"),
    "align_corners": ([1, "true", (0, 1)], "found .*; expected True or False"),
    "output_mask": (
        [(1, 0), "10", 3, (True, None)],
        "found .*; expected a sequence of bools or None",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_attribute_is_malformed(name: str) -> None:
    values, message = MALFORMED[name]
    for value in values:
        with pytest.raises(MalformedRequest, match=f"{name}: {message}"):
            grid_call(**{name: value})


def test_what_is_no_int64_is_malformed_and_only_a_mask_may_be_none() -> None:
    for name in ("n", "c", "hxw", "group"):
        no_int64: list[Any] = [2**63, -(2**63) - 1, 2.0, "2", True, (1,)]
        for value in no_int64:
            message = f"group_norm_backward: {name}: found .*expected an integer"
            with pytest.raises(MalformedRequest, match=message):
                prepared(**{name: value})
        with pytest.raises(TypeError, match=f"group_norm_backward: {name}: found None"):
            prepared(**{name: None})
    assert prepared(output_mask=None).call.attrs["output_mask"] is None


def with_options(**options: Any) -> Prepared:
    inputs, attrs = split(RECORD, group_norm())
    return prepare(RECORD, inputs, attrs, None, CallOptions(**options))


def test_options_out_of_range_are_malformed_before_anything_is_sent() -> None:
    for options, message in (
        ({"priority": 101}, "priority: found 101; expected -100 to 100"),
        ({"label": "x" * 65}, "label: found 65 characters"),
        ({"label": "ü"}, "label: found 1 characters"),
    ):
        with pytest.raises(MalformedRequest, match=f"^group_norm_backward: {message}"):
            with_options(**options)


WANTED = {
    "label": "text of at most 64 printable ASCII characters",
    "priority": "an integer from -100 to 100",
    "deterministic": "True or False",
    "verify": "True or False",
}
OF_ANOTHER_TYPE: dict[str, list[Any]] = {
    "label": [3, b"me", None],
    "priority": ["3", 1.0, True, None],
    "deterministic": ["yes"],
    "verify": [None, 3],
}


@pytest.mark.parametrize("name", OF_ANOTHER_TYPE)
def test_an_option_of_another_type_is_named_with_what_is_expected(name: str) -> None:
    client = Client("localhost:1", retry=None)
    for value in OF_ANOTHER_TYPE[name]:
        with pytest.raises(MalformedRequest) as caught:
            client.group_norm_backward(**group_norm(), **{name: value})
        assert str(caught.value) == f"group_norm_backward: {name}: found {value!r}; expected {WANTED[name]}"
        assert (caught.value.operator, caught.value.operand) == ("group_norm_backward", name)


def test_options_may_be_numbers_of_numpy() -> None:
    options: Any = {"deterministic": np.True_, "priority": np.int64(-100), "label": "me", "verify": np.False_}
    assert with_options(**options).options == CallOptions(**options)


def test_out_is_a_mapping_and_a_timeout_is_a_number() -> None:
    inputs, attrs = split(RECORD, group_norm())
    for out in (3, ["grad_input"], "grad_input"):
        found = (
            rf"^group_norm_backward: out: found {type(out).__name__}; expected a mapping of outputs by name$"
        )
        with pytest.raises(TypeError, match=found):
            prepare(RECORD, inputs, attrs, out, CallOptions())  # type: ignore[arg-type]
    for timeout_s in ("3", [3.0]):
        found = (
            rf"^group_norm_backward: timeout_s: found {type(timeout_s).__name__}; expected seconds or None$"
        )
        with pytest.raises(TypeError, match=found):
            Client("localhost:1", retry=None).group_norm_backward(**group_norm(), timeout_s=timeout_s)  # type: ignore[arg-type]


def test_outputs_are_declared_by_a_meta_by_null_or_by_an_array_that_is_kept() -> None:
    meta, array = TensorMeta("float16", (3,), "NCHW"), np.zeros((4, 2), ">f4").T
    found = prepared({"grad_input": meta, "grad_gamma": None, "grad_beta": array})
    declared = {"grad_input": meta, "grad_gamma": None, "grad_beta": TensorMeta("float32", (2, 4))}
    assert dict(found.call.outputs) == declared
    assert found.targets["grad_beta"] is array


def test_an_output_that_is_unknown_or_read_only_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="group_norm_backward: unknown output 'dx'; known are grad_input"):
        prepared({"dx": None})
    array = np.zeros((2, 4, 8), np.float32)
    array.flags.writeable = False
    with pytest.raises(TypeError, match="group_norm_backward: grad_input: found a read-only array in out"):
        prepared({"grad_input": array})


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
