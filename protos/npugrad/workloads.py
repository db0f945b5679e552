"""What a record says of the calls that are made of it: who makes which, and what they may vary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from npugrad.dtypes import DType
    from npugrad.meta import CallMeta
    from npugrad.operator import Arrays

    Sizes = Mapping[str, Any]

BENCH_SIZES = ("small", "medium", "large")
"""Workloads that every operator has, for measurements; ``"tiny"`` is one more, its smallest useful call."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One size of an operator.

    Attributes:
        name: Such as ``"decoder"``; scenarios and ``npugrad bench --size`` choose by it.
        sizes: Keywords of the record's `build`, without type and product.
        model: What makes calls of this size; empty for a size that was made up.
        simulated: The same kind of call for a simulated device, whose kernels are plain loops; None where no
            acceptance makes the call.
        reduced: What a demonstration takes instead where it has less time; None where it never does.
        shown: Whether a demonstration makes the call.
    """

    name: str
    sizes: Sizes
    model: str = ""
    simulated: Sizes | None = None
    reduced: Sizes | None = None
    shown: bool = False


@dataclass(frozen=True)
class Filled:
    """One call with its data, and what is known of its results.

    Attributes:
        operands: By name, None for null.
        attrs: By name.
        expected: Results by output name, printed by the page's example program or derived from it by hand;
            empty where nothing is known.
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


@dataclass(frozen=True, kw_only=True)
class Workloads:
    """The calls of an operator that are made for something.

    Attributes:
        named: Sizes by name, the smallest first: tiny, small, medium, large, then those of models.
        variants: Keywords of the record's `build` with the values that small calls combine, in every type.
        uneven: Keywords of the record's `build` for a small call whose axes differ in size and are no whole
            vectors. References and CPU kernels must compute it, though a device may refuse it.
        examples: Those of the official pages.
        fixed: From sizes, the operands that they fix but no meta tells; None where metas tell all.
        settle: Moves, in place, what lies so near to a tie that two right results may differ; None where no
            gradient jumps.
    """

    named: Mapping[str, Workload]
    variants: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    uneven: Sizes = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    fixed: Callable[[Sizes], dict[str, npt.NDArray[Any]]] | None = None
    settle: Callable[[CallMeta, Arrays], None] | None = None

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
