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

import numpy as np
import pytest
from tests.calls import cpu_backend, cpu_results

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

SIZE = 1 << 20
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

    process: subprocess.Popen[bytes]
    control: socket.socket
    inputs: InputArena
    outputs: OutputArena

    def send(self, message: Message) -> None:
        self.control.send(encode(message))

    def receive(self) -> Message:
        """The next message that is more than a sign of life."""
        while isinstance(message := self.hear(), DeviceOpening):
            pass
        return message

    def hear(self) -> Message:
        return decode(self.control.recv(MAX_MESSAGE_BYTES))


@contextmanager
def worker(device: str = "cpu:0", *, streams: int = 1) -> Iterator[WorkerUnderTest]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(30)
    inputs, outputs = InputArena(SIZE), OutputArena(SIZE)
    command = [sys.executable, "-m", "npugrad_server.worker", device, str(theirs.fileno())]
    fds = (theirs.fileno(), inputs.worker_fd, outputs.fd)
    with closing(mine), closing(inputs), closing(outputs), subprocess.Popen(command, pass_fds=fds) as process:
        theirs.close()
        found = WorkerUnderTest(process, mine, inputs, outputs)
        found.send(OpenDevice(device, "atlas-a2", streams, inputs.worker_fd, SIZE, outputs.fd, SIZE, 1 << 16))
        try:
            yield found
        finally:
            process.kill()


def order(call: int = 1, *, label: str = "", workspace_bytes: int | None = None) -> RunCall:
    record = get_operator("group_norm_backward")
    meta = record.build()
    outputs = record.infer(meta)
    options = CallOptions(label=label)
    offsets = [{name: 1024 * i for i, name in enumerate(names)} for names in (meta.inputs, outputs)]
    return RunCall(
        call, record.name, meta, outputs, options, offsets[0], offsets[1], workspace_bytes=workspace_bytes
    )


def test_a_worker_opens_runs_and_ends_with_its_socket() -> None:
    with worker() as one:
        ready = one.receive()
        assert isinstance(ready, DeviceReady)
        assert (ready.backend, ready.simulated) == (cpu_backend().name, False)
        run = order(5)
        record = get_operator(run.operator)
        operands = record.make_inputs(run.meta, np.random.default_rng(3))
        for name, array in operands.items():
            assert array is not None
            one.inputs.view(Region(0, SIZE), run.input_offsets[name], array.nbytes)[:] = array.tobytes()
        one.send(run)
        done = one.receive()
        assert isinstance(done, CallDone)
        assert (done.call, done.run_s > 0, done.copy_in_s > 0) == (5, True, True)
        golden = cpu_results(record, run.meta, operands, run.outputs)["grad_input"]
        found = one.outputs.view(Region(0, SIZE), run.output_offsets["grad_input"], golden.nbytes)
        assert bytes(found) == golden.tobytes()
        one.control.close()
        assert one.process.wait(60) == 0


def test_the_end_of_the_socket_ends_a_worker_that_opens_its_device() -> None:
    with worker("test:0?open_ms=60000") as one:
        one.control.close()
        assert one.process.wait(60) == 0


def test_the_end_of_the_socket_ends_a_worker_that_hangs() -> None:
    with worker("test:0?hang=x") as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(order(label="x"))
        one.control.close()
        assert one.process.wait(60) == 0


def test_a_worker_answers_while_a_call_runs() -> None:
    with worker("test:0?hang=x") as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(order(label="x"))
        one.send(Ping())
        assert one.receive() == Pong()


def test_signals_meant_for_the_server_do_not_end_a_worker() -> None:
    with worker("test:0") as one:
        assert isinstance(one.receive(), DeviceReady)
        one.process.send_signal(signal.SIGTERM)
        one.process.send_signal(signal.SIGINT)
        one.send(order())
        assert isinstance(one.receive(), CallDone)


def test_a_device_that_does_not_open_is_reported_before_the_end() -> None:
    with worker("test:0?open=fail") as one:
        failed = one.receive()
        assert isinstance(failed, OpenFailed)
        assert failed.message == "RuntimeError: test:0: does not open, as its options ask"
        assert one.process.wait(60) == 1


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
        assert isinstance(one.receive(), DeviceReady)
        one.send(order(3, label="x"))
        said = one.receive()
        assert isinstance(said, DeviceFailed)
        assert f"returned {code}" in said.message
        assert (said.call, said.code, said.restart_policy) == (3, code, restart_policy)
        assert (said.retry, said.exempt) == (retry, exempt)
        assert one.process.wait(60) == EXIT_DEVICE_LOST
        assert one.control.recv(MAX_MESSAGE_BYTES) == b""


@pytest.mark.parametrize("restart_policy", ["slowly", "mended", "never"])
def test_a_device_that_does_not_open_tells_when_to_try_again(restart_policy: str) -> None:
    with worker(f"test:0?open={restart_policy}") as one:
        assert one.receive() == OpenFailed("test:0: does not open, as its options ask", restart_policy)
        assert one.process.wait(60) == 1


def test_a_device_without_phases_cannot_tell_a_workspace() -> None:
    with worker("test:0") as one:
        assert isinstance(one.receive(), DeviceReady)
        run = order(4)
        one.send(AskWorkspace(4, run.operator, run.meta))
        assert one.receive() == WorkspaceFound(4, None)


def test_a_device_in_the_hosts_memory_has_none_of_its_own() -> None:
    with worker("test:0") as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(AskMemory(5, give_back=True))
        assert one.receive() == MemoryFound(5, None, None)


OWN_MEMORY = "test:0?memory=100000&workspace=5000"


def test_a_call_asks_for_the_workspace_that_is_not_set_aside() -> None:
    with worker(OWN_MEMORY) as one:
        ready = one.receive()
        assert isinstance(ready, DeviceReady)
        assert ready.memory_bytes == 100000
        one.send(order(1, workspace_bytes=4999))
        assert one.receive() == NeedWorkspace(1, 5000)
        one.send(WorkspaceGranted(1))
        done = one.receive()
        assert isinstance(done, CallDone)
        assert (done.call, done.workspace_bytes) == (1, 5000)
        one.send(order(2, workspace_bytes=5000))
        done = one.receive()
        assert isinstance(done, CallDone)
        assert (done.call, done.workspace_bytes) == (2, 5000)


def test_a_call_whose_workspace_is_refused_comes_back_or_fails_for_good() -> None:
    with worker(OWN_MEMORY) as one:
        assert isinstance(one.receive(), DeviceReady)
        for call, final in ((1, False), (2, True)):
            one.send(order(call, workspace_bytes=0))
            assert one.receive() == NeedWorkspace(call, 5000)
            one.send(WorkspaceRefused(call, final, 4000))
            answer = one.receive()
            if final:
                assert isinstance(answer, CallFailed)
                assert (answer.call, answer.reason) == (call, "DEVICE_OUT_OF_MEMORY")
                assert "found 5000 bytes of workspace" in answer.message
            else:
                assert answer == CallDeferred(call, 5000)


def test_each_stream_gets_the_answer_to_its_own_question() -> None:
    with worker(OWN_MEMORY, streams=2) as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(order(1, workspace_bytes=0))
        one.send(order(2, workspace_bytes=0))
        assert {one.receive(), one.receive()} == {NeedWorkspace(1, 5000), NeedWorkspace(2, 5000)}
        one.send(WorkspaceGranted(9))  # of a call that this process does not have
        one.send(WorkspaceRefused(2, False))
        assert one.receive() == CallDeferred(2, 5000)
        one.send(WorkspaceGranted(1))
        done = one.receive()
        assert isinstance(done, CallDone)
        assert done.call == 1
        one.send(order(2, workspace_bytes=5000))
        assert isinstance(one.receive(), CallDone)


def test_the_end_of_the_socket_ends_a_worker_that_waits_for_an_answer() -> None:
    with worker(OWN_MEMORY) as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(order(workspace_bytes=0))
        assert isinstance(one.receive(), NeedWorkspace)
        one.control.close()
        assert one.process.wait(60) == 0


def test_a_call_that_nobody_waits_for_ends_early_and_one_in_the_queue_is_not_run() -> None:
    with worker("test:0?ms=60000") as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(order(1))
        one.send(order(2))
        one.send(AbandonCall(2))
        one.send(AbandonCall(1))
        for call in (1, 2):
            answer = one.receive()
            assert isinstance(answer, CallFailed)
            assert (answer.call, answer.reason, answer.trace) == (call, "CANCELLED", "")
            assert answer.message == "group_norm_backward: the caller no longer waits for the call"


def test_a_call_can_be_handed_in_again_after_it_was_given_up() -> None:
    with worker("test:0?ms=2000") as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(order(1))
        one.send(AbandonCall(1))
        assert isinstance(one.receive(), CallFailed)
        one.send(AbandonCall(1))  # too late to mean anything
        one.send(order(1))
        assert isinstance(one.receive(), CallDone)


def test_a_worker_runs_by_number_what_it_was_brought_until_it_is_to_forget_it() -> None:
    with worker() as one:
        assert isinstance(one.receive(), DeviceReady)
        run = replace(order(1), plan=40)
        record = get_operator(run.operator)
        operands = record.make_inputs(run.meta, np.random.default_rng(3))
        golden = cpu_results(record, run.meta, operands, run.outputs)
        one.send(RunAgain(9, 40, 0, 0))
        assert one.receive() == CallUnknown(9)
        one.send(run)
        assert isinstance(one.receive(), CallDone)
        for call, base in ((2, 1 << 16), (3, 1 << 18)):
            for name, array in operands.items():
                assert array is not None
                at = base + run.input_offsets[name]
                one.inputs.view(Region(0, SIZE), at, array.nbytes)[:] = array.tobytes()
            one.send(RunAgain(call, 40, base, base + 64))
            done = one.receive()
            assert isinstance(done, CallDone)
            assert (done.call, done.backend) == (call, cpu_backend().name)
            for name, array in golden.items():
                at = base + 64 + run.output_offsets[name]
                assert bytes(one.outputs.view(Region(0, SIZE), at, array.nbytes)) == array.tobytes()
        one.send(ForgetPlan(40))
        one.send(ForgetPlan(41))  # which it never had
        one.send(RunAgain(4, 40, 0, 0))
        assert one.receive() == CallUnknown(4)


def test_a_call_keeps_its_plan_until_it_ends_whatever_is_to_be_forgotten() -> None:
    with worker("test:0?ms=60000", streams=2) as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(replace(order(1), plan=1))
        one.send(RunAgain(2, 1, 0, 0))
        one.send(RunAgain(3, 1, 0, 0))  # waits for a stream
        one.send(ForgetPlan(1))
        for call in (3, 2, 1):
            one.send(AbandonCall(call))
        answers = [one.receive() for _ in range(3)]
        assert {type(answer) for answer in answers} == {CallFailed}
        assert {answer.call for answer in answers if isinstance(answer, CallFailed)} == {1, 2, 3}


def test_the_label_of_a_call_by_number_is_its_own() -> None:
    with worker("test:0?oom=x") as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(replace(order(1), plan=1))
        assert isinstance(one.receive(), CallDone)
        for label, kind in (("x", CallFailed), ("y", CallDone), ("", CallDone)):
            one.send(RunAgain(2, 1, 0, 0, label=label))
            assert isinstance(one.receive(), kind)


def test_a_call_by_number_asks_for_the_workspace_that_is_not_set_aside() -> None:
    with worker(OWN_MEMORY) as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(replace(order(1, workspace_bytes=5000), plan=1))
        assert isinstance(one.receive(), CallDone)
        one.send(RunAgain(2, 1, 0, 0, workspace_bytes=4999))
        assert one.receive() == NeedWorkspace(2, 5000)
        one.send(WorkspaceRefused(2, False))
        assert one.receive() == CallDeferred(2, 5000)


@pytest.mark.parametrize("packet", [b"\1", RunAgain(1, 2, 3, 4)[:-1]])
def test_a_worker_that_is_sent_a_call_by_number_that_is_cut_ends(packet: bytes) -> None:
    with worker("test:0") as one:
        assert isinstance(one.receive(), DeviceReady)
        one.control.send(packet)
        assert one.process.wait(60) == 2


def test_streams_answer_out_of_order() -> None:
    with worker("test:0?hang=x", streams=2) as one:
        assert isinstance(one.receive(), DeviceReady)
        one.send(order(1, label="x"))
        one.send(order(2))
        answer = one.receive()
        assert isinstance(answer, CallDone)
        assert answer.call == 2


def test_an_order_that_leaves_the_arena_is_an_error_and_not_a_crash() -> None:
    with worker() as one:
        assert isinstance(one.receive(), DeviceReady)
        good = order()
        beyond = {name: SIZE - 8 for name in good.output_offsets}
        one.send(RunCall(1, good.operator, good.meta, good.outputs, good.options, good.input_offsets, beyond))
        failed = one.receive()
        assert isinstance(failed, CallFailed)
        assert (failed.reason, failed.message) == (
            "INTERNAL",
            "group_norm_backward: the backend failed with ValueError",
        )
        assert "found 8 bytes for float32" in failed.trace
        one.send(good)
        assert isinstance(one.receive(), CallDone)


def test_a_worker_tells_each_stage_of_opening_its_device() -> None:
    with worker("test:0?stages=2") as one:
        told = [one.hear() for _ in range(4)]
        stages = ["opening the device", "at stage 1 of 2", "at stage 2 of 2"]
        assert told[:3] == [DeviceOpening(stage) for stage in stages]
        assert isinstance(told[3], DeviceReady)


def test_a_worker_that_is_talked_nonsense_to_ends() -> None:
    with worker() as one:
        assert isinstance(one.receive(), DeviceReady)
        one.control.send(b"nonsense")
        assert one.process.wait(60) == 2


def test_a_worker_is_the_first_to_go_when_memory_runs_out() -> None:
    with worker() as one:
        assert isinstance(one.receive(), DeviceReady)
        assert int(Path(f"/proc/{one.process.pid}/oom_score_adj").read_text()) >= 500


def test_a_worker_imports_nothing_of_the_front() -> None:
    script = (
        "import sys\n"
        "import npugrad_server.worker.__main__\n"
        "import npugrad_server.backends as b\n"
        "b.make_backend('cpu'), b.make_backend('test')\n"
        f"print([name for name in {FORBIDDEN} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_a_worker_has_its_own_descriptors_and_nobody_elses() -> None:
    with worker() as one:
        assert isinstance(one.receive(), DeviceReady)
        folder = Path(f"/proc/{one.process.pid}/fd")
        links = [os.readlink(entry) for entry in folder.iterdir()]
        arenas = sorted(link.split()[0] for link in links if "npugrad" in link)
        # One descriptor it inherited and one that its mapping keeps, of its own arenas and no other worker's.
        assert arenas == ["/memfd:npugrad-input"] * 2 + ["/memfd:npugrad-output"] * 2
        assert sum(link.startswith("socket:") for link in links) == 1
