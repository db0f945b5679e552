"""The reference of embeddings against torch float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.references.against import against

from npugrad.ops import get_operator

torch = pytest.importorskip("torch")
RECORD = get_operator("embedding_dense_backward")


def by_autograd(inputs: Any, attrs: Any) -> dict[str, Any]:
    indices, words = torch.from_numpy(np.array(inputs["indices"], np.int64)), attrs["num_weights"]
    grad = torch.from_numpy(np.array(inputs["grad"], np.float64)).reshape(*indices.shape, -1)
    weights = torch.zeros(words, grad.shape[-1], dtype=torch.float64, requires_grad=True)
    padding = attrs["padding_idx"] if attrs["padding_idx"] < words else None
    how = {"padding_idx": padding, "scale_grad_by_freq": attrs["scale_grad_by_freq"]}
    torch.nn.functional.embedding(indices, weights, **how).backward(grad)
    return {"grad_weight": weights.grad.numpy()}


TestAutograd = against(RECORD, by_autograd)
