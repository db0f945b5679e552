"""The launcher on the simulated CANN, in this process and without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.cann_sim.build import Installation
from tests.cann_sim.report import HOST_OBJECTS
from tests.cann_sim.runtime import Runtime as Simulator

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad_server.acl.launcher import Launcher
from npugrad_server.acl.layout import arrange
from npugrad_server.acl.libraries import Cann, Loader
from npugrad_server.acl.runtime import Runtime
from npugrad_server.acl.tensor import DeviceTensor


@dataclass
class Rig:
    """Our objects over a simulator that a test can steer.

    Attributes:
        sim: The simulator: memory, streams, plans, counters.
        cann: Our bound functions.
        runtime: Our runtime.
        launcher: Our launcher.
        stream: A raw stream.
    """

    sim: Simulator
    cann: Cann
    runtime: Runtime
    launcher: Launcher
    stream: int
    _addresses: list[int] = field(default_factory=list)

    def upload(self, content: bytes | memoryview) -> int:
        self._addresses.append(self.sim.upload(content))
        return self._addresses[-1]

    def tensors(self, record: OpRecord, call: CallMeta) -> dict[str, DeviceTensor | None]:
        """Operands with data and poisoned or zeroed outputs of a contiguous call, in device memory."""
        made = record.make_inputs(call, np.random.default_rng(1))
        found: dict[str, DeviceTensor | None] = dict.fromkeys(p.name for p in record.inputs + record.outputs)
        arrangement = arrange(record, call)
        for slot in arrangement.inputs:
            array = made[slot.name]
            assert array is not None
            found[slot.name] = DeviceTensor(slot.meta, self.upload(array.tobytes()))
        for slot in arrangement.outputs:
            fill = b"\0" if slot.zeroed else b"\xff"
            found[slot.name] = DeviceTensor(slot.meta, self.upload(fill * max(slot.nbytes, 1)))
        return found

    def host_objects(self) -> list[int]:
        """How many tensors, arrays and scalars, and executors are alive."""
        tensors, *others, executors = (self.sim.counter(name) for name in HOST_OBJECTS)
        return [tensors, sum(others), executors]

    def close(self) -> None:
        self.sim.set_plan("")
        self.sim.call("aclrtDestroyStream", self.stream)
        for address in self._addresses:
            self.sim.call("aclrtFree", address)


@pytest.fixture
def rig(cann_sim: Installation, runtime: Any) -> Iterator[Rig]:
    """Give a rig; afterwards no handle and no executor may be alive."""
    cann = Cann(Loader([cann_sim.libraries]))
    ours = Runtime(cann.runtime)
    made = Rig(runtime, cann, ours, Launcher(cann, ours), runtime.stream())
    yield made
    found = made.host_objects()
    made.close()
    assert found == [0, 0, 0]
