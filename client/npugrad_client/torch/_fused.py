"""Deformable attention built from `grid_sample`, run as one operator with one gradient call.

The forward pass is ours and runs locally. In the backward pass, the innermost `remote` at that time decides
where the gradient is computed, as for every operator; without one, it is computed locally.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C import _autograd
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from npugrad_client._policy import Deciding
from npugrad_client.torch import _deformable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from npugrad_client._backward_call import BackwardCall
    from npugrad_client._policy import PolicyEngine
    from npugrad_client.torch._recognised import AttentionOperands, Recognised

R = TypeVar("R")
DECIDING = Deciding()
"""The state shared by everything that `remote` sees."""


class Fuser:
    """Computes recognised functions by the operator if an engine would send its gradient.

    Thread safety: any number of threads may use one.
    """

    def __init__(self, engine: PolicyEngine, *, is_on: bool) -> None:
        self.engine = engine
        self.is_on = is_on

    def attend(self, function: Recognised, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Returns the function's result, or None if it must run unchanged."""
        if not self.is_on or not torch.is_grad_enabled() or has_saved_tensors_hooks():
            return None
        given = function.operands(args, kwargs)
        operands = None if given is None or not _is_plain(given) else _operands(given)
        if given is None or operands is None or not self._is_sent(operands):
            return None
        if function.agrees is None:
            function.agrees = _agrees(given, operands)
        if function.agrees is False:
            text = f"{function.name} is not replaced, because its result differs from the operator's"
            self.engine.tell(f"fused: {function.name}", text)
        if not function.agrees:
            return None
        return _deformable.differentiable(_INNERMOST, *operands)

    def _is_sent(self, operands: tuple[Tensor, ...]) -> bool:
        """Whether the gradient would be sent; if not, the function's calls of `grid_sample` still may be."""
        value, location = operands[0], operands[3]
        output = (*location.shape[:2], value.shape[2] * value.shape[3])
        grad_output = value.detach().new_empty(()).expand(output)
        return self.engine.foresees(_deformable.request_of(*operands, grad_output))


_ROUNDING = 1e-4
"""Allowed relative norm of the difference of two forward passes in float32."""


def _agrees(given: AttentionOperands, operands: tuple[Tensor, ...]) -> bool | None:
    """Whether a function computes what its name says, in float32; None if this call cannot show it."""
    value, shapes, starts, location, weight = (tensor.detach() for tensor in operands)
    floats = (value.float(), location.float(), weight.float())
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            theirs = given.rerun(*floats)
        except Exception:
            return None  # the function itself reports what is wrong
        ours = _deformable.forward(floats[0], shapes, starts, *floats[1:])
        scale = theirs.norm()
        if not (scale.isfinite() and scale):
            return None  # ours ignores NaN at a point outside
        return ours.shape == theirs.shape and bool((ours - theirs).norm() <= _ROUNDING * scale)


def _is_plain(given: AttentionOperands) -> bool:
    """Whether there will be an ordinary backward pass."""
    tensors = (given.value, given.location, given.attn_weight)
    return any(t.requires_grad for t in tensors) and peek_interpreter_stack() is None


def _operands(given: AttentionOperands) -> tuple[Tensor, ...] | None:
    """Operands of the forward pass in the function's compute type; None if they are inconsistent."""
    value, location, weight = given.value, given.location, given.attn_weight
    if torch.is_autocast_enabled("cpu"):  # under which `grid_sample` computes in float32
        value, location, weight = value.float(), location.float(), weight.float()
    sizes = [height * width for height, width in given.spatial_shapes]
    fits = value.dim() == 4 and location.dim() == 6 and sum(sizes) == value.shape[1]
    if not fits or not value.dtype == location.dtype == weight.dtype:
        return None  # the function itself reports or handles it
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return value, torch.tensor(given.spatial_shapes), torch.tensor(starts), location, weight


def attend(function: Recognised, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns the result of a call by the innermost `remote`; None if the function must run unchanged."""
    fuser = _innermost()
    return None if fuser is None else fuser.attend(function, args, kwargs)


def _innermost() -> Fuser | None:
    """The fuser of the innermost `remote`, also in threads to which autograd passed its modes."""
    if DECIDING.is_local:
        return None
    for mode in reversed(_get_current_dispatch_mode_stack()):
        fuser = getattr(mode, "fuser", None)
        if isinstance(fuser, Fuser):
            return fuser
    return None


def has_saved_tensors_hooks() -> bool:
    """Whether there are saved-tensor hooks, as in a non-reentrant checkpoint.

    Its forward pass and the recomputation must save the same number of tensors, and perhaps only one of them
    is inside a `remote`.
    """
    return _autograd._top_saved_tensors_default_hooks(False) is not None


class _Innermost:
    """The engine of the `remote` that is innermost when the gradient is computed."""

    on_refused = "local"

    def run(self, request: BackwardCall, local: Callable[[], R]) -> R | tuple[Any, ...]:
        fuser = _innermost()
        return local() if fuser is None else fuser.engine.run(request, local)


_INNERMOST = _Innermost()
