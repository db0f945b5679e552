"""Calls of the demo: inputs of the official example programs and realistic shapes of each operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.workloads import Filled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npugrad.dtypes import DType
    from npugrad.operator import OpRecord


@dataclass(frozen=True)
class Case:
    """One call of the demo.

    Attributes:
        record: The operator.
        title: Description for a newcomer.
        dtype: Element type of its float operands.
        make: Makes the operands; called when the case runs, because some are large.
    """

    record: OpRecord
    title: str
    dtype: DType
    make: Callable[[], Filled]


def official_cases() -> Iterator[Case]:
    """The official example programs, as written and, if that differs, as intended."""
    for record in OPERATORS.values():
        for example in record.workloads.examples:
            title = ", ".join(filter(None, ("official example", example.reading)))
            yield Case(record, title, example.dtype, example.make)


def realistic_cases(quick: bool = False) -> Iterator[Case]:
    """Shapes from real models in each dtype; all dtypes but the first use reduced ones if there are any.

    Args:
        quick: Use the reduced ones for the first dtype as well.
    """
    for record in OPERATORS.values():
        for workload in record.workloads.named.values():
            for index, dtype in enumerate(
                record.inputs[0].dtypes[Product.ATLAS_A2] if workload.shown else ()
            ):
                is_reduced = workload.reduced is not None and (quick or index > 0)
                sizes = workload.reduced if workload.reduced is not None and is_reduced else workload.sizes
                title = f"{workload.model}, reduced" if is_reduced else workload.model
                yield Case(record, title, dtype, partial(_made, record, dtype, sizes))


def _made(record: OpRecord, dtype: DType, sizes: Mapping[str, Any]) -> Filled:
    call = record.build(dtype=dtype, **sizes)
    operands = record.make_inputs(call, np.random.default_rng(20240229))
    if record.workloads.fixed is not None:
        operands |= record.workloads.fixed(sizes)
    return Filled(operands, call.attrs)
