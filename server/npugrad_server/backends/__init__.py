"""Backends: what runs an operator on one kind of device. Each is imported only in a worker that needs it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from npugrad.ops import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.operator import OpRecord
    from npugrad_server.backends.base import Backend

_BACKENDS = {
    "cpu": ("npugrad_server.backends.cpu", "CpuBackend"),
    "npu": ("npugrad_server.backends.npu", "NpuBackend"),
    "test": ("npugrad_server.backends.test", "TestBackend"),
}


def make_backend(kind: str, records: Mapping[str, OpRecord] = OPERATORS) -> Backend:
    """Makes a backend, not yet open, for devices of a kind.

    Args:
        kind: Such as ``"cpu"``.
        records: Operators that it may be asked for, by name.

    Raises:
        ValueError: This build has no backend for it; the message lists the existing ones.
    """
    if kind not in _BACKENDS:
        raise ValueError(f"found device kind {kind!r}; this build has backends for {', '.join(_BACKENDS)}")
    module, name = _BACKENDS[kind]
    return cast("Backend", getattr(import_module(module), name)(records))
