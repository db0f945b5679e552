"""Small edge cases of an operator: nothing to compute, unusual layouts, non-finite values, and ties."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from npugrad.dtypes import DType
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord

    Operands = dict[str, npt.NDArray[Any] | None]

NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
_LARGE_BYTES = 2**17


@dataclass(frozen=True)
class Edge:
    """A legal call whose results are easily wrong.

    Attributes:
        kind: What is odd about it: a size of 0, strides, one value that is not finite, or operands on ties,
            where a gradient jumps. (Calls that fill a device are `Workloads.huge`.)
        name: Name for display.
        call: The call.
        make: Creates its operands, contiguous.
    """

    kind: Literal["empty", "strided", "non-finite", "ties"]
    name: str
    call: CallMeta
    make: Callable[[], Operands]


def edges(record: OpRecord, dtype: DType, product: Product = Product.ATLAS_A2) -> Iterator[Edge]:
    """Yields the edge cases of an operator.

    Args:
        record: The operator.
        dtype: Type of its first operand; empty and strided calls keep that of their samples.
        product: Product of the calls; it must have the operator.
    """
    yield from _of_samples(record, product)
    tiny = record.build(dtype=dtype, product=product, **record.workloads.named["tiny"].sizes)
    floats = [name for name, meta in tiny.inputs.items() if meta is not None and "float" in meta.dtype]
    for index, name in enumerate(floats):
        # Where the reference is slow, only one value, in turn.
        values = NOT_FINITE if tiny.tensor(name).nbytes < _LARGE_BYTES else (NOT_FINITE[index % 3],)
        for value in values:
            yield Edge("non-finite", f"{name} {value}", tiny, _with_value(record, tiny, name, value))
    if record.workloads.ties is not None:
        variants = record.workloads.variants
        for values in itertools.product(*variants.values()):
            chosen = dict(zip(variants, values, strict=True))
            sizes = {**record.workloads.named["tiny"].sizes, **chosen}
            call = record.build(dtype=dtype, product=product, **sizes)
            words = " ".join(f"{key}={value}" for key, value in chosen.items())
            yield Edge("ties", f"ties {words}", call, _on_ties(record, call))


def _of_samples(record: OpRecord, product: Product) -> Iterator[Edge]:
    for sample in record.samples(product):
        metas = [meta for meta in sample.call.inputs.values() if meta is not None]
        if any(not meta.size for meta in metas):
            yield Edge("empty", sample.name, sample.call, _plain(record, sample.call))
        elif not all(meta.is_contiguous for meta in metas):
            yield Edge("strided", sample.name, sample.call, _plain(record, sample.call))


def _plain(record: OpRecord, call: CallMeta) -> Callable[[], Operands]:
    return lambda: record.make_inputs(call, np.random.default_rng(5))


def _with_value(record: OpRecord, call: CallMeta, name: str, value: float) -> Callable[[], Operands]:
    def make() -> Operands:
        operands = _plain(record, call)()
        array = operands[name]
        if array is not None:
            array = operands[name] = array.copy()
            array.reshape(-1)[array.size // 2] = value
        return operands

    return make


def _on_ties(record: OpRecord, call: CallMeta) -> Callable[[], Operands]:
    def make() -> Operands:
        operands = _plain(record, call)()
        if record.workloads.ties is not None:
            record.workloads.ties(call, operands)
        return operands

    return make
