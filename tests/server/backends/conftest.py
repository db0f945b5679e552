"""A worker process on a simulated NPU, driven by hand over its socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from tests.cann_sim.build import Installation
from tests.cann_sim.fixtures import may_be_forked, template
from tests.cann_sim.report import HOST_OBJECTS, Report, write_plan
from tests.fix_npu import npu_environment
from tests.worker_forks import ForkedWorker, Template

from npugrad.agreement import agreement
from npugrad.call import CallOptions
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad_server.pool.arena import InputArena, OutputArena
from npugrad_server.pool.regions import Region, aligned
from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode
from npugrad_server.worker.protocol import (
    CallDone,
    DeviceOpening,
    DeviceReady,
    Message,
    OpenDevice,
    RunCall,
)

M = TypeVar("M")
ARENA_BYTES = 64 << 20
ANSWER_S = 180.0
"""Seconds to wait for an answer; one stage of the start, importing torch_npu, may take most of them."""


@dataclass
class NpuWorker:
    """One worker process on a simulated NPU.

    Attributes:
        process: The process.
        control: Our end of its socket.
        inputs: Arena of the operands.
        outputs: Arena of the results.
        folder: Where plan and report are.
    """

    process: ForkedWorker | subprocess.Popen[bytes]
    control: socket.socket
    inputs: InputArena
    outputs: OutputArena
    folder: Path
    stages: list[str] = field(default_factory=list)
    _calls: int = 0
    ready: DeviceReady = field(init=False)

    def send(self, message: Message) -> None:
        self.control.send(encode(message))

    def receive(self) -> Message:
        """The next message that is more than a sign of life; the stages of the start go to `stages`."""
        while True:
            packet = self.control.recv(MAX_MESSAGE_BYTES)
            assert packet, f"the worker ended with status {self.process.wait(10)}: {self.report.violations()}"
            message = decode(packet)
            if not isinstance(message, DeviceOpening):
                return message
            self.stages.append(message.stage)

    def get(self, kind: type[M]) -> M:
        """The next such message, which is of a kind."""
        found = self.receive()
        assert isinstance(found, kind), found
        return found

    def plan(self, text: str) -> None:
        """Puts a plan into force in the running process."""
        write_plan(self.folder / "plan", text)

    @property
    def report(self) -> Report:
        """What the simulator says."""
        return Report(self.folder / "report")

    def live(self) -> dict[str, int]:
        """Handles and executors that are alive."""
        counters = self.report.counters()
        return {name: counters[name] for name in HOST_OBJECTS if counters[name]}

    def order(self, record: OpRecord, call: CallMeta, **changes: Any) -> tuple[RunCall, Mapping[str, Any]]:
        """Writes random operands into the arena; the order to run them, and the operands."""
        self._calls += 1
        arrays = record.make_inputs(call, np.random.default_rng(self._calls))
        where: dict[str, int] = {}
        end = 0
        for name, array in arrays.items():
            if array is not None:
                where[name] = end
                self.inputs.view(Region(0, ARENA_BYTES), end, array.nbytes)[:] = array.tobytes()
                end += aligned(array.nbytes)
        metas = record.infer(call)
        results: dict[str, int] = {}
        end = 0
        for name, meta in metas.items():
            if meta is not None:
                results[name] = end
                end += aligned(meta.nbytes)
        order = RunCall(self._calls, record.name, call, metas, CallOptions(), where, results)
        return replace(order, **changes), arrays

    def contents(self, order: RunCall) -> bytes:
        """The results of an order in the arena, one after the other."""
        arena = Region(0, ARENA_BYTES)
        metas = [(name, meta) for name, meta in order.outputs.items() if meta is not None]
        return b"".join(
            bytes(self.outputs.view(arena, order.output_offsets[name], meta.nbytes)) for name, meta in metas
        )

    def ask(self, record: OpRecord, call: CallMeta, **changes: Any) -> Message:
        """Has a call run; the answer, whatever it is."""
        order, _ = self.order(record, call, **changes)
        self.send(order)
        return self.receive()

    def check(self, record: OpRecord, call: CallMeta, **changes: Any) -> CallDone:
        """Has a call run, which must succeed within tolerance."""
        order, arrays = self.order(record, call, **changes)
        self.send(order)
        done = self.get(CallDone)
        self.compare(order, record, arrays)
        return done

    def compare(self, order: RunCall, record: OpRecord, arrays: Mapping[str, Any]) -> None:
        """The results in the arena are within tolerance of the reference."""
        metas = {name: meta for name, meta in order.outputs.items() if meta is not None}
        results = {}
        for name, meta in metas.items():
            content = self.outputs.view(Region(0, ARENA_BYTES), order.output_offsets[name], meta.nbytes)
            results[name] = np.frombuffer(bytes(content), meta.dtype.numpy).reshape(meta.shape)
        judged = agreement(record, arrays, order.meta.attrs, results)
        assert judged.ok, judged


StartNpuWorker = Callable[..., NpuWorker]
"""Takes a plan, the environment's additions, whether to fork it, and the options of `run_npu_worker`."""


@contextmanager
def run_npu_worker(
    environment: Mapping[str, str],
    folder: Path,
    *,
    forked_from: Template | None = None,
    ready: bool = True,
    device: str = "npu:0",
    product: str = "atlas-a2",
    streams: int = 1,
    hang_grace_s: float = 10.0,
    run_limit_s: float = 600.0,
) -> Iterator[NpuWorker]:
    """Runs a worker process for a block; it is killed at the end, if it has not ended by then."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(ANSWER_S)
    inputs, outputs = InputArena(ARENA_BYTES), OutputArena(ARENA_BYTES)
    command = ["npugrad_server.worker", device, str(theirs.fileno())]
    fds = (theirs.fileno(), inputs.worker_fd, outputs.fd)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with closing(mine), closing(inputs), closing(outputs), (folder / "stderr").open("wb") as stderr:
        process: ForkedWorker | subprocess.Popen[bytes]
        if forked_from is not None:
            process = forked_from.fork(command, fds, stderr.fileno(), env=variables)
        else:
            program = [sys.executable, "-m", *command]
            process = subprocess.Popen(program, pass_fds=fds, env=variables, stderr=stderr)
        theirs.close()
        worker = NpuWorker(process, mine, inputs, outputs, folder)
        try:
            worker.send(
                OpenDevice(
                    *(device, product, streams, inputs.worker_fd, ARENA_BYTES, outputs.fd, ARENA_BYTES, 4096),
                    hang_grace_s=hang_grace_s,
                    run_limit_s=run_limit_s,
                )
            )
            if ready:
                answer = worker.get(DeviceReady)
                worker.ready = answer
            yield worker
        finally:
            process.kill()
            process.wait(10)


@pytest.fixture
def start_npu_worker(cann_sim: Installation, torch_npu: Path, tmp_path: Path) -> Iterator[StartNpuWorker]:
    """Give a function that starts workers on simulated NPUs; afterwards no rule may have been broken."""
    with ExitStack() as stack:
        workers: list[NpuWorker] = []

        def start(
            plan: str = "", *, env: Mapping[str, str] | None = None, forked: bool = True, **options: Any
        ) -> NpuWorker:
            folder = tmp_path / f"worker{len(workers) + 1}"
            folder.mkdir()
            if forked and may_be_forked(plan, env or {}):
                options["forked_from"] = template(cann_sim, True)
            environment = {**npu_environment(cann_sim, folder, plan), **(env or {})}
            workers.append(stack.enter_context(run_npu_worker(environment, folder, **options)))
            return workers[-1]

        yield start
        for worker in workers:
            assert worker.report.violations() == []


@pytest.fixture(scope="session")
def shared_npu_worker(
    cann_sim: Installation, torch_npu: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NpuWorker]:
    folder = tmp_path_factory.mktemp("npu-worker")
    environment, parent = npu_environment(cann_sim, folder), template(cann_sim, True)
    with run_npu_worker(environment, folder, forked_from=parent, streams=2) as worker:
        yield worker
        assert worker.report.violations() == []


@pytest.fixture
def npu_worker(shared_npu_worker: NpuWorker) -> Iterator[NpuWorker]:
    """Give a worker that tests share, for what it survives; afterwards it holds nothing and has no plan."""
    yield shared_npu_worker
    shared_npu_worker.plan("")
    assert shared_npu_worker.live() == {}
