"""What `make bench-kernels` measures: one module for each operator, with its `CASES`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.benchmarks.goals import Goal

TORCH = "tests.benchmarks.torch_peer:TorchCall"
JAX = "tests.benchmarks.jax_peer:JaxCall"
DRAM, FMA = "DRAM roofline", "FMA roofline"
ERROR, MEMORY = "largest error", "extra memory"


@dataclass(frozen=True)
class KernelCase:
    """One call and whom it is measured against.

    Attributes:
        operator: Name of the operator.
        name: Sizes, for a person.
        dtype: Element type of the data.
        sizes: Keywords of the record's `build`.
        pattern: How operands lie that are not drawn as samples are; see `tests.benchmarks.operands`.
        peers: By name, the subject ("module:class") that makes the same call in a process of its own.
        flops: Floating-point operations that the formula needs; 0 where memory is the limit.
        tolerance: How far a peer's result may be from ours; see `tests.benchmarks.contestant.difference`.
        goals: By peer, for the peer's time over ours. By roofline, for our time over the roofline's. `ERROR`:
            for max|e| / max|g| of each result against the float64 reference. `MEMORY`: for torch's extra
            memory over ours. Without the last two, error and memory are not measured.
    """

    operator: str
    name: str
    dtype: str
    sizes: Mapping[str, Any]
    pattern: str = ""
    peers: Mapping[str, str] = field(default_factory=lambda: {"torch": TORCH})
    flops: float = 0.0
    tolerance: float = 1e-3
    goals: Mapping[str, Goal] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Operator and sizes."""
        return f"{self.operator} {self.name}"

    @property
    def roofline(self) -> str:
        """Which limit of the machine it is held against."""
        return FMA if self.flops else DRAM

    @property
    def question(self) -> dict[str, Any]:
        """The case as a contestant is told it."""
        return {
            "operator": self.operator,
            "dtype": self.dtype,
            "sizes": dict(self.sizes),
            "pattern": self.pattern,
            "flops": self.flops,
        }


def all_cases() -> list[KernelCase]:
    """The cases of every module beside this one, in the order of their names."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    return [case for name in modules for case in importlib.import_module(f"{__name__}.{name}").CASES]
