"""The NPU backend in this process, as JSON: `python -m tests.server.backends.npu_scenarios NAME`.

A process of its own for each, on the simulated CANN, for what a worker's socket cannot show: who is asked
what in the middle of a call, what is held between calls, and which work of two streams ran at the same time.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.cann_sim.build import Installation
from tests.cann_sim.report import HOST_OBJECTS
from tests.cann_sim.runtime import Runtime as Simulator
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM

from npugrad.agreement import agreement
from npugrad.call import CallOptions
from npugrad.errors import DeadlineExceeded, DeviceOutOfMemory, OperatorError
from npugrad.layout import view
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_server.acl.launcher import Launcher
from npugrad_server.acl.layout import arrange
from npugrad_server.acl.libraries import Cann, Functions, Missing
from npugrad_server.acl.runtime import Runtime
from npugrad_server.acl.symbols import RUNTIME
from npugrad_server.backends.base import CallAbandoned, CallPostponed, DeviceCall, Timings
from npugrad_server.backends.npu import NpuBackend
from npugrad_server.backends.npu.bringup import NpuDevice
from npugrad_server.backends.npu.lane import Lane
from npugrad_server.devices import parse_device

Array = npt.NDArray[Any]
Scenario = Callable[[], Any]

NORM = GROUP_NORM.build(n=2, c=6, hxw=64, group=2)
LAUNCH = "calls.aclnnGroupNormBackward"
HELD = (
    *(*HOST_OBJECTS, "live.streams", "live.events"),
    *("live.device_allocations", "live.pinned_allocations", "device_bytes", "pinned_bytes"),
)
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Registers a scenario under its name."""
    SCENARIOS[function.__name__] = function
    return function


@dataclass
class Rig:
    """An open backend, and the simulator under it.

    Attributes:
        backend: The backend.
        sim: The simulator.
    """

    streams: int = 1
    backend: NpuBackend = field(default_factory=NpuBackend)

    def __post_init__(self) -> None:
        self.sim = Simulator(Installation(Path(os.environ["ASCEND_HOME_PATH"])))
        self.backend.open(parse_device("npu:0"), Product.ATLAS_A2, self.streams)

    def held(self) -> dict[str, int]:
        """What is alive once torch_npu has given back what it cached."""
        sys.modules["torch"].npu.empty_cache()
        return {name: self.sim.counter(name) for name in HELD}

    def run(self, record: OpRecord, meta: CallMeta, *, seed: int = 0, **changes: Any) -> Timings:
        """Runs a call; its results must be within tolerance."""
        return checked(self.backend.run, record, meta, seed, **changes)


def checked(
    run: Callable[[OpRecord, DeviceCall], Timings],
    record: OpRecord,
    meta: CallMeta,
    seed: int = 0,
    **changes: Any,
) -> Timings:
    """Runs a call of random operands and compares its results with the reference."""
    inputs = _laid_out(meta, record.make_inputs(meta, np.random.default_rng(seed)))
    wanted = {name: found for name, found in record.infer(meta).items() if found is not None}
    outputs = {name: np.zeros(found.shape, found.dtype.numpy) for name, found in wanted.items()}
    call = DeviceCall(meta, inputs, outputs, CallOptions(), 0, time.monotonic() + 60)
    timings = run(record, replace(call, **changes))
    judged = agreement(record, inputs, meta.attrs, outputs)
    assert judged.ok, f"{record.name}: {judged}"
    return timings


def _laid_out(meta: CallMeta, arrays: dict[str, Array | None]) -> dict[str, Array | None]:
    """The same operands with the strides that the call says."""
    found = dict(arrays)
    for name, array in arrays.items():
        described = meta.inputs[name]
        if array is not None and described is not None and not described.is_contiguous:
            strided = view(described, bytearray(described.content_bytes))
            strided[...] = array
            found[name] = strided
    return found


def in_threads(*targets: Callable[[], None]) -> None:
    """Runs functions at the same time; the first error of any is raised."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[target]) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@scenario
def one_call() -> int:
    """One small call, traced alone; the workspace that the pool was asked for."""
    rig = Rig()
    asked: list[int] = []
    rig.run(GROUP_NORM, NORM)
    rig.sim.set_plan("trace=1;copy_ms=5")
    rig.run(GROUP_NORM, NORM, reserve_workspace=asked.append)
    rig.sim.set_plan("")
    (nbytes,) = asked
    return nbytes


class Refusal:
    """Says no when it is asked for the n-th time.

    Args:
        error: What to raise.
        at: Which time.
    """

    def __init__(self, error: Exception, at: int) -> None:
        self._error, self._left = error, at

    def __call__(self, *_: int) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error


@scenario
def refusals() -> dict[str, Any]:
    """By refusal: what was held afterwards and not before, and how many launches there were."""
    rig = Rig()
    rig.sim.set_plan("copy_ms=10")  # copies are under way whenever somebody says no
    rig.run(GROUP_NORM, NORM)
    cases: dict[str, tuple[Exception, str, int]] = {
        "postponed": (CallPostponed(1), "reserve_workspace", 1),
        "never enough": (DeviceOutOfMemory("no"), "reserve_workspace", 1),
        "broken pool": (RuntimeError("no"), "reserve_workspace", 1),
        "abandoned before": (CallAbandoned(), "check_wanted", 1),
        "abandoned": (CallAbandoned(), "check_wanted", 2),
        "too late": (DeadlineExceeded("no"), "check_wanted", 2),
    }
    return {name: _refused(rig, *case) for name, case in cases.items()}


def _refused(rig: Rig, error: Exception, question: str, at: int) -> dict[str, int]:
    launches, before = rig.sim.counter(LAUNCH), rig.held()
    changes: dict[str, Any] = {question: Refusal(error, at)}
    with pytest.raises(type(error)) as caught:
        rig.run(GROUP_NORM, NORM, **changes)
    assert caught.value is error
    after = rig.held()
    changed = {name: after[name] - before[name] for name in HELD if after[name] != before[name]}
    changed["launches"] = rig.sim.counter(LAUNCH) - launches
    # Pinned memory is written again at once: the simulator aborts if a queued copy still reads it.
    rig.run(GROUP_NORM, NORM, seed=1)
    return changed


@scenario
def refusal_in_turns() -> list[int]:
    """How many copies each try of a large call queued, which one or another question ended."""
    rig = Rig()
    large = GROUP_NORM.build(n=2, c=32, hxw=33_000, group=4)
    counts = []
    for at in (3, 10_000):
        before = rig.sim.counter("calls.aclrtMemcpyAsync")
        try:
            rig.run(GROUP_NORM, large, check_wanted=Refusal(CallAbandoned(), at))
        except CallAbandoned:
            rig.run(GROUP_NORM, NORM)
        counts.append(rig.sim.counter("calls.aclrtMemcpyAsync") - before)
    return counts


@scenario
def reserved_once() -> list[int]:
    """Workspace asked for by a call that was tried twice."""
    rig = Rig()
    asked: list[int] = []
    rig.sim.set_plan("aclnnGroupNormBackward:1:207018")
    rig.run(GROUP_NORM, NORM, reserve_workspace=asked.append)
    return asked


@scenario
def without_events() -> dict[str, float]:
    """Timings where CANN cannot time by events."""
    cann = Cann()
    name = "aclrtEventElapsedTime"
    missing = Missing(next(symbol for symbol in RUNTIME if symbol.name == name), ("libascendcl.so",))
    runtime = Runtime(Functions({**cann.runtime.by_name, name: missing}))
    lane = Lane(NpuDevice(0, 1), runtime, Launcher(cann, runtime))
    Simulator(Installation(Path(os.environ["ASCEND_HOME_PATH"]))).set_plan("copy_ms=400;kernel_ms=100")
    runs = [checked(lane.run, GROUP_NORM, NORM)]
    # A machine that stands still for a moment can only add time.
    while runs[-1].run_s >= 0.4 and len(runs) < 3:
        runs.append(checked(lane.run, GROUP_NORM, NORM))
    found = min(runs, key=lambda run: run.run_s)
    return {"copy_in": found.copy_in_s, "run": found.run_s, "copy_out": found.copy_out_s}


@scenario
def overlap() -> int:
    """A long kernel on one stream, whole calls on another meanwhile; how many of those there were."""
    rig = Rig(streams=2)
    for stream in (0, 1):
        rig.run(GROUP_NORM, NORM, stream=stream)
    rig.sim.set_plan("record=1;kernel.aclnnGridSampler2DBackward:1:slow=5000")
    over, short = threading.Event(), [0]

    def long_one() -> None:
        rig.run(GRID_SAMPLER, GRID_SAMPLER.build(), stream=0)
        over.set()

    def short_ones() -> None:
        while not over.is_set():
            rig.run(GROUP_NORM, NORM, stream=1)
            short[0] += 1

    in_threads(long_one, short_ones)
    return short[0]


@scenario
def mixed_modes() -> dict[str, bool]:
    """Four callers of both modes on two streams; the mode of each call by its first size."""
    rig = Rig(streams=2)
    # Kernels take long enough that two of one mode overlap whenever both may run.
    rig.sim.set_plan("record=1;kernel_ms=20;copy_ms=1")
    free: SimpleQueue[int] = SimpleQueue()
    for stream in (0, 1):
        free.put(stream)
    modes: dict[str, bool] = {}

    def caller(number: int) -> None:
        for turn in range(10):
            n, deterministic = 10 + 4 * turn + number, (number + turn // 2) % 2 == 0
            modes[str(n)] = deterministic
            record = (GROUP_NORM, GRID_SAMPLER)[turn % 2]
            stream = free.get()
            options = CallOptions(deterministic=deterministic)
            try:
                rig.run(record, record.build(n=n), stream=stream, options=options)
            finally:
                free.put(stream)

    in_threads(*(partial(caller, number) for number in range(4)))
    return modes


@scenario
def planned_while_modes_change() -> int:
    """Workspaces asked for while calls of both modes take turns; how many."""
    rig = Rig(streams=2)
    # An executor of a first phase alone lives so long.
    rig.sim.set_plan("aclDestroyAclOpExecutor:*:slow=3")
    over, planned = threading.Event(), [0]

    def calls() -> None:
        turn = 0
        while turn < 60 or (planned[0] <= 5 and turn < 6000):
            rig.run(GROUP_NORM, NORM, options=CallOptions(deterministic=turn % 2 == 0))
            turn += 1
        over.set()

    def plans() -> None:
        while not over.is_set():
            assert rig.backend.workspace_bytes(GROUP_NORM, NORM)
            planned[0] += 1

    in_threads(calls, plans)
    return planned[0]


@scenario
def not_deterministic() -> dict[str, list[Any]]:
    """Reason and words of the refusal, and number of phases 1, for what cannot be deterministic; and can."""
    rig = Rig()
    calls = {
        "floyd": (FLOYD, FLOYD.build()),
        "sampler 2049": (GRID_SAMPLER, GRID_SAMPLER.build(n=1, c=2049, h=1, w=1, oh=1, ow=1)),
        "sampler 2048": (GRID_SAMPLER, GRID_SAMPLER.build(n=1, c=2048, h=1, w=1, oh=1, ow=1)),
    }
    found: dict[str, list[Any]] = {}
    for name, (record, meta) in calls.items():
        plans, reason, words = rig.sim.counter(f"plans.{record.aclnn_name}"), "", ""
        try:
            rig.run(record, meta, options=CallOptions(deterministic=True))
        except OperatorError as error:
            reason, words = error.reason, str(error)
        found[name] = [reason, words, rig.sim.counter(f"plans.{record.aclnn_name}") - plans]
    return found


@scenario
def many_calls() -> dict[str, Any]:
    """Hundreds of mixed calls on two streams: what was held before and after, and how many kernels ran."""
    rig = Rig(streams=2)
    # Of the operator whose reference takes long, one call will do.
    samples = [
        (record, sample.call)
        for record in OPERATORS.values()
        for sample in itertools.islice(record.samples(Product.ATLAS_A2), 1 if record is FLOYD else 7)
    ]

    def rounds(stream: int, turns: range) -> None:
        for turn in turns:
            for record, call in samples:
                rig.run(record, call, seed=turn, stream=stream)

    # Each stream has one thread, from the first call on: the simulator was told to insist on it.
    with ThreadPoolExecutor(1) as other:
        other.submit(rounds, 1, range(1)).result()
        rounds(0, range(1))
        before, ran = rig.held(), _kernels(rig)
        done = other.submit(rounds, 1, range(1, 8))
        rounds(0, range(1, 8))
        done.result()
    largest = max(arrange(record, call).nbytes for record, call in samples)
    return {"before": before, "after": rig.held(), "kernels": _kernels(rig) - ran, "largest": largest}


def _kernels(rig: Rig) -> int:
    return sum(rig.sim.counter(f"kernels.{record.aclnn_name}") for record in OPERATORS.values())


def main(name: str) -> None:
    """Plays a scenario and prints what it says."""
    print(json.dumps(SCENARIOS[name]()))
    sys.stdout.flush()
    os._exit(0)  # as a worker does: what torch_npu does at the end is not what is looked at


if __name__ == "__main__":
    main(sys.argv[1])
