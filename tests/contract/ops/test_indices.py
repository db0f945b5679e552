"""Indices that would lead an operator outside its tensors are refused, and told without their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npugrad.errors import UnsafeIndices
from npugrad.ops import get_operator

WORDS, LABELS = get_operator("embedding_dense_backward"), get_operator("nll_loss_backward")
_INDEX = "found a number outside at [1, 2]; expected 0 to num_weights - 1 = 6"
_CLASS = "found a number outside at [1]; expected 0 to C - 1 = 3"


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int64", 7), ("int64", -1), ("int8", -128), ("uint8", 255), ("float16", 2.5), ("float64", np.nan)],
)
def test_an_index_beyond_the_words(dtype: str, value: float) -> None:
    indices = np.full((2, 3), 6, dtype)
    WORDS.data_check({"indices": indices}, {"num_weights": 7})
    indices[1, 2] = value
    with pytest.raises(UnsafeIndices) as caught:
        WORDS.data_check({"indices": indices}, {"num_weights": 7})
    assert str(caught.value) == f"embedding_dense_backward: indices: {_INDEX}"
    assert (caught.value.reason, caught.value.operand) == ("UNSAFE_INDICES", "indices")


@pytest.mark.parametrize(("target", "ignored"), [(4, -100), (-1, -100), (-100, 2**40), (2**40, 2**40)])
def test_a_target_beyond_the_classes(target: int, ignored: int) -> None:
    inputs: dict[str, Any] = {"input": np.zeros((3, 4)), "target": np.array([0, 3, 1])}
    LABELS.data_check(inputs, {"ignore_index": ignored})
    inputs["target"][1] = target
    with pytest.raises(UnsafeIndices) as caught:
        LABELS.data_check(inputs, {"ignore_index": ignored})
    assert str(caught.value).startswith(f"nll_loss_backward: target: {_CLASS}")
    if abs(target) < 2**31:
        LABELS.data_check(inputs, {"ignore_index": target})
