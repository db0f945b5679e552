"""Checks the device without torch, from loading CANN to a right result, one rung at a time.

Order: ``device``, and ``limit_s``, seconds for each rung. For every rung, one line of `LINES` says that it
begins (``rung``), and another how it ended (``ok``, ``found``, ``seconds``), so that the last line names the
rung that ended the process or never finished. The answer is whether all were ok.
"""

from __future__ import annotations

import faulthandler
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from npugrad.agreement import agreement, computed
from npugrad.ops import OPERATORS
from npugrad.products import Product, chip_kind, product_from_soc
from npugrad_server.acl.bare import BareDevice
from npugrad_server.acl.launcher import Launcher
from npugrad_server.acl.layout import arrange
from npugrad_server.acl.libraries import RUNTIME_LIBRARY, Cann, LibraryError, Loader
from npugrad_server.acl.release import installed_release
from npugrad_server.acl.runtime import AclError, Runtime
from npugrad_server.acl.tensor import DeviceTensor
from npugrad_server.backends.npu.trials.exchange import (
    LINES,
    RESULTS,
    run_trial,
    write_contents,
)
from npugrad_server.npus import and_visibility

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord

    Array = npt.NDArray[Any]
    Work = Callable[[], str]

LEFT_OUT = "left out"
"""Start of ``found`` for an operator that CANN does not have."""
_COPY_BYTES = 1_000_003
_WAIT_SHARE = 0.5
"""Share of a rung's time after which a stream that is not done counts as hung."""


class Wrong(Exception):
    """The result is not the expected one."""


class Ladder:
    """The rungs; each returns what it found, or raises."""

    def __init__(self, index: int, wait_s: float) -> None:
        """Touches nothing.

        Args:
            index: Number of the device.
            wait_s: Seconds that a stream has to finish.
        """
        self._wait_s = wait_s
        self.index, self.product = index, Product.ATLAS_A2
        self.contents: dict[str, npt.NDArray[np.uint8]] = {}
        self._loader = Loader()

    def rungs(self) -> dict[str, Work]:
        """The rungs that each depend on those before, by name."""
        return {
            "load the runtime": self._load_runtime,
            "load the operator libraries": self._load_operators,
            "aclInit": self._initialize,
            "find the devices": self._count,
            "set the device": self._take,
            "make a stream": self._make_stream,
            "allocate memory": self._allocate,
            "copy to the device": self._copy_in,
            "copy back": self._copy_out,
            "synchronize": self._synchronize,
        }

    def operators(self) -> dict[str, Work]:
        """One rung for each operator of the product, by name."""
        records = [record for record in OPERATORS.values() if self.product in record.products]
        return {f"run {record.name}": partial(self._run, record) for record in records}

    def close(self) -> str:
        """Releases everything."""
        self._device.close()
        return "memory, stream and device are given back"

    def _load_runtime(self) -> str:
        self._loader.require(RUNTIME_LIBRARY)
        return "; ".join(map(str, self._loader.attempts))

    def _load_operators(self) -> str:
        self._cann = Cann(self._loader)
        self._runtime = Runtime(self._cann.runtime)
        self._launcher = Launcher(self._cann, self._runtime, installed_release(self._runtime))
        self._device = BareDevice(self._runtime, self._loader)
        return f"layout {self._cann.layout}: {', '.join(self._cann.libraries)}"

    def _initialize(self) -> str:
        self._runtime.initialize()
        return f"CANN {installed_release(self._runtime) or 'of unknown release'}"

    def _count(self) -> str:
        count = self._runtime.device_count()
        if self.index >= count:
            raise Wrong(and_visibility(f"found {count} devices; expected one that is number {self.index}"))
        return f"{count}"

    def _take(self) -> str:
        self._device.take(self.index)
        soc = self._runtime.soc_name()
        self.product = product_from_soc(soc) or self.product
        return f"{soc}, {chip_kind(soc)}"

    def _make_stream(self) -> str:
        self._stream = self._device.stream()
        free, total = self._runtime.memory_bytes()
        return f"{free >> 20} of {total >> 20} MiB of device memory are free"

    def _allocate(self) -> str:
        self._there = self._device.allocate(_COPY_BYTES)
        (self._source, source), (self._target, self._back) = (
            self._device.pinned(_COPY_BYTES) for _ in range(2)
        )
        self._sent = np.random.default_rng(0).integers(0, 256, _COPY_BYTES, np.uint8)
        source[:], self._back[:] = self._sent, 0
        return f"{_COPY_BYTES} bytes on the device, twice as many pinned"

    def _copy_in(self) -> str:
        self._runtime.copy_in(self._there, self._source, _COPY_BYTES, self._stream)
        self._wait()
        return f"{_COPY_BYTES} bytes"

    def _copy_out(self) -> str:
        self._runtime.copy_out(self._target, self._there, _COPY_BYTES, self._stream)
        return "queued"

    def _synchronize(self) -> str:
        self._wait()
        wrong = int(np.count_nonzero(self._back != self._sent))
        if wrong:
            raise Wrong(f"found {wrong} of {_COPY_BYTES} bytes changed on the way; expected none")
        return f"the same {_COPY_BYTES} bytes"

    def _run(self, record: OpRecord) -> str:
        missing = self._launcher.missing(record)
        if missing:  # the step about functions tells whether this CANN should have it
            return f"{LEFT_OUT}: {missing}"
        call = next(iter(record.samples(self.product))).call
        inputs = record.make_inputs(call, np.random.default_rng(0))
        outputs = self._launch(record, call, inputs)
        golden = computed(record, inputs, call.attrs, outputs)
        found = agreement(record, inputs, call.attrs, outputs, golden)
        if not found.ok:
            self._keep(record, {**inputs, **outputs, **{f"{n}.expected": golden[n] for n in golden}})
            raise Wrong(str(found))
        return f"{', '.join(outputs)} right"

    def _launch(
        self, record: OpRecord, call: CallMeta, inputs: Mapping[str, Array | None]
    ) -> dict[str, Array]:
        tensors: dict[str, DeviceTensor | None] = dict.fromkeys(
            p.name for p in record.inputs + record.outputs
        )
        arrangement = arrange(record, call)
        for slot in arrangement.inputs:
            array = inputs[slot.name]
            if array is not None:
                tensors[slot.name] = DeviceTensor(slot.meta, self._upload(np.ascontiguousarray(array)))
        for slot in arrangement.outputs:
            tensors[slot.name] = DeviceTensor(slot.meta, self._device.allocate(slot.nbytes))
            self._runtime.zero(tensors[slot.name].address, slot.nbytes, self._stream)  # type: ignore[union-attr]
        with self._launcher.plan(record, call.attrs, tensors) as plan:
            workspace = self._device.allocate(plan.workspace_bytes) if plan.workspace_bytes else 0
            plan.launch(workspace, self._stream)
        self._wait()
        return {
            slot.name: self._download(tensors[slot.name].address, slot.nbytes)  # type: ignore[union-attr]
            .view(slot.meta.dtype.numpy)
            .reshape(slot.meta.shape)
            for slot in arrangement.outputs
            if slot.wanted
        }

    def _upload(self, array: Array) -> int:
        there = self._device.allocate(array.nbytes)
        address, memory = self._device.pinned(array.nbytes)
        memory[:] = array.reshape(-1).view(np.uint8)
        self._runtime.copy_in(there, address, array.nbytes, self._stream)
        self._wait()
        return there

    def _download(self, there: int, nbytes: int) -> npt.NDArray[np.uint8]:
        address, memory = self._device.pinned(nbytes)
        self._runtime.copy_out(address, there, nbytes, self._stream)
        self._wait()
        return memory.copy()

    def _keep(self, record: OpRecord, arrays: Mapping[str, Array | None]) -> None:
        for name, array in arrays.items():
            if array is not None:
                self.contents[f"{record.name}/{name}"] = (
                    np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                )

    def _wait(self) -> None:
        self._runtime.wait(self._stream, time.monotonic() + self._wait_s)


class Climb:
    """Climbs a ladder and logs each rung."""

    def __init__(self, ladder: Ladder, lines: TextIO, limit_s: float) -> None:
        """Does not start yet."""
        self._ladder, self._lines, self._limit_s = ladder, lines, limit_s

    def all(self) -> bool:
        """Runs the rungs in turn, up to the first that fails; operators may fail individually."""
        if any(self._step(name, work) is not None for name, work in self._ladder.rungs().items()):
            return False
        failures = []
        for name, work in self._ladder.operators().items():
            failures.append(self._step(name, work))
            if isinstance(failures[-1], AclError) and failures[-1].fault.action.ends_worker:
                return False
        return self._step("give back", self._ladder.close) is None and not any(failures)

    def _step(self, name: str, work: Work) -> Exception | None:
        self._tell(rung=name)
        # In a C thread: it ends the process even while a function of CANN does not return.
        faulthandler.dump_traceback_later(self._limit_s, exit=True)
        start = time.perf_counter()
        failure: Exception | None = None
        try:
            found = work()
        except Exception as error:
            kind = "" if isinstance(error, (AclError, Wrong, LibraryError)) else f"{type(error).__name__}: "
            failure, found = error, f"{kind}{error}"
        faulthandler.cancel_dump_traceback_later()
        seconds = time.perf_counter() - start
        self._tell(rung=name, ok=failure is None, found=found, seconds=round(seconds, 4))
        return failure

    def _tell(self, **line: Any) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()


def trial(order: Any, folder: Path) -> bool:
    """Runs the whole ladder."""
    faulthandler.enable()
    ladder = Ladder(order["device"], _WAIT_SHARE * order["limit_s"])
    with (folder / LINES).open("w") as lines:
        ok = Climb(ladder, lines, order["limit_s"]).all()
    write_contents(folder / RESULTS, ladder.contents)
    return ok


if __name__ == "__main__":
    run_trial(trial)
