"""Calls of the sizes that models really make, and data for them.

The simulation's kernels are plain loops in double precision, so there each size is replaced by the smaller
one that the record has for it; `factor` tells how much smaller. Reports name it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad.tolerance import T

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.dtypes import DType
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad.workloads import Workload


def build(record: OpRecord, workload: Workload, simulated: bool, **more: Any) -> CallMeta:
    """The call of a workload that an acceptance makes."""
    sizes = workload.simulated if simulated else workload.sizes
    return record.build(**(sizes or workload.sizes), **more)


def factor(record: OpRecord, workload: Workload) -> float:
    """How many times smaller the operands are on the simulation."""
    return _bytes(build(record, workload, False)) / _bytes(build(record, workload, True))


def _bytes(call: CallMeta) -> int:
    return sum(meta.nbytes for meta in call.inputs.values() if meta is not None)


def float_dtypes(record: OpRecord, product: Product) -> tuple[DType, ...]:
    """The types of an operator's first operand, those a result can be compared in."""
    return tuple(dtype for dtype in record.inputs[0].dtypes[product] if dtype in T)


def realistic_calls(
    record: OpRecord, product: Product, simulated: bool
) -> Iterator[tuple[Workload, DType, CallMeta]]:
    """Every size that an acceptance makes, in every type."""
    for workload in record.workloads.accepted:
        for dtype in float_dtypes(record, product):
            yield workload, dtype, build(record, workload, simulated, dtype=dtype, product=product)
