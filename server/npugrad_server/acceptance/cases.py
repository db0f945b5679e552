"""Small calls of every operator: the record's own samples, and all combinations of its variants."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npugrad_server.acceptance.shapes import float_dtypes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.dtypes import DType
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product


@dataclass(frozen=True)
class SmallCall:
    """A small legal call.

    Attributes:
        name: Readable name.
        dtype: Type of the first operand.
        call: The call.
    """

    name: str
    dtype: DType
    call: CallMeta


SIMULATED_BYTES = 8 * 2**20
"""Maximum bytes of operands for a simulated device; a few of the combinations have more."""


def small_calls(record: OpRecord, product: Product, simulated: bool) -> Iterator[SmallCall]:
    """Yields the samples of the record, then the combinations, each call once.

    Args:
        record: The operator.
        product: Product of the device.
        simulated: Whether to leave out what exceeds `SIMULATED_BYTES`.
    """
    seen: set[str] = set()
    for name, call in itertools.chain(_samples(record, product), _combined(record, product)):
        key = repr((sorted(call.inputs.items()), sorted(call.attrs.items()), sorted(call.outputs.items())))
        first = call.inputs[record.inputs[0].name]
        nbytes = sum(meta.nbytes for meta in call.inputs.values() if meta is not None)
        if first is not None and key not in seen and not (simulated and nbytes > SIMULATED_BYTES):
            seen.add(key)
            yield SmallCall(name, first.dtype, call)


def _samples(record: OpRecord, product: Product) -> Iterator[tuple[str, CallMeta]]:
    for sample in record.samples(product):
        yield f"sample {sample.name}", sample.call


def _combined(record: OpRecord, product: Product) -> Iterator[tuple[str, CallMeta]]:
    variants = record.workloads.variants
    for dtype in float_dtypes(record, product):
        for values in itertools.product(*variants.values()):
            chosen = dict(zip(variants, values, strict=True))
            name = " ".join(f"{key}={_short(value)}" for key, value in chosen.items())
            yield f"{dtype} {name}", record.build(dtype=dtype, product=product, **chosen)


def _short(value: Any) -> str:
    return "".join("01"[bit] for bit in value) if isinstance(value, tuple) else str(value)
