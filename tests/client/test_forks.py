"""Clients in forked processes, DataLoader workers and pre-forking parents, all in processes of their own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.client.fake_service import STREAMED, UNARY, Context, fake_service, stream_zeros, zeros

from npugrad.operator import OpRecord

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")

HEAD = """
import asyncio, gc, os, signal, sys, threading, time
import numpy as np
from npugrad_client import AsyncClient, Client

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


"""


def run(program: str, *arguments: str, env: dict[str, str] | None = None) -> list[str]:
    """What a program prints, run in a process of its own beside a service."""
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    with fake_service() as service:
        command = [sys.executable, "-W", "ignore", "-c", HEAD + textwrap.dedent(program)]
        ran = subprocess.run(
            [*command, service.address, *arguments],
            env=clean | (env or {}),
            capture_output=True,
            text=True,
            timeout=550,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.split("\n")[:-1]


SUPPORT = pytest.mark.parametrize(
    "env", [{}, {"GRPC_ENABLE_FORK_SUPPORT": "1"}], ids=["by default", "switched on"]
)
NEW = pytest.mark.skipif(
    tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 85),
    reason="grpcio 1.67.1 and 1.74.0 crash where an asynchronous channel is open at a fork",
)

BEFORE = {
    "in use": "",
    "closed": "client.close()",
    "collected": "del client; gc.collect()",
    "another too": "other = Client(address, timeout_s=20); other.group_norm_backward(**operands)",
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=list(BEFORE))
def test_a_child_may_open_a_client(before: str) -> None:
    found = run(f"""
        client = Client(address, timeout_s=20)
        client.group_norm_backward(**operands)
        {before}
        in_children(lambda: Client(address, timeout_s=20, retry=None).group_norm_backward(**operands))
        """)
    assert found == ["ok"] * 6


@pytest.mark.parametrize("end", [BEFORE["closed"], BEFORE["collected"]], ids=["closed", "collected"])
def test_a_fork_waits_until_grpc_has_taken_a_channel_apart(end: str) -> None:
    """Else about one child in a hundred hangs where it opens a client."""
    found = run(f"""
        from npugrad_client import _forks
        client = Client(address, timeout_s=20)
        client.group_norm_backward(**operands)
        start = time.monotonic()
        {end}
        in_children(lambda: None, 1)
        print(time.monotonic() - start >= _forks.SETTLE_S)
        """)
    assert found == ["ok", "True"]


@SUPPORT
def test_a_child_may_use_its_parents_client_and_so_may_the_parent_afterwards(env: dict[str, str]) -> None:
    found = run(
        """
        client = Client(address, timeout_s=20, retry=None)
        client.group_norm_backward(**operands)

        def act():
            for _ in range(3):
                client.group_norm_backward(**operands)
            client.close()

        in_children(act)
        client.group_norm_backward(**operands)
        print("parent ok")
        """,
        env=env,
    )
    assert found == [*["ok"] * 6, "parent ok"]


def test_futures_and_batches_of_a_parents_client_work_in_a_child() -> None:
    found = run("""
        client = Client(address, timeout_s=20, retry=None)
        client.submit.group_norm_backward(**operands).result(20)

        def act():
            client.submit.group_norm_backward(**operands).result(20)
            assert len(client.run_many(client.group_norm_backward, [operands] * 5, concurrency=2)) == 5

        in_children(act, 3)
        client.submit.group_norm_backward(**operands).result(20)
        """)
    assert found == ["ok"] * 3


def test_a_grandchild_may_as_well() -> None:
    found = run("""
        client = Client(address, timeout_s=20, retry=None)
        client.group_norm_backward(**operands)

        def act():
            client.group_norm_backward(**operands)
            in_children(lambda: client.group_norm_backward(**operands), 2)

        in_children(act, 2)
        """)
    assert found == ["ok"] * 6


@SUPPORT
def test_a_fork_beside_threads_that_call_is_well_for_all(env: dict[str, str]) -> None:
    """Without the gate about one child in a hundred crashes or hangs."""
    found = run(
        """
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
        in_children(lambda: client.group_norm_backward(**operands, timeout_s=15), 60)
        ending.set()
        [thread.join() for thread in threads]
        print("parent", wrong or "ok", number[0] > 0)
        """,
        env=env,
    )
    assert found == [*["ok"] * 60, "parent ok True"]


@pytest.mark.parametrize("stream_from_bytes", [UNARY, STREAMED], ids=["unary", "streamed"])
def test_a_fork_waits_for_a_call_on_its_way(stream_from_bytes: int) -> None:
    """The first call is answered when the test has seen that no child is born before."""
    released, seen = threading.Event(), threading.Event()

    def hold() -> None:
        seen.set()
        assert released.wait(60)

    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        hold()
        return zeros(record, request, context)

    def execute(frames: Iterator[Any], context: Context) -> Iterator[Any]:
        hold()
        yield from stream_zeros(frames, context)

    program = f"""
        client = Client(address, timeout_s=60, stream_from_bytes={stream_from_bytes})
        calling = threading.Thread(target=lambda: client.group_norm_backward(**operands))
        calling.start()
        sys.stdin.readline()
        os.register_at_fork(before=lambda: print("forking", flush=True))
        in_children(lambda: client.group_norm_backward(**operands), 1)
        calling.join()
        """
    with fake_service(unary, execute) as service:
        command = [sys.executable, "-c", HEAD + textwrap.dedent(program), service.address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forking:
            assert forking.stdin is not None
            assert forking.stdout is not None
            assert seen.wait(60)
            forking.stdin.write("fork\n")
            forking.stdin.flush()
            assert forking.stdout.readline() == "forking\n"
            born, _, _ = select.select([forking.stdout], [], [], 0.5)
            released.set()
            assert not born
            assert forking.stdout.read() == "ok\n"
    assert forking.returncode == 0


def test_without_grpcs_support_a_fork_is_an_error_where_it_would_be_a_hang() -> None:
    found = run(
        """
        client = Client(address, timeout_s=20)
        client.group_norm_backward(**operands)
        in_children(lambda: client.group_norm_backward(**operands), 1)
        """,
        env={"GRPC_ENABLE_FORK_SUPPORT": "0"},
    )
    assert len(found) == 1
    assert found[0].startswith("RuntimeError: this process was forked with GRPC_ENABLE_FORK_SUPPORT=0")


ASYNC = """
async def call(client):
    await client.group_norm_backward(**operands)
"""


@NEW
def test_an_open_asynchronous_client_forbids_another_in_a_child_and_allows_a_blocking_one() -> None:
    found = run(f"""{textwrap.indent(ASYNC, " " * 8)}
        client = AsyncClient(address, timeout_s=20)
        asyncio.run(call(client))
        in_children(lambda: asyncio.run(call(client)), 1)
        in_children(lambda: asyncio.run(call(AsyncClient(address))), 1)
        in_children(lambda: Client(address, timeout_s=20).group_norm_backward(**operands), 3)
        asyncio.run(call(client))
        print("parent ok")
        """)
    assert [line.partition(",")[0] for line in found[:2]] == [
        "RuntimeError: this process was forked while an AsyncClient was open"
    ] * 2
    assert found[2:] == ["ok", "ok", "ok", "parent ok"]


def test_a_closed_asynchronous_client_leaves_children_free() -> None:
    found = run(f"""{textwrap.indent(ASYNC, " " * 8)}
        async def whole():
            async with AsyncClient(address, timeout_s=20) as client:
                await call(client)

        asyncio.run(whole())
        in_children(lambda: asyncio.run(whole()), 4)
        asyncio.run(whole())
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
                from concurrent.futures import ThreadPoolExecutor
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


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("way", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_a_dataset_calls_from_dataloader_workers(way: str, tmp_path: os.PathLike[str]) -> None:
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
            dataset, batch_size=3, num_workers=2, multiprocessing_context=sys.argv[2])
        for _ in range(2):
            print(sum(len(batch) for batch in loader), flush=True)
        dataset[1]
    """
    path = os.path.join(tmp_path, "load.py")
    with open(path, "w") as file:
        file.write(textwrap.dedent(program))
    with fake_service() as service:
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", path, service.address, way],
            capture_output=True,
            text=True,
            timeout=550,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == ["12", "12"]
