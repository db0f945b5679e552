"""The reference of the negative log likelihood loss against torch float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.references.against import against

from npugrad.ops import get_operator

torch = pytest.importorskip("torch")
RECORD = get_operator("nll_loss_backward")
REDUCTIONS = ("none", "mean", "sum")


def by_autograd(inputs: Any, attrs: Any) -> dict[str, Any]:
    """Puts the total weight of the forward pass into `inputs`."""
    given = {name: torch.from_numpy(np.array(array, np.float64)) for name, array in inputs.items()}
    data, target, weight = given["input"].requires_grad_(), given["target"].long(), given["weight"]
    options = {"ignore_index": attrs["ignore_index"], "reduction": REDUCTIONS[attrs["reduction"]]}
    loss = torch.nn.functional.nll_loss(data, target, weight, **options)
    inputs["total_weight"] = (weight[target] * (target != attrs["ignore_index"])).sum().numpy().reshape(1)
    loss.backward(given["grad_output"].reshape(loss.shape))
    return {"grad_input": data.grad.numpy()}


TestAutograd = against(RECORD, by_autograd)
