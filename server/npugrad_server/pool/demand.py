"""How many bytes a call needs, exactly and before any of them is touched; and whether they can ever fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad.errors import CallTooLarge
from npugrad_server.pool.regions import aligned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.spec import TensorMeta
    from npugrad_server.pool.types import PlannedCall

_FLOAT64_BYTES = 8


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in one region.

    Attributes:
        offsets: First byte of each tensor, counted from the start of the region.
        nbytes: Length of the region.
    """

    offsets: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True)
class Demand:
    """What a call needs.

    Attributes:
        inputs: Contents of the operands, as they travel.
        outputs: Wanted outputs.
        memory_bytes: What the device makes of them: contiguous copies of other layouts, and the float64
            results of a verification.
    """

    inputs: Layout
    outputs: Layout
    memory_bytes: int


def demand_of(planned: PlannedCall) -> Demand:
    """Counts what a call needs."""
    operands = [meta for meta in planned.call.inputs.values() if meta is not None]
    memory = sum(meta.nbytes for meta in operands if not meta.is_contiguous)
    if planned.options.verify:
        memory += sum(meta.size * _FLOAT64_BYTES for meta in planned.outputs.values() if meta is not None)
    return Demand(
        inputs=_layout({name: _content_bytes(meta) for name, meta in planned.call.inputs.items()}),
        outputs=_layout({name: _tensor_bytes(meta) for name, meta in planned.outputs.items()}),
        memory_bytes=memory,
    )


def _content_bytes(meta: TensorMeta | None) -> int | None:
    return None if meta is None else meta.content_bytes


def _tensor_bytes(meta: TensorMeta | None) -> int | None:
    return None if meta is None else meta.nbytes


def _layout(sizes: Mapping[str, int | None]) -> Layout:
    offsets: dict[str, int] = {}
    end = 0
    for name, nbytes in sizes.items():
        if nbytes is not None:
            offsets[name] = end
            end += aligned(nbytes)
    return Layout(offsets, end)


def check_fits(
    operator: str, demand: Demand, *, input_arena_bytes: int, output_arena_bytes: int, memory_bytes: int
) -> None:
    """Refuses what can never fit.

    Raises:
        CallTooLarge: Operands, results or device memory exceed what there is; the message names the setting.
    """
    for what, found, limit, setting in (
        ("operands", demand.inputs.nbytes, input_arena_bytes, "input_arena_bytes"),
        ("results", demand.outputs.nbytes, output_arena_bytes, "output_arena_bytes"),
        ("contiguous copies on the device", demand.memory_bytes, memory_bytes, "device_memory_bytes"),
    ):
        if found > limit:
            raise CallTooLarge(
                f"{operator}: found {found} bytes of {what}; expected at most {limit} (setting {setting})",
                operator=operator,
            )
