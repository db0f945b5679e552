"""One stream of the device and the thread that drives it: a call from operands to results.

    copy in -> zero -> phase 1 -> workspace -> wait -> phase 2 -> wait -> copy out -> wait -> give back

Guarantees
    - No device or pinned memory is given back, or used for anything else, before a wait showed that the
      stream is done with it.
    - When that cannot be shown, everything is kept and `DeviceLost` is raised.
    - Results are written to the caller's memory only after the wait that makes them valid.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.errors import DeadlineExceeded, UnsafeLevels
from npugrad_server.acl.faults import Action
from npugrad_server.acl.layout import arrange
from npugrad_server.acl.runtime import AclError
from npugrad_server.acl.tensor import DeviceTensor
from npugrad_server.backends.base import DeviceLost, Timings
from npugrad_server.backends.npu.failures import device_error, device_lost
from npugrad_server.backends.npu.staging import Staging, span_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from npugrad.spec import CallMeta, OpSpec
    from npugrad_server.acl.launcher import Launcher
    from npugrad_server.acl.layout import Arrangement
    from npugrad_server.acl.runtime import Runtime
    from npugrad_server.backends.base import DeviceCall
    from npugrad_server.backends.npu.bringup import DeviceBuffer, NpuDevice

    Array = npt.NDArray[Any]

_SETTLE_S = 10.0
"""Seconds that work already queued has to end after a call failed."""
_PLAN_BYTES = 512
"""Device memory that stands for every tensor when only the workspace is asked for."""


@dataclass
class _Job:
    """One try of a call.

    Attributes:
        spec: The operator.
        call: The call.
        arrangement: How its tensors lie in device memory.
        stream: Raw stream, read for this try.
        buffers: All device memory of the try, held here and nowhere else.
        queued: Whether the stream may have work of it.
    """

    spec: OpSpec
    call: DeviceCall
    arrangement: Arrangement
    stream: int
    buffers: list[DeviceBuffer] = field(default_factory=list)
    queued: bool = False


_kept: list[_Job] = []
"""Memory that a lost device may still touch, until the end of the process."""


class Lane:
    """One stream; for one thread at a time."""

    def __init__(self, device: NpuDevice, runtime: Runtime, launcher: Launcher) -> None:
        """Takes a stream of its own."""
        self._device, self._runtime, self._launcher = device, runtime, launcher
        self._stream = device.stream()
        self._incoming, self._outgoing = Staging(device), Staging(device)

    @property
    def raw_stream(self) -> int:
        """The runtime's handle of the stream, read anew."""
        return self._stream.raw

    def run(self, spec: OpSpec, call: DeviceCall) -> Timings:
        """Runs a call; what the table of codes allows is tried once more.

        Raises:
            DeviceError: The operator or the runtime refused.
            DeviceOutOfMemory: Even after giving back what was cached.
            UnsafeLevels: Values of an operand would lead the device outside its memory.
            DeadlineExceeded: The deadline passed before the launch.
            DeviceLost: The process has to go.
        """
        start = time.perf_counter()
        arrangement = arrange(spec, call.meta)
        operands = _operands(spec, call, arrangement)
        try:
            return self._try(spec, call, arrangement, operands, start)
        except AclError as error:
            action = error.fault.action
            if not action.retries:
                raise device_error(spec.name, error) from None
        try:
            if action is Action.OUT_OF_MEMORY:
                self._device.empty_cache()
            return self._try(spec, call, arrangement, operands, start)
        except AclError as error:
            if error.fault.action.ends_worker:  # giving back the cache met it
                raise device_lost(spec.name, error) from error
            raise device_error(spec.name, error) from None

    def _try(
        self,
        spec: OpSpec,
        call: DeviceCall,
        arrangement: Arrangement,
        operands: Mapping[str, Array],
        start: float,
    ) -> Timings:
        """Runs a call once; an AclError leaves nothing behind, a DeviceLost everything."""
        self._runtime.forget_errors()
        job = _Job(spec, call, arrangement, self._stream.raw)
        try:
            return self._run(job, operands, start)
        except BaseException as error:
            self._settle(job, error)
            raise
        finally:
            job.buffers.clear()

    def _run(self, job: _Job, operands: Mapping[str, Array], start: float) -> Timings:
        tensors = self._allocate(job)
        self._send(job, operands, tensors)
        sent = time.perf_counter()
        with self._launcher.plan(job.spec, job.call.meta.attrs, tensors) as plan:
            workspace = self._take(job, plan.workspace_bytes) if plan.workspace_bytes else 0
            planned = time.perf_counter()
            self._wait(job)
            _check_deadline(job)
            launched = time.perf_counter()
            job.queued = True
            plan.launch(workspace, job.stream)
        self._wait(job)
        done = time.perf_counter()
        self._fetch(job, tensors)
        # Planning goes on beside the copies: only what is left of them afterwards is theirs.
        return Timings(
            copy_in_s=(sent - start) + (launched - planned),
            run_s=(planned - sent) + (done - launched),
            copy_out_s=time.perf_counter() - done,
            workspace_bytes=plan.workspace_bytes,
        )

    def _take(self, job: _Job, nbytes: int) -> int:
        buffer = self._device.empty(nbytes)
        job.buffers.append(buffer)
        return buffer.address

    def _allocate(self, job: _Job) -> dict[str, DeviceTensor | None]:
        tensors: dict[str, DeviceTensor | None] = dict.fromkeys(
            param.name for param in (*job.spec.inputs, *job.spec.outputs)
        )
        for slot in job.arrangement.inputs + job.arrangement.outputs:
            tensors[slot.name] = DeviceTensor(slot.meta, self._take(job, slot.nbytes))
        return tensors

    def _send(
        self, job: _Job, operands: Mapping[str, Array], tensors: Mapping[str, DeviceTensor | None]
    ) -> None:
        addresses = {name: tensor.address for name, tensor in tensors.items() if tensor is not None}
        parts = [(span_bytes(operands[slot.name]), addresses[slot.name]) for slot in job.arrangement.inputs]
        job.queued = True
        self._incoming.copy_in(self._runtime, parts, job.stream, lambda: self._wait(job))
        for slot in job.arrangement.outputs:
            if slot.zeroed and slot.nbytes:
                self._runtime.zero(addresses[slot.name], slot.nbytes, job.stream)

    def _fetch(self, job: _Job, tensors: Mapping[str, DeviceTensor | None]) -> None:
        parts = []
        for slot in job.arrangement.outputs:
            tensor = tensors[slot.name]
            if slot.wanted and tensor is not None:
                parts.append((span_bytes(job.call.outputs[slot.name]), tensor.address))
        job.queued = True
        self._outgoing.copy_out(self._runtime, parts, job.stream, lambda: self._wait(job))

    def _wait(self, job: _Job) -> None:
        self._runtime.wait(job.stream, job.call.give_up_s)
        job.queued = False

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

    @staticmethod
    def _lost(job: _Job, error: AclError, after: BaseException | None = None) -> DeviceLost:
        # The buffers leave the job with its end; a copy of the list keeps them.
        _kept.append(_Job(job.spec, job.call, job.arrangement, job.stream, list(job.buffers)))
        return device_lost(job.spec.name, error, after)

    def workspace_bytes(self, spec: OpSpec, meta: CallMeta) -> int:
        """Workspace that the operator would ask for: the first phase alone, on one small block.

        Raises:
            DeviceError: The operator refused.
            DeviceLost: The process has to go.
        """
        arrangement = arrange(spec, meta)
        self._runtime.forget_errors()
        try:
            block = self._device.empty(_PLAN_BYTES)
            tensors: dict[str, DeviceTensor | None] = dict.fromkeys(
                param.name for param in (*spec.inputs, *spec.outputs)
            )
            for slot in arrangement.inputs + arrangement.outputs:
                tensors[slot.name] = DeviceTensor(slot.meta, block.address)
            with self._launcher.plan(spec, meta.attrs, tensors) as plan:
                return plan.workspace_bytes
        except AclError as error:
            if error.fault.action.ends_worker:
                raise device_lost(spec.name, error) from error
            raise device_error(spec.name, error) from None


def _operands(spec: OpSpec, call: DeviceCall, arrangement: Arrangement) -> dict[str, Array]:
    """The operands as they go down; private copies of those that are packed or checked.

    Raises:
        UnsafeLevels: The record's check of values complains.
    """
    operands: dict[str, Array] = {}
    for slot in arrangement.inputs:
        array = call.inputs[slot.name]
        if array is not None:
            operands[slot.name] = np.array(array, order="C") if slot.packed else array
    complaint = None
    if spec.data_check is not None:
        # It looks at the copies that are sent, so nobody can change them between the look and the launch.
        complaint = spec.data_check({name: operands.get(name) for name in call.inputs})
    if complaint is not None:
        raise UnsafeLevels(f"{spec.name}: {complaint}", operator=spec.name)
    return operands


def _check_deadline(job: _Job) -> None:
    deadline_s = job.call.deadline_s
    if deadline_s is not None and time.monotonic() >= deadline_s:
        raise DeadlineExceeded(
            f"{job.spec.name}: the deadline passed before the launch", operator=job.spec.name
        )
