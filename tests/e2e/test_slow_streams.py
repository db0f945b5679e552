"""Streams that are slow over real connections: what their clients are told, and what others notice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.calls import TIMEOUT_S, Sample, call_execute, failure_of, repeated, sample
from tests.fix_server import ServerProcess, run_quick_server

from npugrad.errors import DeadlineExceeded
from npugrad.v1 import backward_pb2_grpc

pytestmark = pytest.mark.slow

LARGE_BYTES = 24_000_000
UPLOAD_PAUSE_S, REPLY_PAUSE_S = 0.05, 0.4
RATED = (
    *("--upload-min-bytes-per-s", "1048576", "--upload-idle-timeout-s", "3"),
    *("--reply-min-bytes-per-s", "1073741824", "--reply-idle-timeout-s", "3"),
)
"""More than these tests do. A stream may be idle for longer than a machine stands still now and then."""
LIMITED = (
    *("--upload-min-bytes-per-s", "0", "--upload-limit-s", "1"),
    *("--reply-min-bytes-per-s", "0", "--reply-limit-s", "0.5"),
)
"""Any rate, for a short time."""


@pytest.fixture(scope="module")
def large() -> Sample:
    """Operands and one result of 24 MB: far beyond what gRPC buffers."""
    return sample(n=1, c=4, hxw=LARGE_BYTES // 16, group=2)


def slowly(frames: Iterator[Any], pause_s: float) -> Iterator[Any]:
    """Frames none of which comes so late that the stream were idle, and which take long together."""
    pause = threading.Event()
    for frame in frames:
        yield frame
        pause.wait(pause_s)


def end_of_upload(running: ServerProcess, made: Sample, chunk_bytes: int, frames: int | None = None) -> str:
    """What the caller of a slow upload is told; of one that stands still after so many frames."""
    still = threading.Event()

    def sent() -> Iterator[Any]:
        for number, frame in enumerate(slowly(made.frames(chunk_bytes), UPLOAD_PAUSE_S), 1):
            yield frame
            if number == frames:
                still.wait(TIMEOUT_S)

    with running.channel() as channel:
        failure = failure_of(lambda: call_execute(channel, sent()))
    still.set()
    assert failure.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert isinstance(failure.error, DeadlineExceeded)
    return str(failure.error)


def take_slowly(replies: Any, running: ServerProcess) -> None:
    """Takes a reply slowly until the server has given it up, then the rest at once: it is cut off soon."""
    for _ in slowly(replies, REPLY_PAUSE_S):
        if not running.info().output_arena_used_bytes:
            break
    list(replies)


def end_of_reply(running: ServerProcess) -> str:
    """What the caller of a reply of 24 MB is told, whose operands need no upload that takes time as well."""
    with running.channel() as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        header = repeated(LARGE_BYTES).header(chunk_from_bytes=2**10)[0]
        replies = stub.Execute(iter([header]), timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as caught:
            take_slowly(replies, running)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return str(caught.value.details())


def test_streams_below_the_least_rate_are_ended(tmp_path: Path, large: Sample) -> None:
    """All at once; one that stands still is told so, and a quick one is served."""
    quick = sample()
    with run_quick_server(tmp_path / "log", *RATED) as running, ThreadPoolExecutor(4) as pool:
        before_it_has_memory = pool.submit(end_of_upload, running, large, 1)
        after = pool.submit(end_of_upload, running, large, 1000)
        still = pool.submit(end_of_upload, running, large, 1, 1)
        reply = pool.submit(end_of_reply, running)
        for upload in (before_it_has_memory, after):
            assert "execute: stream: found " in upload.result()
            assert "expected at least 1.04858e+06 bytes/s after the first 3 s" in upload.result()
        assert "found no frame from the client for 3 s; expected a chunk" in still.result()
        assert "expected at least 1.07374e+09 bytes/s after the first 3 s" in reply.result()
        running.assert_nothing_leaked()
        with running.channel() as channel:
            assert call_execute(channel, quick.frames()).contents == quick.reference()
        assert "InvalidStateError" not in running.log_text()


def test_streams_that_take_longer_than_they_may_are_ended(tmp_path: Path, large: Sample) -> None:
    with run_quick_server(tmp_path / "log", *LIMITED) as running, ThreadPoolExecutor(2) as pool:
        upload = pool.submit(end_of_upload, running, large, 2**16)
        assert "expected all of it within 0.5 s" in pool.submit(end_of_reply, running).result()
        assert "expected all of it within 1 s" in upload.result()
        running.assert_nothing_leaked()


# --------------------------------------------------------------------------------------- what others notice


@contextmanager
def unread(running: ServerProcess, made: Sample) -> Iterator[Any]:
    """A call with its reply there, of which its client has taken the header, and buffers next to nothing."""
    options = (("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))
    with grpc.insecure_channel(running.address, options=options) as channel:
        replies = backward_pb2_grpc.BackwardServiceStub(channel).Execute(made.frames(), timeout=TIMEOUT_S)
        assert next(replies).WhichOneof("frame") == "header"
        yield replies


def content_of(replies: Any) -> bytes:
    return b"".join(frame.chunk.data for frame in replies)


def test_replies_nobody_reads_do_not_hold_their_device(tmp_path: Path, large: Sample) -> None:
    """There is room for one in the arena, and for one beside it; a third one costs whoever reads nothing."""
    flags = ("--output-arena-bytes", "32MiB", "--front-memory-bytes", "84MiB")
    expected = large.reference()
    with ExitStack() as stack:
        running = stack.enter_context(run_quick_server(tmp_path / "server.log", *flags))
        other = stack.enter_context(running.channel())
        first = stack.enter_context(unread(running, large))
        assert call_execute(other, large.frames()).contents == expected
        second = stack.enter_context(unread(running, large))
        assert call_execute(other, large.frames()).contents == expected
        # This one first: the server closes its connection soon after sending its end, which waits behind a
        # frame that nobody has read.
        with pytest.raises(grpc.RpcError) as caught:
            content_of(second)
        assert content_of(first) == expected["grad_input"]
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "found its results unread while other calls wait for memory" in str(caught.value.details())
        running.find_log("call", reason="QUEUE_FULL")
