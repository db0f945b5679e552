"""Signatures: two calls share one if and only if nothing but contents, label and priority differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.client.fake_service import group_norm

from npugrad import OPERATORS, TensorMeta
from npugrad.call import CallOptions
from npugrad.products import Product
from npugrad.recipe import Recipe
from npugrad_client._signature import sign

RECORD = OPERATORS["group_norm_backward"]
INPUTS = [p.name for p in RECORD.inputs]


def key(
    options: CallOptions | None = None,
    out: Any = None,
    product: Product | None = None,
    **changes: Any,
) -> Any:
    """The key of a call; None where there is none."""
    call = {**group_norm(), **changes}
    inputs, attrs = {n: call[n] for n in INPUTS}, {n: v for n, v in call.items() if n not in INPUTS}
    signature = sign(RECORD, inputs, attrs, out, options or CallOptions(), product)
    return None if signature is None else signature[0]


ARRAY = group_norm()["grad_out"]
OTHERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "true": {"n": True},
    "a float": {"n": 2.0},
    "a number of text": {"n": "2"},
    "minus nothing": {"hxw": -0.0},
    "nothing": {"hxw": 0.0},
    "not a number": {"hxw": float("nan")},
    "mask of numbers": {"output_mask": (1, 1, 1)},
    "mask that is a list": {"output_mask": [True, True, True]},
    "no mask": {"output_mask": None},
    "null": {"gamma": None},
    "other null": {"rstd": None},
    "two null": {"gamma": None, "rstd": None},
    "shape": {"grad_out": ARRAY.reshape(-1)},
    "rank": {"grad_out": ARRAY[None]},
    "type": {"grad_out": ARRAY.astype(np.int32)},
    "width": {"grad_out": ARRAY.astype(np.float64)},
    "byte order": {"grad_out": ARRAY.astype(">f4")},
    "transposed": {"grad_out": ARRAY.T},
    "column-major": {"grad_out": np.asfortranarray(ARRAY)},
    "expanded": {"grad_out": np.broadcast_to(np.float32(1), ARRAY.shape)},
    "deterministic": {"options": CallOptions(deterministic=True)},
    "deterministic by number": {"options": CallOptions(deterministic=1)},  # type: ignore[arg-type]
    "verified": {"options": CallOptions(verify=True)},
    "null output": {"out": {"grad_input": None}},
    "other null output": {"out": {"grad_gamma": None}},
    "declared": {"out": {"grad_input": TensorMeta("float32", (2, 4, 8))}},
    "declared with strides": {"out": {"grad_input": TensorMeta("float32", (2, 4, 8), strides=(32, 8, 1))}},
    "declared in a format": {"out": {"grad_input": TensorMeta("float32", (2, 4, 8), "NCL")}},
    "filled": {"out": {"grad_input": np.zeros((2, 4, 8), np.float32)}},
    "filled in another type": {"out": {"grad_input": np.zeros((2, 4, 8), np.float16)}},
    "for a product": {"product": Product.ATLAS_A2},
    "for another product": {"product": Product.ATLAS_A3},
}


def test_what_differs_shares_no_signature() -> None:
    keys = {name: key(**changes) for name, changes in OTHERS.items()}
    assert None not in keys.values()
    for name, changes in OTHERS.items():
        if name != "not a number":
            assert [other for other, found in keys.items() if found == key(**changes)] == [name]


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_out": np.full_like(ARRAY, 7)},
        {"options": CallOptions(label="me")},
        {"options": CallOptions(priority=3)},
    ],
    ids=["contents", "label", "priority"],
)
def test_what_does_not_matter_is_no_part_of_it(changes: dict[str, Any]) -> None:
    assert key(**changes) == key()


class _Mine(np.ndarray[Any, Any]):
    """An array with ideas of its own."""


@pytest.mark.parametrize(
    "changes",
    [
        {"n": np.int64(2)},
        {"output_mask": np.array([True, True, True])},
        {"output_mask": (np.True_, True, True)},
        {"output_mask": ((True,), True, True)},
        {"output_mask": (True,) * 5000},
        {"n": 2**100_000},
        {"n": b"2"},
        {"grad_out": ARRAY.view(_Mine)},
        {"grad_out": np.ma.masked_array(ARRAY)},
        {"grad_out": ARRAY.tolist()},
        {"grad_out": Recipe("normal", shape=ARRAY.shape)},
        {"out": [("grad_input", None)]},
        {"out": {"grad_input": 3}},
        {"out": {"grad_input": ARRAY.view(_Mine)}},
        {"options": CallOptions(deterministic=np.True_)},  # type: ignore[arg-type]
        {"options": CallOptions(priority=np.int64(0))},  # type: ignore[arg-type]
        {"options": CallOptions(priority=True)},
        {"options": CallOptions(label=b"me")},  # type: ignore[arg-type]
    ],
)
def test_what_is_unusual_has_none(changes: dict[str, Any]) -> None:
    assert key(**changes) is None


def test_operators_share_none() -> None:
    records = (RECORD, OPERATORS["layer_norm_backward"])
    found = [sign(record, {"input": ARRAY}, {}, None, CallOptions()) for record in records]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0][0] != found[1][0]
