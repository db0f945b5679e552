"""One stream of the device and the thread that drives it, for a call from operands to results.

    copy in -> zero -> phase 1 -> workspace -> phase 2 -> copy out -> wait -> deliver -> give back

Everything is queued before the host waits once, so the device goes from stage to stage on its own; the first
phase and the pool's answer about the workspace overlap the copies. Only a call larger than its pinned memory
also waits in between.

Guarantees
    - No device or pinned memory is released or reused before a wait shows that the stream is done with it.
    - If that cannot be shown, everything is kept and `DeviceLost` is raised.
    - Results are written to the caller's memory only after the wait that makes them valid.
    - The callbacks in between (for room, or whether anybody still waits) may refuse with any exception:
      nothing is launched, and everything is released.
    - Workspace is asked for once, however often the call is tried.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad_server.acl.faults import Action
from npugrad_server.acl.layout import Arrangement, arrange
from npugrad_server.acl.runtime import AclError, concerning
from npugrad_server.acl.tensor import DeviceTensor
from npugrad_server.backends.base import DeviceLost, Timings
from npugrad_server.backends.npu.clock import EventMark, StreamClock
from npugrad_server.backends.npu.failures import device_error, device_lost
from npugrad_server.backends.npu.staging import Staging, TensorCopy, deliver, span_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad_server.acl.launcher import Launcher
    from npugrad_server.acl.layout import Slot
    from npugrad_server.acl.runtime import Runtime
    from npugrad_server.backends.base import DeviceCall
    from npugrad_server.backends.npu.bringup import DeviceBuffer, NpuDevice

    Array = npt.NDArray[Any]

_SETTLE_S = 10.0
"""Seconds that queued work has to finish after a call failed."""
_PLAN_BYTES = 512
"""Bytes of device memory that stand in for every tensor if only the workspace is asked for."""


@dataclass
class _Job:
    """One call, tried once or twice.

    Attributes:
        record: The operator.
        call: The call.
        arrangement: How its tensors lie in device memory.
        operands: The operands as they are sent.
        start_s: `time.perf_counter()` of its start.
        reserved_bytes: Workspace that the pool has granted.
        stream: Raw stream, read for each try.
        buffers: All device memory of the try, referenced only here.
        queued: Whether work of the try may be on the stream.
    """

    record: OpRecord
    call: DeviceCall
    arrangement: Arrangement
    operands: Mapping[str, Array]
    start_s: float
    reserved_bytes: int = 0
    stream: int = 0
    buffers: list[DeviceBuffer] = field(default_factory=list)
    queued: bool = False


_kept: list[_Job] = []
"""Memory that a lost device may still touch, kept until the process ends."""


class Lane:
    """One stream; for one thread at a time."""

    def __init__(self, device: NpuDevice, runtime: Runtime, launcher: Launcher) -> None:
        """Takes its own stream.

        Raises:
            AclError: CANN has no event for it.
        """
        self._device, self._runtime, self._launcher = device, runtime, launcher
        self._stream = device.stream()
        self._clock = StreamClock(runtime)
        self._incoming, self._outgoing = Staging(device), Staging(device)

    @property
    def raw_stream(self) -> int:
        """The runtime's handle of the stream, read anew."""
        return self._stream.raw

    def run(self, record: OpRecord, call: DeviceCall) -> Timings:
        """Runs a call, and once more if the table of codes allows it.

        Raises:
            DeviceError: The operator or the runtime refused.
            DeviceOutOfMemory: There is not enough memory, even after releasing what was cached.
            CallPostponed: The pool has no room for its workspace now.
            CallAbandoned: Nobody waits for it any more.
            DeadlineExceeded: The deadline passed before the launch.
            DeviceLost: The process must exit.
        """
        start_s = time.perf_counter()
        arrangement: Arrangement | None = call.memo.get(Arrangement)
        if arrangement is None:
            call.memo[Arrangement] = arrangement = arrange(record, call.meta)
        job = _Job(record, call, arrangement, _operands(call, arrangement), start_s)
        try:
            return self._try(job)
        except AclError as error:
            action = error.fault.action
            if not action.retries:
                raise device_error(record.name, error, call.meta) from None
        try:
            if action is Action.OUT_OF_MEMORY:
                self._device.empty_cache()
            return self._try(job)
        except AclError as error:
            if error.fault.action.ends_worker:  # hit while emptying the cache
                raise device_lost(record.name, error) from error
            raise device_error(record.name, error, call.meta) from None

    def _try(self, job: _Job) -> Timings:
        """Runs a call once; releases all its memory, unless it raises DeviceLost."""
        self._runtime.forget_errors()
        job.stream = self._stream.raw
        try:
            timings = self._run(job)
        except BaseException as error:
            self._settle(job, error)
            job.buffers.clear()
            raise
        job.buffers.clear()
        return timings

    def _run(self, job: _Job) -> Timings:
        job.call.check_wanted()
        tensors = self._allocate(job)
        sent, fetched = _sent(job, tensors), _fetched(job, tensors)
        # Takes all pinned memory first: taking it may stall the device, so not while the operator runs.
        self._incoming.reserve(sent)
        self._outgoing.reserve(fetched)
        job.queued = True
        self._mark(job, EventMark.BEGUN)
        begun_s = time.perf_counter()
        self._incoming.copy_in(self._runtime, sent, job.stream, lambda: self._turn(job))
        self._zero(job, tensors)
        self._mark(job, EventMark.SENT)
        workspace_bytes = self._launch(job, tensors)
        self._mark(job, EventMark.RAN)
        arriving = self._outgoing.copy_out(self._runtime, fetched, job.stream, lambda: self._wait(job))
        self._mark(job, EventMark.FETCHED)
        self._wait(job)
        job.queued = False
        arrived_s = time.perf_counter()
        deliver(arriving)
        return Timings(
            copy_in_s=begun_s - job.start_s + self._clock.seconds(EventMark.BEGUN, EventMark.SENT),
            run_s=self._clock.seconds(EventMark.READY, EventMark.RAN),
            copy_out_s=self._clock.seconds(EventMark.RAN, EventMark.FETCHED)
            + time.perf_counter()
            - arrived_s,
            workspace_bytes=workspace_bytes,
        )

    def _launch(self, job: _Job, tensors: Mapping[str, DeviceTensor | None]) -> int:
        """Runs both phases, the first during the copies; returns the bytes of workspace."""
        with self._launcher.plan(job.record, job.call.meta.attrs, tensors) as plan:
            if plan.workspace_bytes != job.reserved_bytes:  # else an earlier try has reserved it
                job.call.reserve_workspace(plan.workspace_bytes)
                job.reserved_bytes = plan.workspace_bytes
            workspace = self._take(job, "workspace", plan.workspace_bytes) if plan.workspace_bytes else 0
            job.call.check_wanted()
            self._mark(job, EventMark.READY)
            plan.launch(workspace, job.stream)
            return plan.workspace_bytes

    def _take(self, job: _Job, what: str, nbytes: int) -> int:
        """Allocates device memory for one tensor or the workspace.

        It is not part of one block for the whole call: the allocator serves either from its cache, but may
        have room for several small blocks and not for their sum; and bounds checkers see the end of each.
        """
        with concerning(f"{what} ({nbytes} bytes)"):
            buffer = self._device.empty(nbytes)
        job.buffers.append(buffer)
        return buffer.address

    def _allocate(self, job: _Job) -> dict[str, DeviceTensor | None]:
        tensors: dict[str, DeviceTensor | None] = dict.fromkeys(
            param.name for param in (*job.record.inputs, *job.record.outputs)
        )
        for slot in job.arrangement.inputs + job.arrangement.outputs:
            tensors[slot.name] = DeviceTensor(slot.meta, self._take(job, slot.name, slot.nbytes))
        return tensors

    def _zero(self, job: _Job, tensors: Mapping[str, DeviceTensor | None]) -> None:
        for slot in job.arrangement.outputs:
            tensor = tensors[slot.name]
            if slot.zeroed and slot.nbytes and tensor is not None:
                with concerning(slot.name):
                    self._runtime.zero(tensor.address, slot.nbytes, job.stream)

    def _mark(self, job: _Job, mark: EventMark) -> None:
        self._clock.set(mark, job.stream, lambda: self._wait(job))

    def _wait(self, job: _Job) -> None:
        self._runtime.wait(job.stream, job.call.give_up_s)

    def _turn(self, job: _Job) -> None:
        """Makes room for the next part of a large operand."""
        self._wait(job)
        job.call.check_wanted()

    def _settle(self, job: _Job, error: BaseException) -> None:
        """Makes sure that the stream is done with the job's memory.

        Raises:
            DeviceLost: It is not, or the device failed.
        """
        if isinstance(error, AclError) and error.fault.action.ends_worker:
            raise self._lost(job, error) from error
        if not job.queued:
            return
        try:
            self._runtime.wait(job.stream, max(job.call.give_up_s, time.monotonic() + _SETTLE_S))
        except AclError as later:
            raise self._lost(job, later, error) from error
        job.queued = False

    @staticmethod
    def _lost(job: _Job, error: AclError, after: BaseException | None = None) -> DeviceLost:
        _kept.append(job)
        return device_lost(job.record.name, error, after)

    def workspace_bytes(self, record: OpRecord, meta: CallMeta) -> int:
        """Workspace that the operator would ask for, by running only the first phase on one small block.

        Raises:
            DeviceError: The operator refused.
            DeviceLost: The process must exit.
        """
        arrangement = arrange(record, meta)
        self._runtime.forget_errors()
        try:
            with concerning(f"memory to plan with ({_PLAN_BYTES} bytes)"):
                block = self._device.empty(_PLAN_BYTES)
            tensors: dict[str, DeviceTensor | None] = dict.fromkeys(
                param.name for param in (*record.inputs, *record.outputs)
            )
            for slot in arrangement.inputs + arrangement.outputs:
                tensors[slot.name] = DeviceTensor(slot.meta, block.address)
            with self._launcher.plan(record, meta.attrs, tensors) as plan:
                return plan.workspace_bytes
        except AclError as error:
            if error.fault.action.ends_worker:
                raise device_lost(record.name, error) from error
            raise device_error(record.name, error, meta) from None

    def close(self) -> None:
        """Destroys the events; no call may be running.

        Raises:
            AclError: CANN refused.
        """
        self._clock.close()


def _operands(call: DeviceCall, arrangement: Arrangement) -> dict[str, Array]:
    """The operands as they are sent."""
    operands: dict[str, Array] = {}
    for slot in arrangement.inputs:
        array = call.inputs[slot.name]
        if array is not None:
            operands[slot.name] = np.array(array, order="C") if slot.packed else array
    return operands


def _sent(job: _Job, tensors: Mapping[str, DeviceTensor | None]) -> list[TensorCopy]:
    """The operands, and where each goes."""
    return _parts(job.arrangement.inputs, job.operands, tensors)


def _fetched(job: _Job, tensors: Mapping[str, DeviceTensor | None]) -> list[TensorCopy]:
    """The wanted outputs, and where each comes from."""
    wanted = [slot for slot in job.arrangement.outputs if slot.wanted]
    return _parts(wanted, job.call.outputs, tensors)


def _parts(
    slots: Sequence[Slot], arrays: Mapping[str, Array], tensors: Mapping[str, DeviceTensor | None]
) -> list[TensorCopy]:
    addresses = {name: tensor.address for name, tensor in tensors.items() if tensor is not None}
    return [TensorCopy(slot.name, span_bytes(arrays[slot.name]), addresses[slot.name]) for slot in slots]
