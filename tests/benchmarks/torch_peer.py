"""PyTorch's CPU backward of each operator, in the operands' own type.

Where torch has the operator, it is called with the saved statistics that ours gets. Where it has not, the
forward pass of a composition is recorded once and only its backward is timed. Each case takes one thread or
as many as torch takes by default, whichever was faster just before: with threads that wait for each other a
small operator can take a hundred times as long on a busy machine, and that would flatter us.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from tests.benchmarks.operands import Array, Call, Operands, made
from tests.operators import FLOYD, MSDA

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import get_operator

Tensors = Mapping[str, torch.Tensor]
Backward = Callable[[], Mapping[str, torch.Tensor]]

_TRIALS, _TRIALS_S = 5, 1.0


class TorchCall:
    def __init__(self) -> None:
        self._threads = sorted({1, torch.get_num_threads()})

    def prepare(self, case: Mapping[str, Any]) -> Call:
        return self.on(case, *made(case))

    def on(self, case: Mapping[str, Any], call: CallMeta, operands: Operands) -> Call:
        tensors = {name: as_tensor(array) for name, array in operands.items() if array is not None}
        backward = _backward_of(get_operator(case["operator"]), tensors, call.attrs)
        self.take_threads(backward)
        return lambda: {name: as_array(grad) for name, grad in backward().items()}

    def take_threads(self, backward: Backward) -> None:
        """As many as are faster just now."""
        torch.set_num_threads(min(self._threads, key=lambda threads: _seconds(backward, threads)))


def _seconds(backward: Backward, threads: int) -> float:
    """The shortest of some calls, of fewer where they are long."""
    torch.set_num_threads(threads)
    backward()
    seconds: list[float] = []
    while len(seconds) < _TRIALS and sum(seconds) < _TRIALS_S:
        seconds.append(timeit.timeit(backward, number=1))
    return min(seconds)


def as_tensor(array: Array) -> torch.Tensor:
    """A tensor that shares the array's memory."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> Array:
    found = tensor.contiguous()
    if found.dtype is torch.bfloat16:
        return found.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return found.numpy()


def _backward_of(record: OpRecord, tensors: Tensors, attrs: Mapping[str, Any]) -> Backward:
    """torch's own function for it, or the composition below."""
    binding = record.binding
    if binding is None or not binding.is_aten:
        return _COMPOSED[record.name](tensors, attrs)
    values = {**dict.fromkeys(param.name for param in record.inputs), **tensors, **attrs}
    names = [param.name for param in record.outputs]
    return lambda: dict(zip(names, binding.call(torch.ops, values), strict=True))


def _recorded(output: torch.Tensor, leaves: Tensors, gradient: torch.Tensor) -> Backward:
    """The backward pass of a forward pass that was just done."""

    def backward() -> Mapping[str, torch.Tensor]:
        grads = torch.autograd.grad(output, list(leaves.values()), gradient, retain_graph=True)
        return dict(zip(leaves, grads, strict=True))

    return backward


def _leaves(tensors: Tensors, sources: Mapping[str, str]) -> dict[str, torch.Tensor]:
    return {grad: tensors[name].detach().requires_grad_() for grad, name in sources.items()}


def _deformable_attention(tensors: Tensors, attrs: Mapping[str, Any]) -> Backward:
    """The composition of grid_sample that Deformable-DETR checks its own kernel with."""
    names = {"grad_value": "value", "grad_location": "location", "grad_attn_weight": "attn_weight"}
    leaves = _leaves(tensors, names)
    value, location, weight = leaves.values()
    (bs, _, nh, ch), (_, nq, _, levels, points, _) = value.shape, location.shape
    sampled = []
    for level in range(levels):
        height, width = tensors["spatial_shape"][level].tolist()
        start = int(tensors["level_start_index"][level])
        keys = value[:, start : start + height * width]
        # torch 2.13 samples images in 16 bits whose channels lie side by side from memory that nobody has
        # written.
        image = keys.permute(0, 2, 3, 1).reshape(bs * nh, ch, height, width).contiguous()
        grid = (2 * location[:, :, :, level] - 1).transpose(1, 2).reshape(bs * nh, nq, points, 2)
        sampled.append(torch.nn.functional.grid_sample(image, grid, align_corners=False))
    weights = weight.transpose(1, 2).reshape(bs * nh, 1, nq, levels * points)
    output = (torch.cat(sampled, dim=-1) * weights).sum(-1).reshape(bs, nh * ch, nq).transpose(1, 2)
    return _recorded(output, leaves, tensors["grad_output"].reshape(bs, nq, nh * ch))


def _floyd_attention(tensors: Tensors, attrs: Mapping[str, Any]) -> Backward:
    """Both scores and both outputs by einsum, softmax over their sum."""
    names = {"dq": "query", "dk1": "key1", "dv1": "value1", "dk2": "key2", "dv2": "value2"}
    leaves = _leaves(tensors, names)
    query, key1, value1, key2, value2 = leaves.values()
    scores = torch.einsum("bhnmd,bhnkd->bhnmk", query, key1)
    scores = scores + torch.einsum("bhnmd,bhkmd->bhnmk", query, key2)
    share = torch.softmax(scores * attrs["scale_value"], -1)
    output = torch.einsum("bhnmk,bhnkd->bhnmd", share, value1)
    output = output + torch.einsum("bhnmk,bhkmd->bhnmd", share, value2)
    return _recorded(output, leaves, tensors["dy"])


_COMPOSED: dict[str, Callable[[Tensors, Mapping[str, Any]], Backward]] = {
    MSDA.name: _deformable_attention,
    FLOYD.name: _floyd_attention,
}
