"""`client.profile`: every call that ends is in the file, whatever becomes of it or of the process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.client import programs
from tests.client.both import BOTH, WAYS, Make
from tests.client.fake_service import STREAMED, Context, Gate, abort_with, fake_service, group_norm
from tests.fix_server import ServerProcess

from npugrad.errors import ServerBusy
from npugrad_client import AsyncClient, Client, InvalidOperand, MalformedRequest, RetryPolicy

OPERATOR = "group_norm_backward"
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")


def slices(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text(encoding="utf-8")) if event["ph"] == "X"]


def calls(path: Path) -> list[dict[str, Any]]:
    """What is shown of the calls in a file, as they ended."""
    return [event["args"] for event in slices(path) if event["name"] == OPERATOR and event["pid"] == 1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls.json"


@WAYS
@BOTH
def test_a_call_is_there_with_its_stages_here_and_at_the_server(
    server: ServerProcess, path: Path, make: Make, way: int
) -> None:
    with make(server.address, timeout_s=60, stream_from_bytes=way) as client, client.profile(path):
        info = client.group_norm_backward(**group_norm()).info
        with pytest.raises(InvalidOperand):
            client.group_norm_backward(**{**group_norm(), "group": 0})
    call, refused = calls(path)
    assert (call["request_id"], call["device"]) == (info.request_id, info.device)
    assert call["bytes"] > 0
    assert refused["error"].startswith("InvalidOperand: ")
    names = [each["name"] for each in slices(path)]
    assert {"try 1", "pack", "decode", "queued", "run", "encode"} <= set(names)
    assert ("send" in names) is ("read" in names) is (way == STREAMED)
    assert names.count(OPERATOR) >= 3, "of the server as well"


@BOTH
def test_calls_that_fail_are_there(path: Path, make: Make) -> None:
    def refuse(context: Context) -> None:
        abort_with(context, ServerBusy("the queue is full", operator=OPERATOR))

    once = RetryPolicy(max_tries=2, initial_backoff_s=0.001)
    with (
        fake_service(before=refuse) as service,
        make(service.address, timeout_s=60, retry=once) as client,
        client.profile(path),
    ):
        with pytest.raises(TypeError):
            client.group_norm_backward(**{**group_norm(), "input": "no array"})
        with pytest.raises(MalformedRequest):
            client.group_norm_backward(**group_norm(), priority=1000)
        with pytest.raises(ServerBusy):
            client.group_norm_backward(**group_norm())
    errors = [call["error"].split(":")[0] for call in calls(path)]
    assert errors == ["WrongType", "MalformedRequest", "ServerBusy"]
    assert calls(path)[-1]["request_id"] == "abc123"
    tries = [each for each in slices(path) if each["name"].startswith("try ")]
    assert [each["name"] for each in tries] == ["try 1", "try 2"]
    assert {each["args"]["error"] for each in tries} == {"ServerBusy"}


def test_a_task_that_is_cancelled_is_there(path: Path) -> None:
    gate = Gate()

    async def main(address: str) -> None:
        async with AsyncClient(address, timeout_s=60) as client:
            with client.profile(path):
                task = asyncio.ensure_future(client.group_norm_backward(**group_norm()))
                await asyncio.to_thread(gate.wait_for_call)
                task.cancel()
                await asyncio.wait([task])

    with fake_service(before=gate.hold) as service:
        asyncio.run(main(service.address))
        gate.open()
    assert calls(path)[0]["error"].startswith("CancelledError")


@BOTH
def test_calls_at_once_are_there_and_only_those_in_the_block(path: Path, make: Make) -> None:
    with fake_service() as service, make(service.address, timeout_s=60) as client:
        client.group_norm_backward(**group_norm())
        with client.profile(path):
            flying = [client.submit.group_norm_backward(**group_norm(seed=seed)) for seed in range(40)]
            for each in flying:
                each.result(60)
        client.group_norm_backward(**group_norm())
    assert len(calls(path)) == 40
    assert len({each["tid"] for each in slices(path) if each["pid"] == 1}) > 1


def test_several_at_once_have_a_file_each(tmp_path: Path) -> None:
    outer, inner, late = (tmp_path / name for name in ("outer", "inner", "late"))
    with fake_service() as service, Client(service.address, timeout_s=60) as client:
        first = client.profile(late)
        with client.profile(outer):
            with client.profile(str(inner)):
                client.group_norm_backward(**group_norm())
                first.__enter__()
            client.group_norm_backward(**group_norm())
        client.group_norm_backward(**group_norm())
        first.__exit__(None, None, None)
    assert [len(calls(path)) for path in (outer, inner, late)] == [2, 1, 2]


def test_a_block_without_calls_leaves_a_file_without_any(path: Path) -> None:
    path.write_text("what was there before, and longer than what comes", encoding="utf-8")
    with Client("127.0.0.1:1") as client, client.profile(path):
        pass
    assert calls(path) == []


def test_what_the_block_raises_comes_out_and_the_file_is_whole(path: Path) -> None:
    with fake_service() as service, Client(service.address, timeout_s=60) as client:
        with pytest.raises(MalformedRequest), client.profile(path):
            client.group_norm_backward(**group_norm(), priority=1000)
        assert not client._sinks
    assert len(calls(path)) == 1


def test_the_operands_of_a_call_are_not_kept(path: Path) -> None:
    operands = group_norm()
    seen = weakref.ref(operands["input"])
    with fake_service() as service, Client(service.address, timeout_s=60) as client, client.profile(path):
        info = client.group_norm_backward(**operands).info
        operands.clear()
        assert seen() is None
    assert info.timeline is not None


def test_a_file_that_cannot_be_opened_or_begun_is_an_error_at_once(tmp_path: Path) -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(FileNotFoundError), client.profile(tmp_path / "absent" / "calls.json"):
            pytest.fail("entered")
        if Path("/dev/full").exists():
            with pytest.raises(OSError, match="space"), client.profile("/dev/full"):
                pytest.fail("entered")
        assert not client._sinks


@pytest.fixture
def broken(path: Path) -> Callable[[], None]:
    """Makes the file a pipe, and gives what breaks it."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return lambda: os.close(reader)


@FORKS
def test_a_file_that_breaks_fails_no_call_and_is_an_error_at_the_end(
    path: Path, broken: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with fake_service() as service, Client(service.address, timeout_s=60) as client:
        profile = client.profile(path)
        profile.__enter__()
        broken()
        grads = client.group_norm_backward(**group_norm())
        with caplog.at_level(logging.WARNING), pytest.raises(BrokenPipeError, match=re.escape(str(path))):
            profile.__exit__(None, None, None)
        assert np.all(grads.grad_input == 0)
        assert not client._sinks
    assert [record.message.split(":")[0] for record in caplog.records] == ["the profile ends here"]


def leave_by_an_error(client: Client, path: Path, before: Callable[[], None]) -> None:
    with client.profile(path):
        before()
        raise KeyError("mine")


@FORKS
def test_what_the_block_raises_matters_more_than_a_file_that_breaks(
    path: Path, broken: Callable[[], None]
) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(KeyError, match="mine"):
        leave_by_an_error(client, path, broken)


HEAD = """
import os, pathlib, signal, sys, time
from npugrad_client import Client
from tests.client.fake_service import group_norm

address, path = sys.argv[1:]
"""


def test_a_crash_leaves_a_file_that_can_be_loaded(path: Path) -> None:
    program = """
with Client(address, timeout_s=60) as client, client.profile(path):
    for _ in range(3):
        client.group_norm_backward(**group_norm())
    while pathlib.Path(path).read_text().count('"try 1"') < 3:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with fake_service() as service:
        assert programs.run(HEAD + program, service.address, path).returncode == -signal.SIGKILL
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "]", encoding="utf-8")  # which the format allows to be missing
    assert len(calls(path)) == 3


@FORKS
def test_a_forked_process_does_not_write_into_its_parents_file(path: Path) -> None:
    program = """
with Client(address, timeout_s=60) as client:
    with client.profile(path):
        client.group_norm_backward(**group_norm(), label="parent")
        child = os.fork()
        client.group_norm_backward(**group_norm())
        if child:
            assert os.waitpid(child, 0)[1] == 0
            client.group_norm_backward(**group_norm())
"""
    with fake_service() as service:
        ended = programs.run(HEAD + program, service.address, path)
    assert ended.returncode == 0, ended.stderr
    assert len(calls(path)) == 3


def test_the_thread_ends_with_the_block(path: Path) -> None:
    with Client("127.0.0.1:1") as client, client.profile(path):
        assert "npugrad-profile" in {thread.name for thread in threading.enumerate()}
    assert "npugrad-profile" not in {thread.name for thread in threading.enumerate()}
