"""A worker process driven by hand over its socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from tests.calls import cpu_backend, cpu_results
from tests.interpreter import printed
from tests.worker_forks import ForkedWorker, fork_worker

from npugrad import get_operator
from npugrad.call import CallOptions
from npugrad_server.pool.arena import InputArena, OutputArena
from npugrad_server.pool.regions import Region
from npugrad_server.worker.loop import EXIT_DEVICE_LOST
from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode
from npugrad_server.worker.protocol import (
    AbandonCall,
    AskMemory,
    AskWorkspace,
    CallDeferred,
    CallDone,
    CallFailed,
    CallUnknown,
    DeviceFailed,
    DeviceOpening,
    DeviceReady,
    ForgetPlan,
    MemoryFound,
    Message,
    NeedWorkspace,
    OpenDevice,
    OpenFailed,
    Ping,
    Pong,
    RunCall,
    WorkspaceFound,
    WorkspaceGranted,
    WorkspaceRefused,
)
from npugrad_server.worker.run_again import RunAgain

pytestmark = pytest.mark.slow

M = TypeVar("M")

SIZE = 1 << 20
OWN_MEMORY = "test:0?memory=100000&workspace=5000"
FORBIDDEN = (
    "grpc",
    "google.protobuf",
    "npugrad.codec",
    "npugrad.status",
    "typer",
    "rich",
    "pydantic",
    "pydantic_settings",
    "structlog",
    "prometheus_client",
    "multiprocessing",
    "asyncio",
    "npugrad_server.pool",
    "npugrad_client",
    "torch",
)


@dataclass(frozen=True)
class WorkerUnderTest:
    """One process with its socket and arenas."""

    process: ForkedWorker | subprocess.Popen[bytes]
    control: socket.socket
    inputs: InputArena
    outputs: OutputArena

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.control.send(encode(message))

    def receive(self) -> Message:
        """The next message that is more than a sign of life."""
        while isinstance(message := self.hear(), DeviceOpening):
            pass
        return message

    def get(self, kind: type[M], call: int | None = None) -> M:
        """The next message, which is of a kind, and about a call if one is given."""
        found = self.receive()
        assert isinstance(found, kind), found
        assert call in (None, getattr(found, "call", None))
        return found

    def hear(self) -> Message:
        return decode(self.control.recv(MAX_MESSAGE_BYTES))

    def put(self, names: dict[str, int], arrays: dict[str, np.ndarray | None], base: int = 0) -> None:
        """Writes operands where a call looks for them."""
        for name, array in arrays.items():
            assert array is not None
            self.inputs.view(Region(0, SIZE), base + names[name], array.nbytes)[:] = array.tobytes()

    def result(self, run: RunCall, name: str, nbytes: int, base: int = 0) -> bytes:
        return bytes(self.outputs.view(Region(0, SIZE), base + run.output_offsets[name], nbytes))


@contextmanager
def opening(device: str, streams: int = 1, *, forked: bool = True) -> Iterator[WorkerUnderTest]:
    """A worker that was told to open its device; forked, or started as a program."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(30)
    inputs, outputs = InputArena(SIZE), OutputArena(SIZE)
    fds = (theirs.fileno(), inputs.worker_fd, outputs.fd)
    with closing(mine), closing(inputs), closing(outputs):
        process: ForkedWorker | subprocess.Popen[bytes]
        if forked:
            process = fork_worker(device, fds)
        else:
            command = [sys.executable, "-m", "npugrad_server.worker", device, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=fds)
        theirs.close()
        found = WorkerUnderTest(process, mine, inputs, outputs)
        found.send(OpenDevice(device, "atlas-a2", streams, inputs.worker_fd, SIZE, outputs.fd, SIZE, 1 << 16))
        try:
            yield found
        finally:
            process.kill()
            process.wait()


@contextmanager
def worker(device: str = "cpu:0", streams: int = 1, *, forked: bool = True) -> Iterator[WorkerUnderTest]:
    with opening(device, streams, forked=forked) as found:
        found.get(DeviceReady)
        yield found


def order(call: int = 1, *, label: str = "", workspace_bytes: int | None = None) -> RunCall:
    record = get_operator("group_norm_backward")
    meta = record.build()
    outputs = record.infer(meta)
    options = CallOptions(label=label)
    offsets = [{name: 1024 * i for i, name in enumerate(names)} for names in (meta.inputs, outputs)]
    return RunCall(
        call, record.name, meta, outputs, options, offsets[0], offsets[1], workspace_bytes=workspace_bytes
    )


RECORD, META = get_operator("group_norm_backward"), order().meta
OPERANDS = dict(RECORD.make_inputs(META, np.random.default_rng(3)))


# ------------------------------------------------------------------------------------ one as a program


def test_a_worker_opens_runs_and_ends_with_its_socket() -> None:
    with opening("cpu:0", forked=False) as one:
        ready = one.get(DeviceReady)
        assert (ready.backend, ready.simulated) == (cpu_backend().name, False)
        folder = Path(f"/proc/{one.process.pid}")
        links = [os.readlink(entry) for entry in (folder / "fd").iterdir()]
        arenas = sorted(link.split()[0] for link in links if "npugrad" in link)
        # One descriptor it inherited and one that its mapping keeps, of its own arenas and no other worker's.
        assert arenas == ["/memfd:npugrad-input"] * 2 + ["/memfd:npugrad-output"] * 2
        assert sum(link.startswith("socket:") for link in links) == 1
        # It is the first to go when memory runs out.
        assert int((folder / "oom_score_adj").read_text()) >= 500
        run = order(5)
        one.put(dict(run.input_offsets), OPERANDS)
        one.send(run)
        done = one.get(CallDone, 5)
        assert (done.run_s > 0, done.copy_in_s > 0) == (True, True)
        golden = cpu_results(RECORD, run.meta, OPERANDS, run.outputs)["grad_input"]
        assert one.result(run, "grad_input", golden.nbytes) == golden.tobytes()
        one.control.close()
        assert one.process.wait(60) == 0


def test_a_worker_imports_nothing_of_the_front() -> None:
    script = (
        "import sys\n"
        "import npugrad_server.worker.__main__\n"
        "import npugrad_server.backends as b\n"
        "b.make_backend('cpu'), b.make_backend('test')\n"
        f"print([name for name in {FORBIDDEN} if name in sys.modules])\n"
    )
    assert printed(script) == "[]\n"


# ------------------------------------------------------------------------------------------- its end


def test_the_end_of_the_socket_ends_a_worker_that_opens_its_device() -> None:
    with opening("test:0?open_ms=60000") as one:
        one.control.close()
        assert one.process.wait(60) == 0


@pytest.mark.parametrize("device", ["test:0?hang=x", OWN_MEMORY])
def test_the_end_of_the_socket_ends_a_worker_that_hangs_or_waits_for_an_answer(device: str) -> None:
    """And until then it answers while a call runs."""
    with worker(device) as one:
        one.send(order(label="x", workspace_bytes=0))
        if device == OWN_MEMORY:
            one.get(NeedWorkspace)
        one.send(Ping())
        assert one.receive() == Pong()
        one.control.close()
        assert one.process.wait(60) == 0


def test_signals_meant_for_the_server_do_not_end_a_worker() -> None:
    with worker("test:0") as one:
        one.process.send_signal(signal.SIGTERM)
        one.process.send_signal(signal.SIGINT)
        one.send(order())
        one.get(CallDone)


@pytest.mark.parametrize("packet", [b"nonsense", b"\1", RunAgain(1, 2, 3, 4)[:-1]])
def test_a_worker_that_is_talked_nonsense_to_ends(packet: bytes) -> None:
    with worker("test:0") as one:
        one.control.send(packet)
        assert one.process.wait(60) == 2


@pytest.mark.parametrize(
    ("failure", "code", "restart_policy", "retry", "exempt"),
    [
        ("fault", 507015, "soon", True, False),
        ("damage", 507054, "never", True, False),
        ("timeout", 507046, "soon", False, True),
    ],
)
def test_a_worker_that_lost_its_device_says_so_and_ends(
    failure: str, code: int, restart_policy: str, retry: bool, exempt: bool
) -> None:
    with worker(f"test:0?{failure}=x", streams=2) as one:
        one.send(order(3, label="x"))
        said = one.get(DeviceFailed, 3)
        assert f"returned {code}" in said.message
        assert (said.code, said.restart_policy) == (code, restart_policy)
        assert (said.retry, said.exempt) == (retry, exempt)
        assert one.process.wait(60) == EXIT_DEVICE_LOST
        assert one.control.recv(MAX_MESSAGE_BYTES) == b""


# ------------------------------------------------------------------------------------ opening a device


@pytest.mark.parametrize("how", ["fail", "slowly", "mended", "never"])
def test_a_device_that_does_not_open_is_reported_before_the_end_with_when_to_try_again(how: str) -> None:
    with opening(f"test:0?open={how}") as one:
        failed, words = one.get(OpenFailed), "test:0: does not open, as its options ask"
        assert failed == (OpenFailed(f"RuntimeError: {words}") if how == "fail" else OpenFailed(words, how))
        assert one.process.wait(60) == 1


def test_a_worker_tells_each_stage_of_opening_its_device() -> None:
    with opening("test:0?stages=2") as one:
        told = [one.hear() for _ in range(4)]
        stages = ["opening the device", "at stage 1 of 2", "at stage 2 of 2"]
        assert told[:3] == [DeviceOpening(stage) for stage in stages]
        assert isinstance(told[3], DeviceReady)


# --------------------------------------------------------------------------------- memory and workspace


def test_a_device_in_the_hosts_memory_without_phases_tells_neither_memory_nor_workspace() -> None:
    with worker("test:0") as one:
        run = order(4)
        one.send(AskWorkspace(4, run.operator, run.meta), AskMemory(5, give_back=True))
        assert [one.receive(), one.receive()] == [WorkspaceFound(4, None), MemoryFound(5, None, None)]


def test_a_call_asks_for_the_workspace_that_is_not_set_aside() -> None:
    with opening(OWN_MEMORY) as one:
        assert one.get(DeviceReady).memory_bytes == 100000
        one.send(order(1, workspace_bytes=4999))
        assert one.receive() == NeedWorkspace(1, 5000)
        one.send(WorkspaceGranted(1))
        assert one.get(CallDone, 1).workspace_bytes == 5000
        one.send(replace(order(2, workspace_bytes=5000), plan=1))
        assert one.get(CallDone, 2).workspace_bytes == 5000
        one.send(RunAgain(3, 1, 0, 0, workspace_bytes=4999))
        assert one.receive() == NeedWorkspace(3, 5000)
        one.send(WorkspaceRefused(3, False))
        assert one.receive() == CallDeferred(3, 5000)


def test_a_call_whose_workspace_is_refused_comes_back_or_fails_for_good() -> None:
    with worker(OWN_MEMORY) as one:
        for call, final in ((1, False), (2, True)):
            one.send(order(call, workspace_bytes=0))
            assert one.receive() == NeedWorkspace(call, 5000)
            one.send(WorkspaceRefused(call, final, 4000))
            if final:
                answer = one.get(CallFailed, call)
                assert answer.reason == "DEVICE_OUT_OF_MEMORY"
                assert "found 5000 bytes of workspace" in answer.message
            else:
                assert one.receive() == CallDeferred(call, 5000)


def test_each_stream_gets_the_answer_to_its_own_question() -> None:
    with worker(OWN_MEMORY, streams=2) as one:
        one.send(order(1, workspace_bytes=0), order(2, workspace_bytes=0))
        assert {one.receive(), one.receive()} == {NeedWorkspace(1, 5000), NeedWorkspace(2, 5000)}
        one.send(WorkspaceGranted(9))  # of a call that this process does not have
        one.send(WorkspaceRefused(2, False))
        assert one.receive() == CallDeferred(2, 5000)
        one.send(WorkspaceGranted(1))
        one.get(CallDone, 1)
        one.send(order(2, workspace_bytes=5000))
        one.get(CallDone)


# ------------------------------------------------------------------------------------------- its calls


def test_a_call_that_nobody_waits_for_ends_early_and_one_in_the_queue_is_not_run() -> None:
    with worker("test:0?ms=60000") as one:
        one.send(order(1), order(2), AbandonCall(2), AbandonCall(1))
        for call in (1, 2):
            answer = one.get(CallFailed, call)
            assert (answer.reason, answer.trace) == ("CANCELLED", "")
            assert answer.message == "group_norm_backward: the caller no longer waits for the call"


def test_a_call_can_be_handed_in_again_after_it_was_given_up() -> None:
    with worker(OWN_MEMORY) as one:
        one.send(order(2, workspace_bytes=0))
        one.get(NeedWorkspace)
        one.send(order(1), AbandonCall(1), WorkspaceGranted(2))
        one.get(CallDone, 2)
        assert one.get(CallFailed, 1).reason == "CANCELLED"
        one.send(AbandonCall(1))  # too late to mean anything
        one.send(order(1, workspace_bytes=5000))
        one.get(CallDone, 1)


def test_a_worker_runs_by_number_what_it_was_brought_until_it_is_to_forget_it() -> None:
    with worker() as one:
        run = replace(order(1), plan=40)
        golden = cpu_results(RECORD, run.meta, OPERANDS, run.outputs)
        one.send(RunAgain(9, 40, 0, 0))
        assert one.receive() == CallUnknown(9)
        one.send(run)
        one.get(CallDone)
        for call, base in ((2, 1 << 16), (3, 1 << 18)):
            one.put(dict(run.input_offsets), OPERANDS, base)
            one.send(RunAgain(call, 40, base, base + 64))
            assert one.get(CallDone, call).backend == cpu_backend().name
            for name, array in golden.items():
                assert one.result(run, name, array.nbytes, base + 64) == array.tobytes()
        one.send(ForgetPlan(40), ForgetPlan(41))  # which it never had
        one.send(RunAgain(4, 40, 0, 0))
        assert one.receive() == CallUnknown(4)


def test_a_call_keeps_its_plan_until_it_ends_whatever_is_to_be_forgotten() -> None:
    with worker("test:0?ms=60000", streams=2) as one:
        one.send(replace(order(1), plan=1), RunAgain(2, 1, 0, 0))
        one.send(RunAgain(3, 1, 0, 0))  # waits for a stream
        one.send(ForgetPlan(1))
        one.send(*map(AbandonCall, (3, 2, 1)))
        assert {one.get(CallFailed).call for _ in range(3)} == {1, 2, 3}


def test_streams_answer_out_of_order() -> None:
    with worker("test:0?hang=x", streams=2) as one:
        one.send(order(1, label="x"), order(2))
        one.get(CallDone, 2)
