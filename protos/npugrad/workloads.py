"""Calls of an operator for tests, demos and measurements, as its record describes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from npugrad.dtypes import DType
    from npugrad.meta import CallMeta
    from npugrad.operator import Arrays

    Sizes = Mapping[str, Any]

BENCH_SIZES = ("small", "medium", "large")
"""Workloads that every operator has in addition to ``"tiny"``, its smallest useful call."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One size of an operator.

    Attributes:
        name: Name such as ``"decoder"``, used in scenarios and ``npugrad bench --size``.
        sizes: Keywords of the record's `build`, without type and product.
        model: Model that makes calls of this size; empty for an artificial size.
        simulated: The same kind of call for a simulated device, whose kernels are plain loops; None if no
            acceptance makes the call.
        reduced: Smaller size for a demo with less time; None if there is none.
        shown: Whether the demo makes the call.
        raced: Types in which benchmarks compare the CPU kernels with peers on it.
        pattern: Arrangement of the sampling points: ``"turned"`` for those of a rotated image; else as in
            samples.
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
        reading: How the program is interpreted if that matters, such as ``"as intended"``; else empty.
        dtype: Type of its first operand.
        make: Creates the call.
    """

    reading: str
    dtype: DType
    make: Callable[[], Filled]


@dataclass(frozen=True)
class Probe:
    """A call whose results can be computed by hand and would reveal a likely mistake.

    Attributes:
        name: What it tests.
        make: Creates the call; the results that it expects of some outputs are exact in float32.
    """

    name: str
    make: Callable[[], Filled]


def _nothing() -> dict[str, npt.NDArray[Any]]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Expanded:
    """A float32 call whose operands repeat one element each, so that it takes next to no host memory.

    Attributes:
        name: Name for display.
        sizes: Keywords of the record's `build`.
        values: The element of each operand.
        expected: Computes the exact results by output name; empty if unknown.
    """

    name: str
    sizes: Sizes
    values: Mapping[str, float]
    expected: Callable[[], Mapping[str, npt.NDArray[Any]]] = _nothing


@dataclass(frozen=True, kw_only=True)
class Huge:
    """Calls that take much of a device and next to nothing of the host.

    The output that grows is masked out: the operator needs device memory for it, but it is not copied back.

    Attributes:
        unit_bytes: Device memory that each unit of `large` needs at least.
        large: Creates the call that needs the memory of a number of units.
        long: Calls with known results, each taking two to four times as long as the one before.
    """

    unit_bytes: int
    large: Callable[[int], Expanded]
    long: tuple[Expanded, ...]


@dataclass(frozen=True, kw_only=True)
class Workloads:
    """The workloads of one operator.

    Attributes:
        named: Sizes by name, the smallest first: tiny, small, medium, large, then those of models.
        variants: Keywords of the record's `build` with the values that small calls combine, in every type.
        uneven: Keywords of the record's `build` for a small call whose axes differ in size and are not whole
            vectors. References and CPU kernels must compute it, though a device may refuse it.
        canary: Keywords of the record's `build` for the smallest call that reveals a device that computes
            wrongly, with sizes that differ; if a device refuses it, the tiny one is used. Empty: `uneven`.
        examples: Examples of the official pages.
        probes: Calls that an acceptance compares with results computed by hand.
        flops: From sizes, the operations that the formula needs; None if memory is the limit.
        fixed: From sizes, the operands that they determine but metas do not; None if there are none.
        huge: Calls that fill a device, by an output that is allocated though masked out; else None.
        ties: Moves operands of a small call, in place, to where a gradient jumps; None if none jumps.
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
        """Workloads that an acceptance makes."""
        return tuple(each for each in self.named.values() if each.simulated is not None)


def model(name: str, kind: str, **sizes: Any) -> Workload:
    """A workload of a kind of model; its sizes on a simulated device are derived."""
    return Workload(name=name, model=kind, sizes=sizes)


def measured(make: Callable[..., Sizes], *sizes: Sequence[Any]) -> Iterator[Workload]:
    """``"tiny"`` and the workloads of measurements, from arguments of a function that makes their sizes."""
    for name, each in zip(("tiny", *BENCH_SIZES), sizes, strict=True):
        yield Workload(name=name, sizes=make(*each))


def named(*workloads: Workload) -> dict[str, Workload]:
    """Workloads by name.

    Raises:
        ValueError: Two have the same name.
    """
    found = {each.name: each for each in workloads}
    if len(found) != len(workloads):
        raise ValueError(f"found the names {[each.name for each in workloads]}; expected each once")
    return found
