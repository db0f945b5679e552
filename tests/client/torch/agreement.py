"""Gradients against float64: each backward operator's results, and whole tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from npugrad import OPERATORS, tolerance
from npugrad.agreement import agreement
from npugrad_client import _arrays

if TYPE_CHECKING:
    from torch import Tensor

_GROUP_NORM = torch.ops.aten.native_group_norm_backward.default
_LAYER_NORM = torch.ops.aten.native_layer_norm_backward.default
_SAMPLERS = {
    torch.ops.aten.grid_sampler_2d_backward.default: OPERATORS["grid_sampler_2d_backward"],
    torch.ops.aten.grid_sampler_3d_backward.default: OPERATORS["grid_sampler_3d_backward"],
}
_COMPARED = {_GROUP_NORM, _LAYER_NORM, *_SAMPLERS}


def assert_close(got: Tensor, golden: Tensor, what: str = "gradient", extra: float = 0.0) -> None:
    """A gradient is within the project's tolerance of float64."""
    found = _found(got, golden, extra)
    assert found.ok, f"{what}: {found}"


def _found(got: Tensor, golden: Tensor, extra: float) -> tolerance.Comparison:
    assert got.shape == golden.shape
    return tolerance.compare(to_numpy(golden.double()), to_numpy(got), extra)


def to_numpy(tensor: Tensor) -> Any:
    return _arrays.to_numpy(tensor, "test", "tensor")


class Golden(TorchDispatchMode):
    """Runs each backward operator in float64 as well, on the very same operands, and compares.

    Enter it inside a `remote`, whose results it then sees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        got = func(*args, **(kwargs or {}))
        if func in _COMPARED:
            with _disable_current_modes():
                self._compare(func, args, got)
            self.compared += 1
        return got

    def _compare(self, func: Any, args: Any, got: Any) -> None:
        double = [a.detach().double() if isinstance(a, torch.Tensor) else a for a in args]
        for number, (one, golden) in enumerate(zip(got, func(*double), strict=True)):
            if one is not None:  # PyTorch computes some gradients that nobody wants
                extra = (
                    _cancellation(func, args) if func in (_GROUP_NORM, _LAYER_NORM) and not number else 0.0
                )
                found = _found(one.detach(), golden, extra)
                assert found.ok or _is_right_at_edges(func, args, got), f"{func}, result {number}: {found}"


def _is_right_at_edges(func: Any, args: Any, got: Any) -> bool:
    """Whether results are right by a rule of coordinates in float32, which PyTorch's float64 has not."""
    if func not in _SAMPLERS:
        return False
    inputs = {n: to_numpy(t.detach()) for n, t in zip(("grad_output", "input", "grid"), args, strict=False)}
    attrs = dict(zip(("interpolation_mode", "padding_mode", "align_corners"), args[3:6], strict=True))
    named = zip(("input_grad", "grid_grad"), got, strict=True)
    results = {name: to_numpy(tensor.detach()) for name, tensor in named if tensor is not None}
    return agreement(_SAMPLERS[func], inputs, attrs, results).ok


def _cancellation(func: Any, args: Any) -> float:
    """What the record of a norm adds for its grad_input, from the type of the data."""
    if func is _LAYER_NORM:
        inputs = {"grad_out": args[0], "rstd": args[4], "weight": args[5]}
        arrays = {name: None if t is None else to_numpy(t.detach()) for name, t in inputs.items()}
        attrs = {"normalized_shape": tuple(args[2])}
        return OPERATORS["layer_norm_backward"].extra_tolerance(arrays, attrs, "grad_input")
    grad_out, _, _, rstd, weight, n, c, hxw, group, _ = args
    inputs = {"grad_out": grad_out, "rstd": rstd, "gamma": weight}
    arrays = {name: None if t is None else to_numpy(t.detach()) for name, t in inputs.items()}
    attrs = {"n": n, "c": c, "hxw": hxw, "group": group}
    return OPERATORS["group_norm_backward"].extra_tolerance(arrays, attrs, "grad_input")
