"""What a call takes of a device's own memory, counted as the allocator of torch_npu takes it.

It rounds each buffer up, keeps what is freed for later, and cuts buffers out of segments that go back to the
device only whole. Rounding is counted for each buffer; for segments, and for what CANN takes for itself, a
part of the device's memory is left out of the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad_server.acl.layout import arrange

if TYPE_CHECKING:
    from collections.abc import Hashable

    from npugrad_server.acl.layout import Arrangement
    from npugrad_server.pool.types import PlannedCall

_BLOCK_BYTES, _SPARE_BYTES = 512, 32
_SEGMENT_BYTES = 22 * 2**20
"""A segment of 20 MiB for buffers of up to 10 MiB and one of 2 MiB for those of up to 1 MiB: a single buffer
keeps all of its segment, and each call that runs may be the one that does."""
_SHARE = 32
"""Beyond the segments one part in so many is left out: larger buffers come in steps of 2 MiB, and CANN loads
kernels and grows queues after the device has said what is free."""
_LEAST_SHARE = 4
"""At most one part in so many is left out; only tests have devices that small."""
FLOAT64_BYTES = 8
"""An element of the results that a verification compares with."""


@dataclass(frozen=True)
class DeviceNeed:
    """What a call takes where the device has memory of its own.

    Attributes:
        tensor_bytes: Device memory of operands and outputs.
        host_bytes: Host memory beside the arenas: packed operands, and the results of a verification.
        key: What the workspace depends on; calls with the same key need the same.
    """

    tensor_bytes: int = 0
    host_bytes: int = 0
    key: Hashable = None


def footprint(nbytes: int) -> int:
    """Device memory that a buffer takes; even an empty one has an address."""
    return -(-(nbytes + _SPARE_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES


def workspace_footprint(nbytes: int) -> int:
    """Device memory that a workspace takes; there is none for 0 bytes."""
    return footprint(nbytes) if nbytes else 0


def largest_workspace(nbytes: int) -> int:
    """The largest workspace that takes no more than so much device memory."""
    return max(nbytes // _BLOCK_BYTES * _BLOCK_BYTES - _SPARE_BYTES, 0)


def budget(free_bytes: int, streams: int) -> int:
    """How much of a device's memory calls may have.

    Args:
        free_bytes: What the device says is free before the first call.
        streams: Calls that run on it at once.
    """
    left_out = streams * _SEGMENT_BYTES + free_bytes // _SHARE
    return free_bytes - min(left_out, free_bytes // _LEAST_SHARE)


def need_of(planned: PlannedCall) -> DeviceNeed:
    """Counts what a call takes of a device's own memory; its workspace only the device can tell."""
    if all(meta is None for meta in planned.outputs.values()):
        return DeviceNeed()  # it is answered before anybody looks at its operands
    arrangement = arrange(planned.spec, planned.call)
    slots = arrangement.inputs + arrangement.outputs
    host_bytes = sum(slot.nbytes for slot in arrangement.inputs if slot.packed)
    if planned.options.verify:
        host_bytes += sum(m.size * FLOAT64_BYTES for m in planned.outputs.values() if m is not None)
    return DeviceNeed(
        sum(footprint(slot.nbytes) for slot in slots), host_bytes, _workspace_key(planned, arrangement)
    )


def _workspace_key(planned: PlannedCall, arrangement: Arrangement) -> Hashable:
    """Everything that the operator sees when it says how much workspace it needs."""
    call = planned.call
    return (
        planned.spec.name,
        call.product,
        planned.options.deterministic,
        tuple(call.attrs.items()),
        tuple(
            (slot.name, slot.meta.dtype, slot.meta.shape, slot.meta.strides)
            for slot in arrangement.inputs + arrangement.outputs
        ),
    )
