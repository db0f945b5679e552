"""The reference of embeddings against torch float64, and which indices are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.references.against import against

from npugrad.errors import UnsafeIndices
from npugrad.ops import get_operator

torch = pytest.importorskip("torch")
RECORD = get_operator("embedding_dense_backward")


def by_autograd(inputs: Any, attrs: Any) -> dict[str, Any]:
    indices = torch.from_numpy(np.array(inputs["indices"]).astype(np.int64))
    words = attrs["num_weights"]
    grad = torch.from_numpy(np.array(inputs["grad"], np.float64)).reshape(*indices.shape, -1)
    weights = torch.zeros(words, grad.shape[-1], dtype=torch.float64, requires_grad=True)
    padding = attrs["padding_idx"] if attrs["padding_idx"] < words else None
    how = {"padding_idx": padding, "scale_grad_by_freq": attrs["scale_grad_by_freq"]}
    torch.nn.functional.embedding(indices, weights, **how).backward(grad)
    return {"grad_weight": weights.grad.numpy()}


TestAutograd = against(RECORD, by_autograd)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int64", 7), ("int64", -1), ("int8", -128), ("uint8", 255), ("float16", 2.5), ("float64", np.nan)],
)
def test_an_index_beyond_the_words_is_named(dtype: str, value: float) -> None:
    call = RECORD.build(words=(2, 3), num_weights=7)
    indices = np.zeros((2, 3), dtype)
    RECORD.data_check({"indices": indices}, call.attrs)
    indices[1, 2] = value
    words = (
        r"embedding_dense_backward: indices: found a number outside at \[1, 2\]; expected 0 to num_weights"
    )
    with pytest.raises(UnsafeIndices, match=words):
        RECORD.data_check({"indices": indices}, call.attrs)
