"""Warnings at the line of whoever calls this package."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from npugrad_client import _arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

_FRAMEWORKS = ("npugrad", "npugrad_client", "torch", "jax", "jaxlib")
"""Packages whose frames are skipped to find the caller's line for a warning."""
_NOTED: set[str] = set()
"""Operators whose operands with gradients were noted."""


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warns at the caller's line, such as that of `backward()`, skipping frames of frameworks and npugrad."""
    known = (sys.modules.get(name) for name in _FRAMEWORKS)
    folders = tuple(package.__path__[0] + os.sep for package in known if package is not None)
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
    )


def note_gradients(operator: str, inputs: Mapping[str, Any]) -> None:
    """Warns, once for each operator, that autograd sees nothing of a call with `requires_grad` operands."""
    if operator in _NOTED or not _arrays.has_torch(inputs.values()) or not _arrays.is_recording():
        return
    names = [name for name, value in inputs.items() if _arrays.is_torch(value) and value.requires_grad]
    if names:
        _NOTED.add(operator)
        warn_caller(
            f"{operator}: found requires_grad=True for {', '.join(names)}, but results have no gradients of "
            f"their own; for autograd use {_differentiable(operator)}, or pass tensors that are detached",
            UserWarning,
        )


def _differentiable(operator: str) -> str:
    """The function of ours whose gradient the operator is, or what sends those of PyTorch's own functions."""
    from npugrad_client import torch as functions  # here, because it needs PyTorch, which is loaded by now

    name = operator.removesuffix("_grad")
    own = name in functions.__all__
    return f"npugrad_client.torch.{name}" if own else "npugrad_client.torch.remote around backward()"
