"""Stands in for the compiled extension that Deformable-DETR and mmcv import for deformable attention."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from npugrad_client._legality import require_client
from npugrad_client._policy import Options, Policies, PolicyEngine, require_policies
from npugrad_client.torch._deformable import differentiate, forward, require

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

    from npugrad_client import Client
    from npugrad_client._summary import Summary

DEFORMABLE_DETR = "MultiScaleDeformableAttention"
MMCV = "mmcv._ext"
_lock = threading.Lock()
_active: list[DropIn] = []


class DropIn:
    """What `drop_in` makes; see there.

    Example:
        >>> stand_in = drop_in(client)
        >>> stand_in.install()
        >>> import MultiScaleDeformableAttention  # as the model's code does
        >>> stand_in.remove()
    """

    def __init__(self, client: Client, options: Options, policies: Policies) -> None:
        self._policies = policies
        self._engine = PolicyEngine(client, options, policies)
        self._replaced: dict[str, ModuleType | None] = {}

    def __enter__(self) -> DropIn:
        """Installs it."""
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Removes it."""
        self.remove()

    def install(self) -> None:
        """Puts the modules into `sys.modules`; what was there is kept for `remove`.

        Raises:
            RuntimeError: It is installed already.
        """
        with _lock:
            if self in _active:
                raise RuntimeError("drop_in: it is already installed")
            self._replaced = {name: sys.modules.get(name) for name in _STAND_INS}
            for name, stand_in in _STAND_INS.items():
                if self._replaced[name] is not stand_in:
                    stand_in.original = self._replaced[name]
                sys.modules[name] = stand_in
            _active.append(self)

    def remove(self) -> None:
        """Puts back what was there before.

        Raises:
            RuntimeError: It is not installed, or another one was installed after it.
        """
        with _lock:
            if not _active or _active[-1] is not self:
                raise RuntimeError("drop_in: it is not the one that was installed last")
            _active.pop()
            for name, module in self._replaced.items():
                if sys.modules.get(name) is not _STAND_INS[name]:
                    continue  # another library's by now, which this would undo
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module

    def summary(self) -> Summary:
        """What went where so far, all threads together; print it for a table."""
        return self._policies.summary()


def drop_in(
    client: Client,
    *,
    min_bytes: int = 0,
    on_refused: Literal["warn", "local", "raise"] = "warn",
    on_error: Literal["raise", "local"] = "raise",
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> DropIn:
    """Stands in for the extensions ``MultiScaleDeformableAttention`` and ``mmcv._ext``.

    While it is installed, modules written for Deformable-DETR's or mmcv's compiled operator
    (``ms_deform_attn_forward`` and ``ms_deform_attn_backward``) work unmodified on CPU tensors: the forward
    pass runs here, the gradient comes from the service. Install it before the model's code is imported; the
    models keep working with one that is installed later. `im2col_step`, which is a matter of the compiled
    operator, changes nothing. Other operators of a compiled ``mmcv._ext`` that is there already are handed
    through; where there is none, they raise NotImplementedError when they are called.

    Both passes run in every floating type and with any sizes that fit together: what the documents refuse
    (float64, 5 channels, ...) has its gradient computed here, by a formula of ours. Operands of several
    types, as under autocast, travel as float32, and each gradient has the type of its operand.

    Modules are one for a process, and so is this: all threads see it. Of several the last one counts, and
    they are removed in the reverse order.

    Args:
        client: Who calls the service in the backward pass.
        min_bytes: Gradients with less in operands and results together are computed here. 0 sends all.
        on_refused: What the documents do not allow: ``"warn"`` runs it here, with one warning for each kind,
            ``"local"`` without a word, ``"raise"`` raises the documented error out of the forward pass.
        on_error: When the service fails: ``"raise"`` raises the typed error out of backward, ``"local"``
            runs the call here, with a warning for each class of error, and counts it.
        timeout_s: Deadline of each call in seconds; None for the client's default.
        deterministic: Ask for results that do not depend on the order of summation.
        priority: Calls of higher priority leave the queue first; -100 to 100.
        label: Name of the caller or experiment.
        verify: Have the server recompute each call and refuse a result that differs.

    Returns:
        A context manager that installs and removes it; or call `install()` and `remove()`. Its `summary()`
        tells what went where.

    Raises:
        TypeError: The client is no `Client`.
        ValueError: A policy that there is not, or a negative `min_bytes`.

    Example:
        >>> value, grad_output = torch.rand(1, 20, 2, 8), torch.rand(1, 5, 16)
        >>> shapes, starts = torch.tensor([[4, 4], [2, 2]]), torch.tensor([0, 16])
        >>> location, weight = torch.rand(1, 5, 2, 2, 4, 2), torch.rand(1, 5, 2, 2, 4)
        >>> with drop_in(client) as stand_in:
        ...     import MultiScaleDeformableAttention as MSDA  # as the model's code does
        ...     grads = MSDA.ms_deform_attn_backward(
        ...         value, shapes, starts, location, weight, grad_output, 64)
        >>> stand_in.summary().sent
        1
    """
    require_client("drop_in", client)
    require_policies("drop_in", on_refused, on_error, min_bytes)
    options = Options(
        timeout_s=timeout_s, deterministic=deterministic, priority=priority, label=label, verify=verify
    )
    policies = Policies(on_refused=on_refused, on_error=on_error, min_bytes=min_bytes)
    return DropIn(client, options, policies)


class _StandIn(ModuleType):
    """A module in the place of another one; what it lacks comes from that, also to who kept it for longer."""

    original: ModuleType | None = None

    def __init__(self, name: str, backward: Any) -> None:
        super().__init__(name, "Deformable attention by npugrad_client.torch.drop_in.")
        self.ms_deform_attn_forward = _forward
        self.ms_deform_attn_backward = backward

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.original is not None:
            return getattr(self.original, name)

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name}: the drop-in has deformable attention only")

        return missing


def _last() -> DropIn:
    with _lock:
        if not _active:
            raise RuntimeError(f"{DEFORMABLE_DETR}: no drop_in is installed")
        return _active[-1]


def _forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Both extensions' forward pass, (bs, nq, nh*ch)."""
    operands = (value, spatial_shapes, level_start_index, sampling_locations, attention_weights)
    require(_last()._engine.on_refused, *operands)
    return forward(*operands)


def _backward_returned(*operands: Any) -> list[Tensor]:
    """Deformable-DETR's: six tensors and im2col_step in, three gradients out."""
    *tensors, _im2col_step = operands
    return list(differentiate(_last()._engine, *tensors))


def _backward_filled(*operands: Any, im2col_step: int | None = None) -> None:
    """mmcv's: six tensors in, and three that are filled; im2col_step comes last where it has no name."""
    tensors, filled = operands[:6], operands[6:9]
    for target, grad in zip(filled, differentiate(_last()._engine, *tensors), strict=True):
        target.copy_(grad)


_STAND_INS = {
    DEFORMABLE_DETR: _StandIn(DEFORMABLE_DETR, _backward_returned),
    MMCV: _StandIn(MMCV, _backward_filled),
}
"""One of each for the whole process, as models keep the module that they imported."""
