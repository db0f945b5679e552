"""How long one callback may hold the event loop: `make prove-loop-time`, a table.

Each row is something large that callers do: streams of hundreds of MiB, the largest messages there may be by
default, in sensible forms and in ones that are slow to read, replies that are given up. It has the longest
callback meanwhile, in the processor time of its thread. The device is simulated.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tests.calls import call_execute, call_unary, repeated, sample
from tests.e2e.harness import eventually
from tests.fix_server import ServerProcess, run_server
from tests.operators import GROUP_NORM
from tests.proofs.proof import MIB, Table, run, verdict
from tests.proofs.slow_streams import (
    STREAMS,
    SlowUploads,
    repeated_request,
    streams_in_progress,
    unread_reply,
)
from tests.proofs.timed_server import EVENT

Act = Callable[[ServerProcess, int], None]

MOST_S = 0.010
STREAMED_MIB = 256
_FIELDS = 2 * MIB - 1024
"""Fields of two bytes that nearly fill a message."""
_SERVER = ("-m", "tests.proofs.timed_server")


# ------------------------------------------------------------------------------------------ what callers do


def uploads(server: ServerProcess, nbytes: int) -> None:
    """Operands in the largest chunks, into memory that is touched for the first time, and again."""
    made = sample(n=1, c=4, hxw=nbytes // 32, group=2)
    with server.channel() as channel:
        for _ in range(2):
            call_execute(channel, made.frames(4 * MIB))


def replies(server: ServerProcess, nbytes: int) -> None:
    def take(_: int) -> None:
        with server.channel() as channel:
            call_execute(channel, [repeated_request(nbytes)])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(take, range(6)))


def moved_replies(server: ServerProcess, nbytes: int) -> None:
    """Results that nobody reads, which leave the arena as others wait for it, and are given up."""
    for _ in range(2):
        with unread_reply(server, nbytes), server.channel() as channel:
            call_execute(channel, [repeated_request(nbytes)])
        eventually(lambda: not server.info().output_arena_used_bytes, "the reply is gone", server)


def messages(server: ServerProcess, nbytes: int) -> None:
    """Unary calls near the limit of messages, up and down."""
    wide = sample(n=1, c=4, hxw=4 * MIB // 32, group=2).message()
    with server.channel() as channel:
        for _ in range(3):
            call_unary(channel, GROUP_NORM, wide)
            call_unary(channel, GROUP_NORM, repeated(4 * MIB - 2**17).message())


def axes(server: ServerProcess, nbytes: int) -> None:
    """A tensor of four million axes, as a unary call and as the header of a stream."""
    made = sample().message()
    made.grad_out.meta.shape[:] = [1] * (4 * MIB)
    header = repeated_request(4096)
    header.header.group_norm_backward.CopyFrom(made)
    with server.channel() as channel, suppress(grpc.RpcError):
        call_unary(channel, GROUP_NORM, made)
    with server.channel() as channel, suppress(grpc.RpcError):
        call_execute(channel, [header])


def fields(server: ServerProcess, nbytes: int) -> None:
    """Two million tiny fields: an attribute again and again, empty tensors, fields that nobody knows."""
    begun = sample().message().SerializeToString()
    for field in (b"\x38\x01", b"\x12\x00", b"\x78\x01"):
        with server.channel() as channel, suppress(grpc.RpcError):
            call_unary(channel, GROUP_NORM, begun + field * _FIELDS)


def slow_uploads(server: ServerProcess, nbytes: int) -> None:
    """300 uploads that send a byte ten times a second, and all vanish at once."""
    with SlowUploads(server.address, STREAMS, 0.1):
        eventually(lambda: streams_in_progress(server) >= STREAMS, "all uploads have begun", server)
    eventually(lambda: not streams_in_progress(server), "all uploads have ended", server)


CASES: dict[str, Act] = {
    "uploads in chunks of 4 MiB": uploads,
    "six replies, streamed": replies,
    "moved replies, given up": moved_replies,
    "messages of 4 MiB": messages,
    "4 million axes": axes,
    "2 million fields": fields,
    "300 slow uploads": slow_uploads,
}


# --------------------------------------------------------------------------------------------- what it costs


@dataclass(frozen=True)
class LoopRow:
    """The longest callback of a case, in seconds of its thread's time."""

    name: str
    seconds: float
    what: str


@contextmanager
def timed_server(folder: Path, nbytes: int) -> Iterator[ServerProcess]:
    """A server whose arenas have room for one reply of so many bytes, or for its operands."""
    small = ("--input-arena-bytes", str(2 * nbytes), "--output-arena-bytes", str(nbytes + 2 * 64))
    flags = (*small, "--metrics-listen", "127.0.0.1:0")
    with run_server(folder / "server.log", *flags, devices="test:1", program=_SERVER) as running:
        with running.channel() as channel:
            for _ in range(20):
                call_unary(channel, GROUP_NORM, sample().message())
        yield running


def rows(server: ServerProcess, nbytes: int, names: Iterable[str] = CASES) -> Iterator[LoopRow]:
    _longest(server, 1)  # that of the start
    for number, name in enumerate(names, 2):
        CASES[name](server, nbytes)
        found = _longest(server, number)
        yield LoopRow(name, found["seconds"], found["what"])


def _longest(server: ServerProcess, number: int) -> dict[str, Any]:
    server.signal(signal.SIGUSR1)
    return server.find_log(EVENT, number=number)


def main(given: Any, folder: Path) -> bool:
    table, is_kept = Table(case=28, ms=8, what=0), True
    with timed_server(folder, given.mib * MIB) as server:
        for row in rows(server, given.mib * MIB):
            table.row(row.name, row.seconds * 1e3, row.what)
            is_kept = is_kept and row.seconds <= MOST_S
    return verdict(f"longest callback at most {MOST_S * 1e3:g} ms (SIMULATED device)", is_kept)


if __name__ == "__main__":
    run(main, __doc__, mib=(STREAMED_MIB, "of streamed operands and results"))
