"""The reference of the negative log likelihood against torch float64, and which targets are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.references.against import against

from npugrad.errors import UnsafeIndices
from npugrad.ops import get_operator

torch = pytest.importorskip("torch")
RECORD = get_operator("nll_loss_backward")
REDUCTIONS = ("none", "mean", "sum")


def by_autograd(inputs: Any, attrs: Any) -> dict[str, Any]:
    """Puts the total weight of the forward pass into `inputs`."""
    given = {name: torch.from_numpy(np.array(array, np.float64)) for name, array in inputs.items()}
    data, target = given["input"].requires_grad_(), given["target"].long()
    options = {"ignore_index": attrs["ignore_index"], "reduction": REDUCTIONS[attrs["reduction"]]}
    loss = torch.nn.functional.nll_loss(data, target, given["weight"], **options)
    is_counted = (target != attrs["ignore_index"]).double()
    total = (given["weight"][target.clamp(min=0)] * is_counted).sum()
    inputs["total_weight"] = total.numpy().reshape(1)
    loss.backward(given["grad_output"].reshape(loss.shape))
    return {"grad_input": data.grad.numpy()}


def by_native_op(inputs: Any, attrs: Any) -> dict[str, Any]:
    given = {name: torch.from_numpy(np.array(array, np.float64)) for name, array in inputs.items()}
    given |= {"target": given["target"].long(), **attrs}
    return {
        "grad_input": torch.ops.aten.nll_loss_backward(*(given[p.name] for p in RECORD.params[:-1])).numpy()
    }


TestAutograd = against(RECORD, by_autograd)
TestAnyTotalWeight = against(RECORD, by_native_op)


@pytest.mark.parametrize(("target", "ignored"), [(4, -100), (-1, -100), (-100, 2**40), (2**40, 2**40)])
def test_a_target_beyond_the_classes_is_named(target: int, ignored: int) -> None:
    inputs = {"input": np.zeros((3, 4)), "target": np.array([0, 3, 1])}
    RECORD.data_check(inputs, {"ignore_index": ignored})
    inputs["target"][1] = target
    words = r"nll_loss_backward: target: found a number outside at \[1\]; expected 0 to C - 1 = 3"
    with pytest.raises(UnsafeIndices, match=words):
        RECORD.data_check(inputs, {"ignore_index": ignored})
    if abs(target) < 2**31:
        RECORD.data_check(inputs, {"ignore_index": target})
