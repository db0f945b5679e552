"""Calls that tests, demos and measurements make of an operator, as its record describes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from npugrad.dtypes import DType
    from npugrad.meta import CallMeta
    from npugrad.operator import Arrays

    Sizes = Mapping[str, Any]

BENCH_SIZES = ("small", "medium", "large")
"""Workloads that every operator has, besides ``"tiny"``, its smallest useful call."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One size of an operator.

    Attributes:
        name: Name such as ``"decoder"``, used in scenarios and ``npugrad bench --size``.
        sizes: Keywords of the record's `build`, without type and product.
        model: Model that makes calls of this size; empty for an artificial size.
        simulated: The same kind of call for a simulated device, whose kernels are plain loops; None where no
            acceptance makes the call.
        reduced: Smaller size for a demo with less time; None if there is none.
        shown: Whether the demo makes the call.
        raced: Types in which the CPU kernels are measured with it, against others that compute the same.
        pattern: How sampling points lie there: ``"turned"`` for those of a turned image; else as in samples.
    """

    name: str
    sizes: Sizes
    model: str = ""
    simulated: Sizes | None = None
    reduced: Sizes | None = None
    shown: bool = False
    raced: tuple[str, ...] = ()
    pattern: Literal["", "turned"] = ""


@dataclass(frozen=True)
class Filled:
    """One call with its data and its known results.

    Attributes:
        operands: By name, None for null.
        attrs: By name.
        expected: Results by output name, printed by the page's example program or derived from it by hand;
            empty if unknown.
        expected_atol: Absolute tolerance of `expected`.
    """

    operands: Arrays
    attrs: Mapping[str, Any]
    expected: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    expected_atol: float = 0.0


@dataclass(frozen=True)
class Example:
    """The call of an official example program.

    Attributes:
        reading: How the program is read where that matters, such as ``"as intended"``; else empty.
        dtype: Type of its first operand.
        make: Makes it.
    """

    reading: str
    dtype: DType
    make: Callable[[], Filled]


@dataclass(frozen=True)
class Probe:
    """A call whose results can be computed by hand and would reveal a likely mistake.

    Attributes:
        name: What it tells.
        make: Makes it; what it expects of some outputs is exact in float32.
    """

    name: str
    make: Callable[[], Filled]


def _nothing() -> dict[str, npt.NDArray[Any]]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Expanded:
    """A float32 call whose operands repeat one element each, so that the host holds next to nothing of it.

    Attributes:
        name: For a person.
        sizes: Keywords of the record's `build`.
        values: The element of each operand.
        expected: Makes the exact results by output name; without any where nothing is known.
    """

    name: str
    sizes: Sizes
    values: Mapping[str, float]
    expected: Callable[[], Mapping[str, npt.NDArray[Any]]] = _nothing


@dataclass(frozen=True, kw_only=True)
class Huge:
    """Calls that take much of a device and next to nothing of the host.

    The output that grows is masked out: the operator needs device memory for it, but nobody copies it back.

    Attributes:
        unit_bytes: Device memory that each unit of `large` needs at least.
        large: From a number of units, a call that needs so much memory.
        long: Calls of known results, each two to four times longer than the one before.
    """

    unit_bytes: int
    large: Callable[[int], Expanded]
    long: tuple[Expanded, ...]


@dataclass(frozen=True, kw_only=True)
class Workloads:
    """The calls of an operator that are made for something.

    Attributes:
        named: Sizes by name, the smallest first: tiny, small, medium, large, then those of models.
        variants: Keywords of the record's `build` with the values that small calls combine, in every type.
        uneven: Keywords of the record's `build` for a small call whose axes differ in size and are no whole
            vectors. References and CPU kernels must compute it, though a device may refuse it.
        canary: Keywords of the record's `build` for the least call that tells a right device from a wrong
            one, of sizes that differ; where a device refuses it, the tiny one is taken. Empty takes `uneven`.
        examples: Those of the official pages.
        probes: Calls that an acceptance compares with numbers worked out by hand.
        flops: From sizes, the operations that the formula needs; None where memory is the limit.
        fixed: From sizes, the operands that they fix but no meta tells; None where metas tell all.
        huge: Calls that fill a device; None where the operator has no output that is needed but not wanted.
        ties: Moves, in place, operands of a small call to where a gradient jumps; None where none jumps.
    """

    named: Mapping[str, Workload]
    variants: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    uneven: Sizes = field(default_factory=dict)
    canary: Sizes = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    probes: tuple[Probe, ...] = ()
    flops: Callable[[Sizes], float] | None = None
    fixed: Callable[[Sizes], dict[str, npt.NDArray[Any]]] | None = None
    huge: Huge | None = None
    ties: Callable[[CallMeta, Arrays], None] | None = None

    @property
    def accepted(self) -> tuple[Workload, ...]:
        """Those that an acceptance makes."""
        return tuple(each for each in self.named.values() if each.simulated is not None)


def named(*workloads: Workload) -> dict[str, Workload]:
    """Workloads by name.

    Raises:
        ValueError: Two have the same name.
    """
    found = {each.name: each for each in workloads}
    if len(found) != len(workloads):
        raise ValueError(f"found the names {[each.name for each in workloads]}; expected each once")
    return found
