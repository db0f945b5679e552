"""What `make bench-kernels` measures: one module for each operator, with its `CASES`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TORCH = "tests.benchmarks.torch_peer:TorchCall"


@dataclass(frozen=True)
class KernelCase:
    """One call and whom it is measured against.

    Attributes:
        operator: Name of the operator.
        name: Sizes, for a person.
        dtype: Element type of the data.
        sizes: Keywords of the record's `build`.
        peers: By name, the subject ("module:class") that makes the same call in a process of its own.
        flops: Floating-point operations that the formula needs; 0 where memory is the limit.
        tolerance: How far a peer's result may be from ours; see `tests.benchmarks.contestant.difference`.
    """

    operator: str
    name: str
    dtype: str
    sizes: Mapping[str, Any]
    peers: Mapping[str, str] = field(default_factory=lambda: {"torch": TORCH})
    flops: float = 0.0
    tolerance: float = 1e-3


def all_cases() -> list[KernelCase]:
    """The cases of every module beside this one, in the order of their names."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    return [case for name in modules for case in importlib.import_module(f"{__name__}.{name}").CASES]
