"""Runs the two phases of operators with tensors exactly as ordered: formats, strides, nulls, illegal or not.

Order: ``device``, ``launch``, ``cases``, and ``deterministic`` for each case. Without ``launch``, only first
phases run, on one small block of memory that stands in for every tensor, and nothing is computed; each case's
line of `LINES` is written at once, because a first phase may end the process. With it, both phases run,
operands come from `OPERANDS` and results go to `RESULTS`.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from npugrad import get_operator
from npugrad_server.acl.launcher import Launcher
from npugrad_server.acl.libraries import Cann
from npugrad_server.acl.runtime import AclError, Runtime
from npugrad_server.acl.tensor import DeviceTensor
from npugrad_server.backends.npu.bringup import NpuDevice
from npugrad_server.backends.npu.staging import Staging, TensorCopy
from npugrad_server.backends.npu.trials.exchange import (
    LINES,
    OPERANDS,
    RESULTS,
    RawCall,
    part,
    read_contents,
    run_trial,
    write_contents,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from npugrad_server.backends.npu.bringup import DeviceBuffer

    Bytes = npt.NDArray[np.uint8]

_BLOCK_BYTES = 512
_WAIT_S = 300.0


class Phases:
    """One device with one stream."""

    def __init__(self, index: int) -> None:
        """Takes the device."""
        self._cann = Cann()
        self._runtime = Runtime(self._cann.runtime)
        self._launcher = Launcher(self._cann, self._runtime)
        self._device = NpuDevice(index, 1)
        self._stream = self._device.stream()
        self._incoming = Staging(self._device)
        self._block = self._device.empty(_BLOCK_BYTES)

    def set_deterministic(self, wanted: bool) -> None:
        """Sets the mode of all later launches; nothing may be queued."""
        self._runtime.set_deterministic(wanted)

    def plan(self, case: RawCall) -> dict[str, Any]:
        """Runs the first phase; returns ``status`` (None if it was not even called) and ``words``."""
        self._runtime.forget_errors()
        tensors = {
            name: None if meta is None else DeviceTensor(meta, self._block.address)
            for name, meta in case.tensors.items()
        }
        try:
            with self._launcher.plan(get_operator(case.operator), case.attrs, tensors) as plan:
                return {"status": 0, "words": "", "workspace_bytes": plan.workspace_bytes}
        except AclError as error:
            return {"status": error.code or None, "words": str(error)}
        except (ArithmeticError, ValueError) as error:  # a tensor that cannot even be described
            return {"status": None, "words": f"{type(error).__name__}: {error}"}

    def launch(self, case: RawCall, operands: Mapping[str, Bytes]) -> tuple[dict[str, Any], dict[str, Bytes]]:
        """Runs both phases; returns an answer as `plan` does, and on success the outputs' contents."""
        record, raw = get_operator(case.operator), self._stream.raw
        buffers: list[DeviceBuffer] = []

        def take(nbytes: int) -> int:
            buffers.append(self._device.empty(nbytes))
            return buffers[-1].address

        self._runtime.forget_errors()
        tensors = {
            name: None if meta is None else DeviceTensor(meta, take(meta.content_bytes))
            for name, meta in case.tensors.items()
        }
        there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        outputs = {param.name: there[param.name] for param in record.outputs if param.name in there}
        incoming = [TensorCopy(name, content, there[name].address) for name, content in operands.items()]
        self._incoming.copy_in(self._runtime, incoming, raw, self._wait)
        for tensor in outputs.values():
            self._runtime.zero(tensor.address, tensor.meta.content_bytes, raw)
        try:
            with self._launcher.plan(record, case.attrs, tensors) as plan:
                workspace = take(plan.workspace_bytes) if plan.workspace_bytes else 0
                plan.launch(workspace, raw)
        except AclError as error:
            self._wait()
            return {"status": error.code or None, "words": str(error)}, {}
        self._wait()
        return {"status": 0, "words": ""}, {name: self._fetch(tensor) for name, tensor in outputs.items()}

    def _wait(self) -> None:
        self._runtime.wait(self._stream.raw, time.monotonic() + _WAIT_S)

    def _fetch(self, tensor: DeviceTensor) -> Bytes:
        nbytes = tensor.meta.content_bytes
        pinned = self._device.pinned(nbytes)
        if nbytes:
            self._runtime.copy_out(pinned.address, tensor.address, nbytes, self._stream.raw)
            self._wait()
        return pinned.data[:nbytes].copy()


def trial(order: Any, folder: Path) -> Any:
    """Runs every case; the answer has one entry for each."""
    phases = Phases(order["device"])
    cases = [RawCall.from_json(found) for found in order["cases"]]
    if not order["launch"]:
        with (folder / LINES).open("w") as lines:
            for case in cases:
                lines.write(json.dumps(phases.plan(case)) + "\n")
                lines.flush()
        return []
    contents, answers = read_contents(folder / OPERANDS), []
    results: dict[str, Bytes] = {}
    for index, (case, deterministic) in enumerate(zip(cases, order["deterministic"], strict=True)):
        phases.set_deterministic(deterministic)
        names = [name for name in case.tensors if part(index, name) in contents]
        answer, found = phases.launch(case, {name: contents[part(index, name)] for name in names})
        answers.append(answer)
        results |= {part(index, name): content for name, content in found.items()}
    write_contents(folder / RESULTS, results)
    return answers


if __name__ == "__main__":
    run_trial(trial)
