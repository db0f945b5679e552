"""Small calls of every operator: the record's own samples, and all combinations of what calls may vary."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npugrad_server.acceptance.shapes import float_dtypes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from npugrad.dtypes import DType
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product

_BOTH = (False, True)
_MASKS_2 = ((True, True), (True, False), (False, True))
_MASKS_3 = tuple(mask for mask in itertools.product(_BOTH, repeat=3) if any(mask))

VARIANTS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "multi_scale_deformable_attention_grad": {
        "index_dtype": ("int32", "int64"),
        "grad_output_rank": (3, 4),
        "points": (1, 2),
        "ch": (8, 24),
    },
    "grid_sampler_2d_backward": {
        "interpolation_mode": (0, 1),
        "padding_mode": (0, 1, 2),
        "align_corners": _BOTH,
        "output_mask": _MASKS_2,
    },
    "group_norm_backward": {"with_gamma": _BOTH, "group": (1, 3), "output_mask": _MASKS_3},
    "fused_floyd_attention_grad": {"with_mask": _BOTH, "mask_dtype": ("bool", "uint8"), "d": (32, 64, 128)},
}
"""Keywords of each record's `build`, with the values that all are combined, in every type."""


@dataclass(frozen=True)
class SmallCall:
    """A small legal call.

    Attributes:
        name: For a person.
        dtype: Type of the first operand.
        call: The call.
    """

    name: str
    dtype: DType
    call: CallMeta


SIMULATED_BYTES = 8 * 2**20
"""Largest operands that a simulated device is given here; a few of the combinations have more."""


def small_calls(record: OpRecord, product: Product, simulated: bool) -> Iterator[SmallCall]:
    """Samples of the record, then the combinations; each call once.

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
    variants = VARIANTS.get(record.name, {})
    for dtype in float_dtypes(record, product):
        for values in itertools.product(*variants.values()):
            chosen = dict(zip(variants, values, strict=True))
            name = " ".join(f"{key}={_short(value)}" for key, value in chosen.items())
            yield f"{dtype} {name}", record.build(dtype=dtype, product=product, **chosen)


def _short(value: Any) -> str:
    return "".join("01"[bit] for bit in value) if isinstance(value, tuple) else str(value)
