"""Replacement for the compiled deformable attention of Deformable-DETR and mmcv."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from npugrad.usage import reports_usage
from npugrad_client._legality import require_client
from npugrad_client._policy import Options, Policies, PolicyEngine, require_policies, show_policies
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
    """Replacement modules returned by `drop_in`.

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

    def __repr__(self) -> str:
        """The policies, and how many calls were sent."""
        return show_policies("DropIn", self._policies)

    def install(self) -> None:
        """Puts the modules into `sys.modules`, keeping what was there for `remove`.

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
        """Restores the previous modules.

        Raises:
            RuntimeError: It is not installed, or another one was installed after it.
        """
        with _lock:
            if not _active or _active[-1] is not self:
                raise RuntimeError("drop_in: it is not the one that was installed last")
            _active.pop()
            for name, module in self._replaced.items():
                if sys.modules.get(name) is not _STAND_INS[name]:
                    continue  # another library replaced it, which this would undo
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module

    def summary(self) -> Summary:
        """Returns counts of what ran where, over all threads; print it for a table."""
        return self._policies.summary()


@reports_usage
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
    """Replaces the extensions ``MultiScaleDeformableAttention`` and ``mmcv._ext``.

    While it is installed, code written for the compiled operator of Deformable-DETR or mmcv
    (``ms_deform_attn_forward`` and ``ms_deform_attn_backward``) works unmodified on CPU tensors: the forward
    pass runs locally, the gradient comes from the service. Install it before importing the model's code;
    models then also use replacements installed later. `im2col_step`, a tuning parameter of the compiled
    operator, is ignored. Other operators of an installed ``mmcv._ext`` are passed through; without one, they
    raise NotImplementedError when called.

    Both passes accept all floating dtypes and all consistent sizes: gradients that the documents do not allow
    (float64, 5 channels, ...) are computed locally. Operands of mixed dtypes, as under autocast, are sent as
    float32; each gradient has the dtype of its operand.

    Modules are global to the process, so all threads see the replacement. If several are installed, the last
    one is used; remove them in reverse order.

    Args:
        client: Client used in the backward pass.
        min_bytes: Gradients with fewer bytes of operands and results are computed locally. 0 sends all.
        on_refused: For calls that the documents do not allow: ``"warn"`` runs them locally with one warning
            of each kind, ``"local"`` runs them locally without a warning, ``"raise"`` raises the documented
            error from the forward pass.
        on_error: When the service fails: ``"raise"`` raises its error from backward, ``"local"`` runs the
            call locally, with a warning for each class of error, and counts it.
        timeout_s: Deadline of each call in seconds; None for the client's default.
        deterministic: Request bitwise reproducible results.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute each call with its reference and fail if a result differs.

    Returns:
        A context manager that installs and removes the replacement; alternatively call `install()` and
        `remove()`. Its `summary()` shows what ran where.

    Raises:
        WrongType: An argument is unknown or missing, or `client` is not a `Client`.
        WrongValue: Unknown policy, or negative `min_bytes`.

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
    """A module in place of another, which provides what it lacks, also to code that keeps it for longer."""

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
    """mmcv's: six tensors in, three more to fill; im2col_step comes last if it is positional."""
    tensors, filled = operands[:6], operands[6:9]
    for target, grad in zip(filled, differentiate(_last()._engine, *tensors), strict=True):
        target.copy_(grad)


_STAND_INS = {
    DEFORMABLE_DETR: _StandIn(DEFORMABLE_DETR, _backward_returned),
    MMCV: _StandIn(MMCV, _backward_filled),
}
"""One of each for the whole process, because models keep the module that they imported."""
