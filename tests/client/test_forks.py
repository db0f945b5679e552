"""Clients in forked processes, DataLoader workers and pre-forking parents, all in processes of their own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import grpc
import pytest
from tests.client import programs
from tests.client.both import WAYS
from tests.client.fake_service import Context, Gate, fake_service

from npugrad_client._forks import ForkGate

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")

HEAD = """
import asyncio, gc, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from npugrad_client import AsyncClient, Client, _forks

address = sys.argv[1]
one = np.ones((1, 1), np.float32)
operands = dict(grad_out=one, input=one, mean=one, rstd=one, n=1, c=1, hxw=1, group=1,
                output_mask=(True, True, True))


def in_children(act, number=6):
    '''Forks one child after the other; each says ok or what went wrong.'''
    for _ in range(number):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                act()
                said = "ok"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        status = os.waitpid(child, 0)[1]
        print(said if status == 0 else f"status {status}", flush=True)


async def call(client):
    await client.group_norm_backward(**operands)


async def open_and_call():
    async with AsyncClient(address, timeout_s=20) as client:
        await call(client)


"""


def run(program: str, *arguments: str, fork_support: str | None = None) -> list[str]:
    """What a program prints beside a service; gRPC's own support of forks is a matter of its imports."""
    code = HEAD + textwrap.dedent(program)
    with fake_service() as service:
        if fork_support is None:
            ran = programs.run(code, service.address, *arguments)
        else:
            ran = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code, service.address, *arguments],
                env=programs.environment(GRPC_ENABLE_FORK_SUPPORT=fork_support),
                capture_output=True,
                text=True,
                timeout=550,
                check=False,
            )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.split("\n")[:-1]


BEFORE = {
    "in use": ("", False),
    "closed": ("client.close()", True),
    "collected": ("del client; gc.collect()", True),
    "another too": ("other = Client(address, timeout_s=20); other.group_norm_backward(**operands)", False),
}


@pytest.mark.parametrize(("before", "takes_apart"), BEFORE.values(), ids=list(BEFORE))
def test_a_child_may_open_a_client(before: str, takes_apart: bool) -> None:
    """A fork waits until gRPC has taken a channel apart; else about one child in a hundred hangs here."""
    found = run(f"""
        client = Client(address, timeout_s=20)
        client.group_norm_backward(**operands)

        def act():
            assert not {takes_apart} or time.monotonic() - start >= _forks.SETTLE_S
            Client(address, timeout_s=20, retry=None).group_norm_backward(**operands)

        start = time.monotonic()
        {before}
        in_children(act)
        """)
    assert found == ["ok"] * 6


@pytest.mark.parametrize("fork_support", [None, "1"], ids=["by default", "switched on"])
def test_a_child_and_its_own_may_use_their_parents_client_and_so_may_the_parent_afterwards(
    fork_support: str | None,
) -> None:
    program = """
        client = Client(address, timeout_s=20, retry=None)

        def use():
            for _ in range(3):
                client.group_norm_backward(**operands)
            client.submit.group_norm_backward(**operands).result(20)

        def act():
            use()
            assert len(client.run_many(client.group_norm_backward, [operands] * 5, concurrency=2)) == 5
            in_children(use, 1)
            client.close()

        use()
        in_children(act)
        use()
        print("parent ok")
        """
    assert run(program, fork_support=fork_support) == [*["ok"] * 12, "parent ok"]


@pytest.mark.parametrize(
    ("fork_support", "number"),
    [
        (None, 20),
        pytest.param(None, 60, marks=pytest.mark.deep),
        pytest.param("1", 60, marks=pytest.mark.deep),
    ],
)
def test_a_fork_beside_threads_that_call_is_well_for_all(fork_support: str | None, number: int) -> None:
    """Without the gate about one child in a hundred crashes or hangs."""
    program = f"""
        client = Client(address, timeout_s=60)
        client.group_norm_backward(**operands)
        ending, wrong, number = threading.Event(), [], [0]

        def keep_calling():
            while not ending.is_set():
                try:
                    client.group_norm_backward(**operands)
                    number[0] += 1
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=keep_calling) for _ in range(2)]
        [thread.start() for thread in threads]
        in_children(lambda: client.group_norm_backward(**operands, timeout_s=15), {number})
        ending.set()
        [thread.join() for thread in threads]
        print("parent", wrong or "ok", number[0] > 0)
        """
    assert run(program, fork_support=fork_support) == [*["ok"] * number, "parent ok True"]


@WAYS
def test_a_fork_waits_for_a_call_on_its_way(way: int, tmp_path: Path) -> None:
    """The first call is answered when the test has seen that no child is born, and answered, before."""
    gate, calls = Gate(), list[None]()

    def hold_first(context: Context) -> None:
        calls.append(None)
        if len(calls) == 1:
            gate.hold()

    program = f"""
        client = Client(address, timeout_s=60, stream_from_bytes={way})
        calling = threading.Thread(target=lambda: client.group_norm_backward(**operands))
        calling.start()
        open(sys.argv[2]).close()
        os.register_at_fork(before=lambda: print("forking", flush=True))
        in_children(lambda: client.group_norm_backward(**operands), 1)
        calling.join()
        """
    go = tmp_path / "go"
    os.mkfifo(go)
    with fake_service(before=hold_first) as service, tempfile.TemporaryFile("w") as stderr:
        code = HEAD + textwrap.dedent(program)
        forking = programs.start(code, service.address, str(go), stderr=stderr)
        assert forking.stdout is not None
        with forking.stdout as stdout:
            gate.wait_for_call()
            go.open("w").close()
            assert stdout.readline() == "forking\n"
            born, _, _ = select.select([stdout], [], [], 0.5)
            gate.open()
            assert not born
            assert stdout.read() == "ok\n"
        assert forking.wait(60) == 0


def test_without_grpcs_support_a_fork_is_an_error_where_it_would_be_a_hang() -> None:
    program = """
        client = Client(address, timeout_s=20)
        client.group_norm_backward(**operands)
        in_children(lambda: client.group_norm_backward(**operands), 1)
        """
    (found,) = run(program, fork_support="0")
    assert found.startswith("ClientUnusable: this process was forked with GRPC_ENABLE_FORK_SUPPORT=0")


@pytest.mark.skipif(
    tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 85),
    reason="grpcio 1.67.1 and 1.74.0 crash where an asynchronous channel is open at a fork",
)
def test_an_open_asynchronous_client_forbids_another_in_a_child_and_allows_a_blocking_one() -> None:
    found = run("""
        client = AsyncClient(address, timeout_s=20)
        asyncio.run(call(client))
        in_children(lambda: asyncio.run(call(client)), 1)
        in_children(lambda: asyncio.run(call(AsyncClient(address))), 1)
        in_children(lambda: Client(address, timeout_s=20).group_norm_backward(**operands), 3)
        asyncio.run(call(client))
        print("parent ok")
        """)
    assert [line.partition(",")[0] for line in found[:2]] == [
        "ClientUnusable: this process was forked while an AsyncClient was open"
    ] * 2
    assert found[2:] == ["ok", "ok", "ok", "parent ok"]


def test_a_closed_asynchronous_client_leaves_children_free() -> None:
    found = run("""
        asyncio.run(open_and_call())
        in_children(lambda: asyncio.run(open_and_call()), 4)
        asyncio.run(open_and_call())
        print("parent ok")
        """)
    assert found == [*["ok"] * 4, "parent ok"]


def test_a_pre_forking_parent_shares_its_client_with_its_workers() -> None:
    """As gunicorn does with preload_app: the application is made, and used, before the workers are forked."""
    found = run("""
        client = Client([address], timeout_s=20)
        client.group_norm_backward(**operands)
        workers = []
        for number in range(3):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                with ThreadPoolExecutor(4) as pool:
                    done = list(pool.map(lambda _: client.group_norm_backward(**operands), range(20)))
                os.write(writer, str(len(done)).encode())
                os._exit(0)
            os.close(writer)
            workers.append((child, reader))
        for child, reader in workers:
            with os.fdopen(reader) as pipe:
                print(pipe.read(), os.waitpid(child, 0)[1])
        client.group_norm_backward(**operands)
        """)
    assert found == ["20 0"] * 3


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("way", "epochs", "workers"), [("fork", 2, 2), ("spawn", 1, 1)])
def test_a_dataset_calls_from_dataloader_workers(way: str, epochs: int, workers: int, tmp_path: Path) -> None:
    """Once more in new workers where they are forked; those that are spawned import everything anew."""
    pytest.importorskip("torch")
    program = """
    import sys
    import torch
    from npugrad_client import Client


    class Gradients(torch.utils.data.Dataset):
        def __init__(self, client):
            self.client = client

        def __len__(self):
            return 12

        def __getitem__(self, index):
            x = torch.full((1, 1, 4), float(index))
            one = torch.ones(1, 1)
            grads = self.client.group_norm_backward(
                grad_out=x, input=x, mean=one, rstd=one, n=1, c=1, hxw=4, group=1, output_mask=(True,) * 3)
            return grads.grad_input


    if __name__ == "__main__":
        torch.set_num_threads(1)
        client = Client(sys.argv[1], timeout_s=60)
        dataset = Gradients(client)
        dataset[0]
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=3, num_workers=int(sys.argv[4]), multiprocessing_context=sys.argv[2])
        for _ in range(int(sys.argv[3])):
            print(sum(len(batch) for batch in loader), flush=True)
        dataset[1]
    """
    (tmp_path / "load.py").write_text(textwrap.dedent(program))
    with fake_service() as service:
        ran = subprocess.run(
            [
                *(sys.executable, "-W", "ignore", tmp_path / "load.py"),
                *(service.address, way, str(epochs), str(workers)),
            ],
            capture_output=True,
            text=True,
            timeout=550,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == ["12"] * epochs


# The gate that keeps calls out of gRPC while a process forks, without a fork.


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def inside(gate: ForkGate, threads: ThreadPoolExecutor) -> threading.Event:
    """A thread inside the gate, which leaves when the event is set."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with gate:
            entered.set()
            assert leave.wait(60)

    threads.submit(stay)
    assert entered.wait(60)
    return leave


def test_a_fork_waits_for_who_is_inside(threads: ThreadPoolExecutor) -> None:
    gate = ForkGate(60)
    leave = inside(gate, threads)
    shut = threads.submit(gate.shut)
    assert not wait([shut], 0.2).done
    leave.set()
    assert shut.result(60)


def test_who_comes_meanwhile_waits_for_all_forks(threads: ThreadPoolExecutor) -> None:
    gate = ForkGate(60)
    assert gate.shut()
    assert gate.shut()
    entered = threading.Event()

    def enter() -> None:
        with gate:
            entered.set()

    coming = threads.submit(enter)
    gate.open()
    assert not entered.wait(0.2)
    gate.open()
    coming.result(60)
    assert entered.is_set()


def test_a_fork_does_not_wait_for_its_own_thread_or_for_ever(threads: ThreadPoolExecutor) -> None:
    gate = ForkGate(0.01)
    with gate:
        assert gate.shut()
        gate.open()
        leave = inside(gate, threads)
        assert not gate.shut()
        gate.open()
        leave.set()


def test_a_child_begins_with_an_open_gate(threads: ThreadPoolExecutor) -> None:
    gate = ForkGate(60)
    leave = inside(gate, threads)
    forking = threads.submit(gate.shut)
    leave.set()
    forking.result(60)
    gate.reset()
    with gate:
        pass
    assert gate.shut()
