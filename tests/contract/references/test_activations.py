"""The references of activations and softmax against torch's float64 autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.contract.references.against import Oracle, against

from npugrad.ops.gelu_backward_v2 import GELU_BACKWARD_V2
from npugrad.ops.silu_backward import SILU_BACKWARD
from npugrad.ops.softmax_backward import SOFTMAX_BACKWARD

torch = pytest.importorskip("torch")


def by_autograd(forward: Callable[[Any, Any], Any]) -> Oracle:
    """Differentiates a forward pass of the second operand; the first is the gradient of its result."""

    def oracle(inputs: Any, attrs: Any) -> dict[str, Any]:
        gradient, data = np.broadcast_arrays(*(np.array(a, np.float64) for a in inputs.values()))
        leaf = torch.tensor(data, requires_grad=True)
        out = forward(leaf, attrs)
        if "output" in inputs:
            inputs["output"] = out.detach().numpy()
        return {"grad_input": torch.autograd.grad(out, leaf, torch.tensor(gradient))[0].numpy()}

    return oracle


F = torch.nn.functional
TestSilu = against(SILU_BACKWARD, by_autograd(lambda x, attrs: F.silu(x)))
TestGelu = against(GELU_BACKWARD_V2, by_autograd(lambda x, attrs: F.gelu(x, **attrs)))
TestSoftmax = against(SOFTMAX_BACKWARD, by_autograd(lambda x, attrs: F.softmax(x, attrs["dim"])))
