"""Stands in for the compiled extension that Deformable-DETR and mmcv import for deformable attention."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npugrad_client._legality import require_client
from npugrad_client._policy import Options
from npugrad_client.torch._deformable import forward, gradients

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

    from npugrad_client import Client, MultiScaleDeformableAttentionGradResult

DEFORMABLE_DETR = "MultiScaleDeformableAttention"
MMCV = "mmcv._ext"
_lock = threading.Lock()
_active: list[DropIn] = []


class DropIn:
    """What `drop_in` makes; see there.

    Example:
        >>> stand_in = drop_in(client)                                 # doctest: +SKIP
        >>> stand_in.install()                                         # doctest: +SKIP
        >>> loss(model(images)).backward()                             # doctest: +SKIP
        >>> stand_in.remove()                                          # doctest: +SKIP
    """

    def __init__(self, client: Client, options: Options) -> None:
        self._client = client
        self._options = options
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
                raise RuntimeError("drop_in: found it installed; expected it not to be")
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
                raise RuntimeError("drop_in: found another one, or none, installed last; expected this one")
            _active.pop()
            for name, module in self._replaced.items():
                if module is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module

    def grads(
        self, *operands: Tensor, out: dict[str, Tensor] | None = None
    ) -> MultiScaleDeformableAttentionGradResult:
        """Calls the service with the six operands in the order of the documents."""
        return gradients(self._client, self._options, *operands, out=out)


def drop_in(
    client: Client,
    *,
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

    Modules are one for a process, and so is this: all threads see it. Of several the last one counts, and
    they are removed in the reverse order.

    Args:
        client: Who calls the service in the backward pass.
        timeout_s: Deadline of each call in seconds; None for the client's default.
        deterministic: Ask for results that do not depend on the order of summation.
        priority: Calls of higher priority leave the queue first; -100 to 100.
        label: Name of the caller or experiment.
        verify: Have the server recompute each call and refuse a result that differs.

    Returns:
        A context manager that installs and removes it; or call `install()` and `remove()`.

    Raises:
        TypeError: The client is no `Client`.

    Example:
        >>> with drop_in(client):                                      # doctest: +SKIP
        ...     from models.ops.modules import MSDeformAttn
        ...     model = build_model()
        ...     loss(model(images)).backward()
    """
    require_client("drop_in", client)
    options = Options(
        timeout_s=timeout_s, deterministic=deterministic, priority=priority, label=label, verify=verify
    )
    return DropIn(client, options)


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
            raise RuntimeError(f"{DEFORMABLE_DETR}: found no drop_in installed; expected one")
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
    _last()
    return forward(value, spatial_shapes, level_start_index, sampling_locations, attention_weights)


def _backward_returned(*operands: Any) -> list[Tensor]:
    """Deformable-DETR's: six tensors and im2col_step in, three gradients out."""
    *tensors, _im2col_step = operands
    grads = _last().grads(*tensors)
    return [grads.grad_value, grads.grad_location, grads.grad_attn_weight]


def _backward_filled(*tensors: Tensor, im2col_step: int) -> None:
    """mmcv's: six tensors in, and three that are filled."""
    *operands, grad_value, grad_location, grad_attn_weight = tensors
    out = {"grad_value": grad_value, "grad_location": grad_location, "grad_attn_weight": grad_attn_weight}
    _last().grads(*operands, out=out)


_STAND_INS = {
    DEFORMABLE_DETR: _StandIn(DEFORMABLE_DETR, _backward_returned),
    MMCV: _StandIn(MMCV, _backward_filled),
}
"""One of each for the whole process, as models keep the module that they imported."""
