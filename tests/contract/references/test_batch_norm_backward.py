"""The BatchNorm reference against torch float64, in training and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.references.against import against

from npugrad.ops import get_operator

torch = pytest.importorskip("torch")
RECORD = get_operator("batch_norm_backward")
ONES = ("weight", "running_var", "save_invstd")


def tensors(inputs: Any) -> list[Any]:
    """In float64; for operands that are null, what the page has in their place."""
    channels = inputs["input"].shape[1]
    given = (np.full(channels, name in ONES) if array is None else array for name, array in inputs.items())
    return [torch.from_numpy(np.array(array, np.float64)) for array in given]


def named(grads: Any) -> dict[str, Any]:
    return {param.name: grad.numpy() for param, grad in zip(RECORD.outputs, grads, strict=True)}


def by_native_op(inputs: Any, attrs: Any) -> dict[str, Any]:
    native = torch.ops.aten.native_batch_norm_backward
    return named(native(*tensors(inputs), attrs["training"], attrs["eps"], [True] * 3))


def by_autograd(inputs: Any, attrs: Any) -> dict[str, Any]:
    """Puts the statistics of torch's forward pass into `inputs`."""
    gradient, data, weight, mean, var, *_ = tensors(inputs)
    leaves = data, weight, bias = [t.requires_grad_() for t in (data, weight, torch.zeros_like(weight))]
    running, eps = ((None, None), 1e-3) if attrs["training"] else ((mean, var), attrs["eps"])
    # Not `functional`, which refuses one element a channel, and an eps below 0.
    out = torch.batch_norm(data, weight, bias, *running, attrs["training"], 0.0, eps, False)
    save = torch.var_mean(data.detach(), [axis for axis in range(data.dim()) if axis != 1], correction=0)
    inputs.update(save_mean=save[1].numpy(), save_invstd=(save[0] + eps).rsqrt().numpy())
    return named(torch.autograd.grad(out, leaves, gradient))


TestArbitraryStatistics = against(RECORD, by_native_op)
TestStatisticsOfTheForwardPass = against(RECORD, by_autograd, tolerance=1e-9)
