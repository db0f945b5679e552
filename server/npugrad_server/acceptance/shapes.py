"""Calls of the sizes that real models make.

The simulation's kernels are plain loops in double precision, so there each size is replaced by the smaller
one that the record has for it; `factor` says how much smaller. Reports state it.
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
    """Builds the call that an acceptance makes for a workload."""
    sizes = workload.simulated if simulated else workload.sizes
    return record.build(**(sizes or workload.sizes), **more)


def factor(record: OpRecord, workload: Workload) -> float:
    """Returns how many times smaller the operands are on the simulation."""
    return _bytes(build(record, workload, False)) / _bytes(build(record, workload, True))


def _bytes(call: CallMeta) -> int:
    return sum(meta.nbytes for meta in call.inputs.values() if meta is not None)


def float_dtypes(record: OpRecord, product: Product) -> tuple[DType, ...]:
    """Returns the types of an operator's first operand in which results can be compared."""
    return tuple(dtype for dtype in record.inputs[0].dtypes[product] if dtype in T)


def realistic_calls(
    record: OpRecord, product: Product, simulated: bool
) -> Iterator[tuple[Workload, DType, CallMeta]]:
    """Yields a call of every realistic size in every type."""
    for workload in record.workloads.accepted:
        for dtype in float_dtypes(record, product):
            yield workload, dtype, build(record, workload, simulated, dtype=dtype, product=product)
