"""How much of a device's own memory a call takes, counted as torch_npu's allocator takes it.

The allocator rounds each buffer up, caches freed memory, and cuts buffers out of segments that go back to the
device only as a whole. Rounding is counted for each buffer; for segments, and for CANN's own use, a part of
the device's memory is left out of the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from npugrad.meta import CallMeta
from npugrad_server.acl.layout import arrange

if TYPE_CHECKING:
    from collections.abc import Hashable

    from npugrad.attributes import AttrValue
    from npugrad.meta import TensorMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_server.pool.types import PlannedCall

_BLOCK_BYTES, _SPARE_BYTES = 512, 32
_SEGMENT_BYTES = 22 * 2**20
"""A segment of 20 MiB for buffers of up to 10 MiB and one of 2 MiB for those of up to 1 MiB: a single buffer
keeps its whole segment allocated, and any running call may own such a buffer."""
_SHARE = 32
"""Besides the segments, `1 / _SHARE` of the free memory is left out: larger buffers come in steps of 2 MiB,
and CANN loads kernels and grows queues after the device has reported its free memory."""
_LEAST_SHARE = 4
"""At most `1 / _LEAST_SHARE` is left out; only tests have devices so small that this matters."""
_KINDS = 1024
"""Kinds of calls whose need is cached."""
_WORKSPACES = 4096
"""Kinds of calls whose workspace is remembered; each takes a few hundred bytes."""
FLOAT64_BYTES = 8
"""Size of an element of the results that a verification compares with."""


@dataclass(frozen=True)
class DeviceNeed:
    """The memory that a call takes if the device has memory of its own.

    Attributes:
        tensor_bytes: Device memory of operands and outputs.
        host_bytes: Host memory outside the arenas: packed operands, and the results of a verification.
        key: Digest of what the workspace depends on; calls with the same key need the same workspace. None
            for a call that needs none.
    """

    tensor_bytes: int = 0
    host_bytes: int = 0
    key: bytes | None = None


def footprint(nbytes: int) -> int:
    """Returns the device memory that a buffer takes; even an empty one has an address."""
    return -(-(nbytes + _SPARE_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES


def workspace_footprint(nbytes: int) -> int:
    """Returns the device memory that a workspace takes; one of 0 bytes takes none."""
    return footprint(nbytes) if nbytes else 0


def largest_workspace(nbytes: int) -> int:
    """Returns the size of the largest workspace that fits into `nbytes` of device memory."""
    return max(nbytes // _BLOCK_BYTES * _BLOCK_BYTES - _SPARE_BYTES, 0)


def budget(free_bytes: int, streams: int) -> int:
    """Returns how much of a device's memory calls may take.

    Args:
        free_bytes: Free memory that the device reports before the first call.
        streams: Calls that run on it at once.
    """
    left_out = streams * _SEGMENT_BYTES + free_bytes // _SHARE
    return free_bytes - min(left_out, free_bytes // _LEAST_SHARE)


def need_of(planned: PlannedCall) -> DeviceNeed:
    """Returns the memory that a call takes, without its workspace, which only the device can tell."""
    if all(meta is None for meta in planned.plan.outputs.values()):
        return DeviceNeed()  # it is answered without looking at its operands
    call, options = planned.plan.record.ordered(planned.plan.call), planned.options
    need = _need_of_kind(
        planned.plan.record,
        call.product,
        options.deterministic,
        tuple(call.inputs.items()),
        tuple(call.attrs.items()),
        tuple(call.outputs.items()),
    )
    wanted = [
        (p, meta)
        for p in planned.plan.record.outputs
        if (meta := planned.plan.outputs.get(p.name)) is not None
    ]
    # Results whose order of axes is not the formula's are reordered afterwards.
    beside = sum(meta.nbytes for param, meta in wanted if not param.ordered(meta).is_contiguous)
    if options.verify:
        beside += sum(meta.size * FLOAT64_BYTES for _, meta in wanted)
    return replace(need, host_bytes=need.host_bytes + beside) if beside else need


@lru_cache(_KINDS)
def _need_of_kind(
    record: OpRecord,
    product: Product,
    deterministic: bool,
    inputs: tuple[tuple[str, TensorMeta | None], ...],
    attrs: tuple[tuple[str, AttrValue], ...],
    outputs: tuple[tuple[str, TensorMeta | None], ...],
) -> DeviceNeed:
    """Cached: arranging costs the front process as much as all the rest, and calls recur."""
    call = CallMeta(dict(inputs), dict(attrs), dict(outputs), product)
    arrangement = arrange(record, call)
    slots = arrangement.inputs + arrangement.outputs
    # Everything that the operator's workspace can depend on.
    seen = (
        record.name,
        product.value,
        deterministic,
        attrs,
        tuple(meta.format.value for _, meta in inputs if meta is not None),
        tuple((slot.name, slot.meta.dtype.value, slot.meta.shape, slot.meta.strides) for slot in slots),
    )
    return DeviceNeed(
        tensor_bytes=sum(footprint(slot.nbytes) for slot in slots),
        host_bytes=sum(slot.nbytes for slot in arrangement.inputs if slot.packed),
        key=blake2b(repr(seen).encode(), digest_size=16).digest(),
    )


class LearnedWorkspaces:
    """How much workspace operators asked for, so that it can be set aside before they ask again.

    Keeps the newest figure for each kind of call, and forgets the least recently used kinds.
    """

    def __init__(self, capacity: int = _WORKSPACES) -> None:
        """Knows nothing yet.

        Args:
            capacity: Kinds of calls to remember.
        """
        self._capacity = capacity
        self._known: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, key: Hashable, nbytes: int) -> None:
        """Notes what an operator asked for."""
        self._known[key] = nbytes
        self._known.move_to_end(key)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def expect(self, key: Hashable) -> int:
        """Returns the bytes that a call is expected to ask for; 0 if unknown."""
        if key not in self._known:
            return 0
        self._known.move_to_end(key)
        return self._known[key]
