"""Calls that the adapters refuse before their forward pass, from types and shapes alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

import npugrad
from npugrad import TensorMeta
from npugrad_client import (
    AsyncClient,
    Client,
    InvalidOperand,
    MalformedRequest,
    NullOperand,
    OperatorError,
    TilingError,
    UnsupportedOperator,
    _legality,
)

NOWHERE = "127.0.0.1:1"
DEFORMABLE = {
    "value": TensorMeta("bfloat16", (2, 47, 2, 8)),
    "spatial_shape": TensorMeta("int64", (2, 2)),
    "level_start_index": TensorMeta("int64", (2,)),
    "location": TensorMeta("bfloat16", (2, 6, 2, 2, 3, 2)),
    "attn_weight": TensorMeta("bfloat16", (2, 6, 2, 2, 3)),
}
FLOYD: Mapping[str, TensorMeta | None] = {
    "query": TensorMeta("float16", (1, 2, 16, 128, 32)),
    "key1": TensorMeta("float16", (1, 2, 16, 256, 32)),
    "value1": TensorMeta("float16", (1, 2, 16, 256, 32)),
    "key2": TensorMeta("float16", (1, 2, 256, 128, 32)),
    "value2": TensorMeta("float16", (1, 2, 256, 128, 32)),
    "atten_mask": TensorMeta("bool", (1, 1, 16, 1, 256)),
}


def test_a_client_is_one() -> None:
    with Client(NOWHERE) as client:
        _legality.require_client("remote", client)
    with pytest.raises(TypeError, match=r"^remote: client: found str; expected a Client$"):
        _legality.require_client("remote", NOWHERE)
    with pytest.raises(TypeError, match="found AsyncClient"):
        _legality.require_client("remote", AsyncClient(NOWHERE))


def test_what_a_product_lacks_is_refused_for_it_alone() -> None:
    rows = TensorMeta("float32", (1, 2, 16, 128, 8))
    query = FLOYD["query"]
    inputs = {**FLOYD, "dy": query, "attention_in": query, "softmax_max": rows, "softmax_sum": rows}
    attrs = {"scale_value": 1.0}
    _legality.require_legal(_legality.FLOYD_ATTENTION, inputs, attrs)
    _legality.require_legal(_legality.FLOYD_ATTENTION, inputs, attrs, "atlas-a3")
    with pytest.raises(UnsupportedOperator):
        _legality.require_legal(_legality.FLOYD_ATTENTION, inputs, attrs, "atlas-training")
    with pytest.raises(MalformedRequest, match="scale_value"):
        _legality.require_legal(_legality.FLOYD_ATTENTION, inputs, {})


def test_attention_is_held_to_what_its_gradient_will_need() -> None:
    _legality.require_legal_deformable_attention(DEFORMABLE)
    grad_output = TensorMeta("bfloat16", (2, 6, 2 * 8))
    verdict = npugrad.validate(
        _legality.DEFORMABLE_ATTENTION, inputs={**DEFORMABLE, "grad_output": grad_output}, attrs={}
    )
    assert not verdict.violations
    for mask in (FLOYD["atten_mask"], None):
        _legality.require_legal_floyd_attention({**FLOYD, "atten_mask": mask}, 0.5)


REFUSED: list[tuple[dict[str, Any], type[OperatorError], str]] = [
    ({"value": TensorMeta("bfloat16", (2, 47, 2, 5))}, InvalidOperand, "value"),
    ({"value": TensorMeta("bfloat16", (2, 47, 16))}, InvalidOperand, "value"),
    ({"location": TensorMeta("bfloat16", ())}, InvalidOperand, "location"),
    ({"attn_weight": TensorMeta("float32", (2, 6, 2, 2, 3))}, InvalidOperand, "attn_weight"),
    ({"query": TensorMeta("float32", (1, 2, 16, 128, 32))}, InvalidOperand, "query"),
    ({"key2": TensorMeta("float16", (1, 2, 128, 128, 32))}, TilingError, "key2"),
    ({"atten_mask": TensorMeta("bool", (1, 1, 16, 256))}, TilingError, "atten_mask"),
    *(({name: None}, NullOperand, name) for name in (*DEFORMABLE, *FLOYD) if name != "atten_mask"),
]


def judge(change: dict[str, Any]) -> None:
    """Of the operator whose operand it is."""
    if change.keys() <= DEFORMABLE.keys():
        _legality.require_legal_deformable_attention({**DEFORMABLE, **change})
    else:
        _legality.require_legal_floyd_attention({**FLOYD, **change}, 0.5)


def test_attention_is_refused_with_the_operand_that_does_not_fit() -> None:
    for change, cls, operand in REFUSED:
        with pytest.raises(cls, match=rf": {operand}.*: found .*; expected") as refused:
            judge(change)
        assert operand in refused.value.violations[0].operands


def test_it_needs_neither_of_the_two_libraries_and_nor_does_a_client() -> None:
    program = """
import sys
import numpy as np
import npugrad_client._legality
assert not npugrad_client._arrays.is_torch(np.zeros(2))
print({"torch", "jax"} & set(sys.modules))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "set()\n"
