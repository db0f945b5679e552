"""A small GroupNorm call in pieces, so that a test can do any one step wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tests.cann_sim.runtime import H2D, Runtime

OP = "aclnnGroupNormBackward"
N, C, HXW, GROUP = 1, 16, 8, 2
SHAPES = {
    "gradOut": (N, C, HXW),
    "input": (N, C, HXW),
    "mean": (N, GROUP),
    "rstd": (N, GROUP),
    "gamma": (C,),
    "gradInput": (N, C, HXW),
    "gradGammaOut": (C,),
    "gradBetaOut": (C,),
}
FLOAT = 0
_INPUTS = ("gradOut", "input", "mean", "rstd", "gamma")


@dataclass
class Rig:
    """Operands of one call, in allocations of their own.

    Attributes:
        runtime: The simulator, with a device set.
        addresses: Device memory of each operand.
        tensors: Its aclTensor.
        workspace: Memory of the workspace, once there is one.
    """

    runtime: Runtime
    addresses: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    workspace: int = 0

    def __post_init__(self) -> None:
        for name, shape in SHAPES.items():
            self.addresses[name] = self.runtime.upload(np.ones(shape, np.float32).tobytes())
            self.tensors[name] = self.runtime.tensor(FLOAT, shape, self.addresses[name])

    def replace(self, name: str, address: int, **options: object) -> None:
        """Puts an operand elsewhere."""
        self.runtime.call("aclDestroyTensor", self.tensors[name])
        self.tensors[name] = self.runtime.tensor(FLOAT, SHAPES[name], address, **options)  # type: ignore[arg-type]

    def plan(self) -> tuple[int, int]:
        """Phase 1: size of the workspace, and the executor."""
        mask = self.runtime.bool_array((True, True, True))
        inputs = [self.tensors[name] for name in _INPUTS]
        outputs = [self.tensors[name] for name in SHAPES if name not in _INPUTS]
        try:
            return self.runtime.plan(OP, *inputs, N, C, HXW, GROUP, mask, *outputs)
        finally:
            self.runtime.call("aclDestroyBoolArray", mask)

    def launch(self, stream: int, planned: tuple[int, int] | None = None) -> None:
        """Phase 2, after phase 1 unless that has run."""
        size, executor = planned or self.plan()
        if not self.workspace:
            self.workspace = self.runtime.malloc(size)
        self.runtime.call(OP, self.workspace, size, executor, stream)

    def close(self) -> None:
        """Frees and destroys everything."""
        for handle in self.tensors.values():
            self.runtime.call("aclDestroyTensor", handle)
        for address in (*self.addresses.values(), *filter(None, [self.workspace])):
            self.runtime.call("aclrtFree", address)


def launch_generated(runtime: Runtime, addresses: Sequence[int], stream: int) -> None:
    """Queues aclnnSiluBackward, a generated operator: gradOutput, self and gradInput of four elements."""
    tensors = [runtime.tensor(FLOAT, (4,), address) for address in addresses]
    size, executor = runtime.plan("aclnnSiluBackward", *tensors)
    runtime.call("aclnnSiluBackward", runtime.malloc(size), size, executor, stream)


def queue_upload(runtime: Runtime, address: int, size: int, stream: int) -> int:
    """Queues a copy from fresh pinned memory; returns its address."""
    source = runtime.pinned(size)
    runtime.call("aclrtMemcpyAsync", address, size, source.ctypes.data, size, H2D, stream)
    return int(source.ctypes.data)
