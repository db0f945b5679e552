"""Deformable attention that a model composes of `grid_sample`, as one operator with one gradient call.

The forward pass is ours and runs here. Its gradient is an operator of PyTorch's dispatcher, which a `remote`
sees in the backward pass like any other; without a `remote` it runs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from npugrad_client._legality import DEFORMABLE_ATTENTION as OPERATOR
from npugrad_client.torch import _deformable
from npugrad_client.torch._translation import Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from npugrad_client._policy import Engine
    from npugrad_client.torch._recognised import Operands, Recognised

_library = torch.library.Library("npugrad", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    f"{OPERATOR}(Tensor value, Tensor spatial_shape, Tensor level_start_index, Tensor location, "
    "Tensor attn_weight, Tensor grad_output) -> (Tensor, Tensor, Tensor)"
)
GRADIENT = getattr(torch.ops.npugrad, OPERATOR).default
"""What `remote` sees of a fused function's backward pass."""


class Fuser:
    """Computes recognised functions by the operator wherever an engine would send its gradient.

    Thread safety: any number of threads may use one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._agrees: dict[Recognised, bool] = {}

    def attend(self, function: Recognised, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The function's result, or None where it must run as it is."""
        if not torch.is_grad_enabled() or self._agrees.get(function) is False:
            return None
        given = function.operands(args, kwargs)
        operands = None if given is None or not _is_plain(given) else _operands(given)
        if given is None or operands is None or not self._is_sent(operands):
            return None
        if function not in self._agrees and not self._compare(function, given, operands):
            return None
        result: Tensor = _Attention.apply(*operands)  # type: ignore[no-untyped-call]
        return result

    def _is_sent(self, operands: tuple[Tensor, ...]) -> bool:
        """Whether the gradient would be sent; if not, the function's calls of `grid_sample` may well be."""
        value, shapes, starts, location, weight = operands
        output = (*location.shape[:2], value.shape[2] * value.shape[3])
        grad_output = value.detach().new_empty(()).expand(output)
        return self._engine.foresees(translate(value, shapes, starts, location, weight, grad_output))

    def _compare(self, function: Recognised, given: Operands, operands: tuple[Tensor, ...]) -> bool:
        """Whether a function computes what its name says, found out from its first call and in float32."""
        value, shapes, starts, location, weight = (tensor.detach() for tensor in operands)
        floats = (value.float(), location.float(), weight.float())
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                theirs = given.rerun(*floats)
            except Exception:
                return False  # the function itself says what is wrong
            ours = _deformable.forward(floats[0], shapes, starts, *floats[1:])
        scale = theirs.norm()
        if not (scale.isfinite() and scale):  # tells nothing; NaN at a point outside is left out here
            return False
        self._agrees[function] = agrees = ours.shape == theirs.shape and bool(
            (ours - theirs).norm() <= _ROUNDING * scale
        )
        if not agrees:
            text = f"{function.name} is left alone, as its result is not that of the operator"
            self._engine.tell(f"fused: {function.name}", text)
        return agrees


_ROUNDING = 1e-4
"""Relative norm of a difference of two forward passes in float32."""


def _is_plain(given: Operands) -> bool:
    """Whether there will be a backward pass, and an ordinary one."""
    tensors = (given.value, given.location, given.attn_weight)
    return any(t.requires_grad for t in tensors) and peek_interpreter_stack() is None


def _operands(given: Operands) -> tuple[Tensor, ...] | None:
    """Operands of the forward pass in the type that the function computes in; None if they do not fit."""
    value, location, weight = given.value, given.location, given.attn_weight
    if torch.is_autocast_enabled("cpu"):  # under which `grid_sample` computes in float32
        value, location, weight = value.float(), location.float(), weight.float()
    sizes = [height * width for height, width in given.spatial_shapes]
    fits = value.dim() == 4 and location.dim() == 6 and sum(sizes) == value.shape[1]
    if not fits or not value.dtype == location.dtype == weight.dtype:
        return None  # the function itself says so, or makes of it what it does
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return value, torch.tensor(given.spatial_shapes), torch.tensor(starts), location, weight


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        return _deformable.forward(*operands)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator takes ctx its name
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_value, grad_location, grad_attn_weight = GRADIENT(*ctx.saved_tensors, *grad_outputs)
        return grad_value, None, None, grad_location, grad_attn_weight


def _gradients(
    value: Tensor,
    spatial_shape: Tensor,
    level_start_index: Tensor,
    location: Tensor,
    attn_weight: Tensor,
    grad_output: Tensor,
) -> tuple[Tensor, ...]:
    """The operator itself, where it is not sent: in float32, level by level."""
    nq, nh, ch = location.shape[1], *value.shape[2:]
    into = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (value, location, attn_weight)]
    grad_value, grad_location, grad_weight = into
    outer = grad_output.float().reshape(-1, nq, nh, ch).permute(0, 2, 3, 1).reshape(-1, ch, nq, 1)
    levels = zip(level_start_index.tolist(), spatial_shape.tolist(), strict=True)
    for level, (start, (height, width)) in enumerate(levels):
        keys = slice(start, start + height * width)
        maps = value[:, keys].float().permute(0, 2, 3, 1).reshape(-1, ch, height, width)
        points = (2 * location[:, :, :, level].float() - 1).transpose(1, 2).flatten(0, 1)
        weight = attn_weight[:, :, :, level].float().transpose(1, 2).reshape(outer.shape[0], 1, nq, -1)
        samples = torch.ops.aten.grid_sampler_2d(maps, points, 0, 0, False)
        by_maps, by_points = torch.ops.aten.grid_sampler_2d_backward(
            outer * weight, maps, points, 0, 0, False, [True, True]
        )
        per_head = (value.shape[0], nh)
        grad_value[:, keys] = by_maps.reshape(*per_head, ch, -1).permute(0, 3, 1, 2)
        grad_location[:, :, :, level] = 2 * by_points.unflatten(0, per_head).transpose(1, 2)
        grad_weight[:, :, :, level] = (samples * outer).sum(1).unflatten(0, per_head).transpose(1, 2)
    return tuple(grad.to(like.dtype) for grad, like in zip(into, (value, location, attn_weight), strict=True))


_library.impl(OPERATOR, _gradients, "CPU")  # type: ignore[no-untyped-call]


def translate(
    value: Tensor,
    spatial_shape: Tensor,
    level_start_index: Tensor,
    location: Tensor,
    attn_weight: Tensor,
    grad_output: Tensor,
) -> Request:
    """The operator in the words of the service."""
    return Request(
        OPERATOR,
        {
            "value": value,
            "spatial_shape": spatial_shape,
            "level_start_index": level_start_index,
            "location": location,
            "attn_weight": attn_weight,
            "grad_output": grad_output,
        },
        {},
        {"grad_value": value.dtype, "grad_location": location.dtype, "grad_attn_weight": attn_weight.dtype},
    )
