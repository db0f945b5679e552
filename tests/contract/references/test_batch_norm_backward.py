"""The BatchNorm reference against torch float64, in training and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.references.against import against

from npugrad.ops import get_operator

torch = pytest.importorskip("torch")
RECORD = get_operator("batch_norm_backward")
NAMES = ("grad_input", "grad_weight", "grad_bias")
_ONES = ("weight", "running_var", "save_invstd")


def tensors(inputs: Any) -> list[Any]:
    """Operands in float64; of those that are null, what the page has in their place."""
    channels = inputs["input"].shape[1]
    values = (np.full(channels, name in _ONES) if array is None else array for name, array in inputs.items())
    return [torch.from_numpy(np.array(array, np.float64)) for array in values]


def by_native_op(inputs: Any, attrs: Any) -> dict[str, Any]:
    native = torch.ops.aten.native_batch_norm_backward
    grads = native(*tensors(inputs), attrs["training"], attrs["eps"], [True] * 3)
    return {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


def by_autograd(inputs: Any, attrs: Any) -> dict[str, Any]:
    """Differentiate torch's forward pass, and put its statistics into `inputs`."""
    gradient, data, weight, mean, var, _, _ = tensors(inputs)
    leaves = data, weight, bias = [t.requires_grad_() for t in (data, weight, torch.zeros_like(weight))]
    running, eps = ((None, None), 1e-3) if attrs["training"] else ((mean, var), attrs["eps"])
    # Not `functional`, which refuses one element a channel, and an eps below 0.
    out = torch.batch_norm(data, weight, bias, *running, attrs["training"], 0.0, eps, False)
    grads = torch.autograd.grad(out, leaves, gradient)
    axes = [axis for axis in range(data.dim()) if axis != 1]
    variance, mean = torch.var_mean(data.detach(), axes, correction=0)
    inputs.update(save_mean=mean.numpy(), save_invstd=(variance + 1e-3).rsqrt().numpy())
    return {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


TestArbitraryStatistics = against(RECORD, by_native_op)
TestStatisticsOfTheForwardPass = against(RECORD, by_autograd, tolerance=1e-9)
