"""How many bytes a call needs, exactly and before any of them is touched; and whether they can ever fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad.errors import CallTooLarge
from npugrad_server.pool.device_memory import FLOAT64_BYTES, need_of
from npugrad_server.pool.regions import aligned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.meta import TensorMeta
    from npugrad_server.pool.types import PlannedCall


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in one region.

    Attributes:
        offsets: First byte of each tensor, counted from the start of the region, where the first one lies.
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
        memory_bytes: What the worker makes of them in the host's memory: contiguous copies of other layouts,
            and the float64 results of a verification.
        unused_bytes: The largest operand that is not kept. It takes no memory, but has a limit all the same:
            that of an operand that is kept as it came or as a copy, whichever is the higher.
        device_bytes: What its tensors take of the device's own memory.
        workspace_key: What its workspace there depends on; None where the device has no memory of its own.
    """

    inputs: Layout
    outputs: Layout
    memory_bytes: int
    unused_bytes: int = 0
    device_bytes: int = 0
    workspace_key: bytes | None = None


def demand_of(planned: PlannedCall, *, own_memory: bool = False) -> Demand:
    """What a call needs, counted once for each plan.

    Args:
        planned: The call.
        own_memory: Whether devices have memory of their own, and take operands in other layouts.
    """
    demands = planned.plan.demands
    if own_memory not in demands:
        demands[own_memory] = _count(planned, own_memory)
    return demands[own_memory]


def _count(planned: PlannedCall, own_memory: bool) -> Demand:
    kept = {name: meta for name, meta in planned.plan.call.inputs.items() if name not in planned.plan.unused}
    inputs = _layout({name: _content_bytes(meta) for name, meta in kept.items()})
    outputs = _layout({name: _tensor_bytes(meta) for name, meta in planned.plan.outputs.items()})
    unused = max((planned.plan.call.tensor(name).nbytes for name in planned.plan.unused), default=0)
    if own_memory:
        need = need_of(planned)
        return Demand(inputs, outputs, need.host_bytes, unused, need.tensor_bytes, need.key)
    memory = copied_bytes(planned)
    if planned.options.verify:
        memory += sum(meta.size * FLOAT64_BYTES for meta in planned.plan.outputs.values() if meta is not None)
    return Demand(inputs, outputs, memory, unused)


def copied_bytes(planned: PlannedCall) -> int:
    """Bytes of operands and results that are not contiguous with their axes in the order of the formula."""
    outputs = ((param, planned.plan.outputs.get(param.name)) for param in planned.plan.record.outputs)
    results = [param.ordered(meta) for param, meta in outputs if meta is not None]
    # Where nothing is wanted the operands may be anything, and are not looked at.
    call = planned.plan.record.ordered(planned.plan.call) if results else planned.plan.call
    tensors = [*call.inputs.values(), *results]
    return sum(meta.nbytes for meta in tensors if meta is not None and not meta.is_contiguous)


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
    operator: str,
    demand: Demand,
    *,
    input_arena_bytes: int,
    output_arena_bytes: int,
    memory_bytes: int,
    device_bytes: int | None = None,
) -> None:
    """Refuses what can never fit.

    Args:
        operator: Its name.
        demand: What a call needs.
        input_arena_bytes: Memory for operands.
        output_arena_bytes: Memory for results.
        memory_bytes: Host memory for what a worker makes of operands.
        device_bytes: The roomiest device's own memory; None where nothing bounds it, or not yet.

    Raises:
        CallTooLarge: It exceeds one of them; the message names the setting.
    """
    kept, copied = (
        (input_arena_bytes, "setting input_arena_bytes"),
        (memory_bytes, "setting device_memory_bytes"),
    )
    for what, found, limit, setting in (
        ("operands", demand.inputs.nbytes, input_arena_bytes, "setting input_arena_bytes"),
        ("results", demand.outputs.nbytes, output_arena_bytes, "setting output_arena_bytes"),
        ("copies in the worker", demand.memory_bytes, memory_bytes, "setting device_memory_bytes"),
        ("an operand that is not used", demand.unused_bytes, *max(kept, copied)),
        ("tensors on the device", demand.device_bytes, device_bytes, "what the roomiest device has free"),
    ):
        if limit is not None and found > limit:
            raise CallTooLarge(
                f"{operator}: found {found} bytes of {what}; expected at most {limit} ({setting})",
                operator=operator,
            )
