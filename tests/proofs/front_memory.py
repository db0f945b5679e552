"""What callers can make the front process hold outside of the arenas: `make prove-front-memory`, a table.

- unread replies: 60 requests of about 100 bytes, whose operands repeat one element, each with a reply of
  4 MiB. The caller reads its socket and never gives the streams any window, so that no reply passes.
- gzip: messages of 47 KiB that would be 47 MiB.
- unread streams: 200 calls of Execute, each with a chunk of its reply on its way that nobody takes.
- unfinished messages: 1,000 calls, each of which announces a message of 4 MiB and sends all but its last
  byte, as far as the server lets it; for every method, as gRPC may hold some MiB of any of them.
- six big replies of 256 MiB at once: unary, streamed to clients that read, streamed to one that does not.
- unread replies over a Unix socket, to a caller that reads nothing and to one that gives no window: how long
  they are held, lines in the log, eight calls of another caller once they are gone. Then 50 servers are ended
  while replies are unread.

Each row has how much the front process grew, the most that its metrics said, how many calls were refused,
and the seconds until nothing is held; after unfinished messages also until the process has given it back.
A neighbour calls all the while; each of its answers has to be right.
"""

from __future__ import annotations

import gzip
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.resident import status_bytes
from tests.calls import call_execute, call_unary, header_frame, repeated
from tests.e2e.harness import eventually
from tests.fix_server import ServerProcess, run_server
from tests.http2 import (
    ACK,
    DATA,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_headers,
    frame,
    message,
    split_frames,
)
from tests.operators import GROUP_NORM
from tests.proofs.callers import Load, plain
from tests.proofs.proof import MIB, Table, run, verdict

SLACK_BYTES = 64 * MIB
"""What the front process may grow by beyond `front_memory_bytes`."""
GONE_S = 60.0
NEIGHBOURS_BYTES = 2 * 5 * MIB
"""What is held for a call of the neighbour that may be on its way."""
UNARY = f"/npugrad.v1.BackwardService/{GROUP_NORM.rpc}".encode()
EXECUTE = b"/npugrad.v1.BackwardService/Execute"
ATTACKER = "127.0.0.2"
"""Where callers that read nothing come from, so that they are another tenant than the neighbour."""
METHODS = {
    "unary": UNARY,
    "Execute": EXECUTE,
    "Validate": b"/npugrad.v1.ValidationService/Validate",
    "GetServerInfo": b"/npugrad.v1.ServerService/GetServerInfo",
    "ListOperators": b"/npugrad.v1.ServerService/ListOperators",
    "Check": b"/grpc.health.v1.Health/Check",
    "Watch": b"/grpc.health.v1.Health/Watch",
    "List": b"/grpc.health.v1.Health/List",
    "reflection": b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}
"""A method of each kind and service; other operators are as the one."""
_TIMEOUT_S, _LOOK_S, _SEEN_S, _STUCK_S = 120.0, 0.1, 2.0, 3.0
_FRAME_BYTES = 16_000
_MESSAGE_BYTES = 4 * MIB


@dataclass(frozen=True)
class Row:
    """What an attack did.

    The front process had grown by so much at most, and its metrics said so much at most. It had given all
    back after `gone_s`, or not within `GONE_S` and some; what is left is free: malloc keeps it for a while.
    """

    name: str
    limit_bytes: int
    calls: int
    refused: int
    grown_bytes: int
    shown_bytes: float
    gone_s: float | None
    left_bytes: int
    neighbour: Load
    slack_bytes: int = SLACK_BYTES

    @property
    def is_kept(self) -> bool:
        bounded = max(self.grown_bytes - self.slack_bytes, self.shown_bytes) <= self.limit_bytes
        is_gone = self.gone_s is not None and self.gone_s <= GONE_S
        return bounded and is_gone and not self.neighbour.failed


# --------------------------------------------------------------------------------------------- the callers


class Unread:
    """A connection whose calls never get another window: what goes beyond it stays with the server."""

    def __init__(
        self,
        address: str,
        path: bytes,
        messages: Sequence[bytes],
        *more: tuple[bytes, bytes],
        window_bytes: int = 0,
        reads: bool = True,
    ) -> None:
        self._socket = _connection(address)
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0, b"\0\4" + window_bytes.to_bytes(4, "big")))
        for index, data in enumerate(messages):
            stream = 2 * index + 1
            pieces = [data[at : at + _FRAME_BYTES] for at in range(0, len(data), _FRAME_BYTES)]
            frames = (frame(DATA, END_STREAM if p is pieces[-1] else 0, stream, p) for p in pieces)
            self._socket.sendall(call_headers(path, stream, *more) + b"".join(frames))
        self.said = b""
        self.closed = threading.Event()
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):
            while found := self._socket.recv(2**16):
                self.said = (self.said + found)[-(2**20) :]
        self.closed.set()

    def close(self) -> None:
        self._socket.close()


def _connection(address: str, source: str = ATTACKER) -> socket.socket:
    if address.startswith("unix:"):
        found = socket.socket(socket.AF_UNIX)
        found.connect(address.removeprefix("unix:"))
        return found
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), _TIMEOUT_S, (source, 0))


class Unfinished:
    """A connection whose calls announce a message and send all but its last byte, in turns.

    `done` is set once the server lets it send no more, or has ended it.
    """

    def __init__(self, address: str, path: bytes, calls: int, source: str) -> None:
        self._socket = _connection(address, source)
        streams = range(1, 2 * calls, 2)
        begun = b"".join(
            call_headers(path, n) + frame(DATA, 0, n, message(_MESSAGE_BYTES, b"")) for n in streams
        )
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0) + begun)
        self._left = dict.fromkeys(streams, _MESSAGE_BYTES - 1)
        self._windows = dict.fromkeys(streams, -5)
        self._initial = self._window = 2**16 - 1
        self._window -= 5 * calls
        self.done, self._received = threading.Event(), b""
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        sent_s, open_ = time.monotonic(), [0]
        with suppress(OSError, ValueError):  # closed
            while self._take(0 if open_ else _LOOK_S):
                open_ = [n for n in self._left if self._windows[n] + self._initial > 0 < self._window][:16]
                if open_:
                    self._socket.sendall(b"".join(map(self._next, open_)))
                    sent_s = time.monotonic()
                elif not self._left or time.monotonic() > sent_s + _STUCK_S:
                    self.done.set()
        self.done.set()

    def _next(self, stream: int) -> bytes:
        window = min(self._window, self._windows[stream] + self._initial, 2**14)
        nbytes = max(0, min(window, self._left[stream]))
        self._window -= nbytes
        self._windows[stream] -= nbytes
        if left := self._left.pop(stream) - nbytes:
            self._left[stream] = left  # the last in turn
        return frame(DATA, 0, stream, bytes(nbytes))

    def _take(self, idle_s: float) -> bool:
        """Takes what has come; False at the end of the connection."""
        while select.select([self._socket], [], [], idle_s)[0]:
            if not (data := self._socket.recv(2**18)):
                return False
            frames, self._received = split_frames(self._received + data)
            for kind, flags, stream, payload in frames:
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self._socket.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
                    for at in range(0, len(payload) if kind == SETTINGS else 0, 6):
                        if payload[at : at + 2] == b"\0\4":
                            self._initial = int.from_bytes(payload[at + 2 : at + 6], "big")
                elif kind == WINDOW_UPDATE and not stream:
                    self._window += int.from_bytes(payload, "big")
                elif kind == WINDOW_UPDATE:
                    self._windows[stream] += int.from_bytes(payload, "big")
                elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                    self._left.pop(stream, None)
            idle_s = 0
        return True

    def close(self) -> None:
        self._socket.close()


class Watch:
    """Looks for a block how much more memory a server has, and what its metrics say, at most."""

    def __init__(self, running: ServerProcess) -> None:
        self._running, self._stop = running, threading.Event()
        self.grown_bytes, self.shown_bytes = 0, 0.0
        self._before_bytes = self._memory_bytes()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_TIMEOUT_S)

    def _memory_bytes(self) -> int:
        """What the front process has of its own: neither files nor shared."""
        return status_bytes("RssAnon", self._running.process.pid)

    def more_bytes(self) -> int:
        return self._memory_bytes() - self._before_bytes

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.grown_bytes = max(self.grown_bytes, self.more_bytes())
            self.shown_bytes = max(self.shown_bytes, held_bytes(self._running))

    def gone_s(self, since_s: float, left_bytes: int = 2**63) -> float | None:
        """Seconds until nothing is left, but of memory; None if that takes longer than `GONE_S` and some."""
        while time.monotonic() - since_s < GONE_S + 10:
            results = self._running.metric("npugrad_output_arena_used_bytes")
            is_back = self.more_bytes() <= left_bytes
            if results < MIB and held_bytes(self._running) < NEIGHBOURS_BYTES and is_back:
                return time.monotonic() - since_s
            time.sleep(_LOOK_S)
        return None


def held_bytes(running: ServerProcess) -> float:
    """What the metrics of the front process say that it holds."""
    return running.metric("npugrad_front_memory_used_bytes")


# ------------------------------------------------------------------------------------------------ the rows


@contextmanager
def unread_replies(
    running: ServerProcess,
    calls: int,
    reply_bytes: int,
    path: bytes = UNARY,
    *,
    window_bytes: int = 0,
    reads: bool = True,
) -> Iterator[None]:
    """Calls on four connections, of whose replies no more is taken than a window, or than a socket holds."""
    request = repeated(reply_bytes).message()
    data = (request if path == UNARY else header_frame(GROUP_NORM, request)).SerializeToString()
    share = [calls // 4 + (index < calls % 4) for index in range(4)]
    with ExitStack() as stack:
        for count in filter(None, share):
            unread = Unread(
                running.address,
                path,
                [message(len(data), data)] * count,
                window_bytes=window_bytes,
                reads=reads,
            )
            stack.callback(unread.close)
        yield


@contextmanager
def unfinished_messages(running: ServerProcess, calls: int, path: bytes) -> Iterator[None]:
    """Calls on four connections, each from an address of its own, that stay when they may send no more."""
    sources = [f"127.0.0.{number}" for number in range(2, 6)]
    attackers = [Unfinished(running.address, path, calls // 4, source) for source in sources]
    try:
        assert all(each.done.wait(_TIMEOUT_S) for each in attackers)
        yield
    finally:
        for each in attackers:
            each.close()


@contextmanager
def gzip_bombs(running: ServerProcess, calls: int, inflated_bytes: int) -> Iterator[None]:
    data = gzip.compress(bytes(inflated_bytes), 9)
    encoding = (b"grpc-encoding", b"gzip")
    unread = Unread(running.address, UNARY, [message(len(data), data, compressed=1)] * calls, encoding)
    try:
        yield
        assert b"Compression algorithm 'gzip' is disabled" in unread.said
    finally:
        unread.close()


@contextmanager
def read_replies(running: ServerProcess, calls: int, reply_bytes: int, path: bytes) -> Iterator[None]:
    request = repeated(reply_bytes).message()

    def act(_: int) -> None:
        with running.channel() as channel, suppress(Exception):  # refused: the server counts
            if path == UNARY:
                call_unary(channel, GROUP_NORM, request, timeout=_TIMEOUT_S)
            else:
                call_execute(channel, [header_frame(GROUP_NORM, request)], timeout=_TIMEOUT_S)

    with ThreadPoolExecutor(calls) as pool:
        list(pool.map(act, range(calls)))
    yield


def measured(
    name: str,
    running: ServerProcess,
    calls: int,
    attack: Callable[[], Any],
    *,
    slack_bytes: int = SLACK_BYTES,
    left_bytes: int = 2**63,
) -> Row:
    """Makes one attack and looks at what it does, until nothing is left of it but some memory."""
    limit, before = int(running.info().limits.front_memory_bytes), refused_of(running)
    with plain([running.address]) as call:
        for _ in range(20):  # the first calls make what stays
            call()
        with Watch(running) as watch, Load(call, callers=1, pace_s=_LOOK_S) as neighbour, attack():
            since_s = time.monotonic()
            # What it does is seen soon, and what an unread reply does until it is given up.
            while watch.shown_bytes < NEIGHBOURS_BYTES and (
                time.monotonic() - since_s < _SEEN_S or (not watch.shown_bytes and "unread" in name)
            ):
                time.sleep(_LOOK_S)
            gone_s, kept = watch.gone_s(since_s, left_bytes), watch.more_bytes()
        refused, grown = refused_of(running) - before, watch.grown_bytes
    return Row(name, limit, calls, refused, grown, watch.shown_bytes, gone_s, kept, neighbour, slack_bytes)


def refused_of(running: ServerProcess) -> int:
    """Calls that were answered with RESOURCE_EXHAUSTED."""
    return int(running.metric("npugrad_calls_total", 'status="RESOURCE_EXHAUSTED"'))


FLAGS = ("--metrics-listen", "127.0.0.1:0")


@dataclass(frozen=True)
class FrontSize:
    """How much of everything; the defaults are those of `make prove-front-memory`.

    `memory` and `big_memory` are `front_memory_bytes`, the latter where big replies are asked for.
    """

    memory: str = "256MiB"
    calls: int = 60
    gzips: int = 20
    inflated_bytes: int = 47 * MIB
    streams: int = 200
    unfinished: int = 1000
    unfinished_memory: str = "512MiB"
    big_memory: str = "1GiB"
    big_bytes: int = 256 * MIB
    more: tuple[str, ...] = ()


SMALL = FrontSize(
    memory="40MiB",
    calls=12,
    gzips=3,
    streams=40,
    unfinished=100,
    unfinished_memory="160MiB",
    big_memory="48MiB",
    big_bytes=16 * MIB,
    more=("--unary-reply-timeout-s", "2", "--reply-idle-timeout-s", "4"),
)


def rows(folder: Path, size: FrontSize) -> Iterator[Row]:
    flags = (*FLAGS, *size.more)
    with run_server(
        folder / "small.log", *flags, "--front-memory-bytes", size.memory, check_end=False
    ) as running:
        for name, calls, attack in (
            ("unread replies", size.calls, partial(unread_replies, running, size.calls, 4 * MIB - 4096)),
            ("gzip 1,000:1", size.gzips, partial(gzip_bombs, running, size.gzips, size.inflated_bytes)),
            (
                "unread streams",
                size.streams,
                partial(unread_replies, running, size.streams, 2 * MIB, EXECUTE, window_bytes=1000),
            ),
        ):
            yield measured(name, running, calls, attack)
    for method in METHODS:
        yield unfinished(folder, size, method)
    arena = ("--input-arena-bytes", "64MiB", "--output-arena-bytes", str(5 * size.big_bytes // 2))
    flags = (*flags, *arena, "--front-memory-bytes", size.big_memory)
    with run_server(folder / "big.log", *flags, check_end=False) as running:
        for name, act in (
            ("unary", partial(read_replies, running, 6, size.big_bytes, UNARY)),
            ("streamed", partial(read_replies, running, 6, size.big_bytes, EXECUTE)),
            ("unread", partial(unread_replies, running, 6, size.big_bytes, EXECUTE, window_bytes=1000)),
        ):
            yield measured(f"6 replies of {size.big_bytes // MIB} MiB, {name}", running, 6, act)


def unfinished(
    folder: Path,
    size: FrontSize,
    method: str,
    *,
    slack_bytes: int = 0,
    left_bytes: int = SLACK_BYTES,
) -> Row:
    """A row with a server of its own, whose memory is what one without callers has."""
    flags = (*FLAGS, *size.more, "--front-memory-bytes", size.unfinished_memory)
    with run_server(folder / f"{method}.log", *flags, check_end=False) as running:
        act = partial(unfinished_messages, running, size.unfinished, METHODS[method])
        name = f"unfinished messages, {method}"
        return measured(name, running, size.unfinished, act, slack_bytes=slack_bytes, left_bytes=left_bytes)


# ------------------------------------------------------------------------------------------- Unix sockets


class UnixRow(NamedTuple):
    """Unread replies over a Unix socket: seconds until gone, lines in the log, and others' answers then."""

    gone_s: float | None
    lines: int
    answered: int

    @property
    def is_kept(self) -> bool:
        return self.gone_s is not None and self.gone_s <= GONE_S and self.lines <= 2 and self.answered == 8


@contextmanager
def unix_server(folder: Path, size: FrontSize) -> Iterator[ServerProcess]:
    flags = (*FLAGS, *size.more, "--front-memory-bytes", size.memory)
    listen = f"unix:{folder / 'socket'}"
    with run_server(folder / "unix.log", *flags, listen=listen, check_end=False) as running:
        yield running


def attacked(running: ServerProcess, size: FrontSize, *, reads: bool) -> AbstractContextManager[None]:
    """Calls with replies of 4 MiB that nobody takes, until they hold memory."""
    window_bytes = 0 if reads else 2**24
    return unread_replies(running, size.calls, 4 * MIB - 4096, window_bytes=window_bytes, reads=reads)


def unix_row(folder: Path, size: FrontSize, *, reads: bool) -> UnixRow:
    """Makes the attack, by callers that read or do not, and waits until nothing is left of it."""
    request = repeated(4 * MIB - 4096).message()
    with unix_server(folder, size) as running, plain([running.address]) as call, running.channel() as channel:
        watch, since_s = Watch(running), time.monotonic()
        with attacked(running, size, reads=reads):
            eventually(lambda: held_bytes(running) >= NEIGHBOURS_BYTES, "replies are held", running)
            # One more of them finds no room, so memory is short.
            with Load(partial(call_unary, channel, GROUP_NORM, request), callers=1, pace_s=1.0):
                gone_s = watch.gone_s(since_s)
            answered = 0
            for _ in range(8):
                with suppress(Exception):
                    answered += call() is True
        return UnixRow(gone_s, len(running.log_lines("reply too slow")), answered)


def exit_codes(folder: Path, size: FrontSize, count: int) -> Iterator[int]:
    for number in range(count):
        with unix_server(folder, size) as running, attacked(running, size, reads=number % 2 > 0):
            eventually(lambda: held_bytes(running) >= NEIGHBOURS_BYTES, "replies are held", running)
            running.signal()
            yield running.wait()


def over_unix(folder: Path, size: FrontSize, exits: int) -> bool:
    kept = True
    for reads, who in ((False, "reads nothing"), (True, "gives no window")):
        row = unix_row(folder, size, reads=reads)
        gone = "never" if row.gone_s is None else f"{row.gone_s:.1f} s"
        line = (
            f"Unix socket, caller {who}: held for {gone}, {row.lines} lines, others then {row.answered} of 8"
        )
        kept &= verdict(line, row.is_kept)
    codes = Counter(exit_codes(folder, replace(size, more=("--drain-timeout-s", "1")), exits))
    return (
        verdict(f"exits of servers with unread replies, by code: {dict(codes)}", set(codes) <= {0, 1})
        and kept
    )


def _table(given: Any, folder: Path) -> bool:
    """Prints a table; memory is in MiB."""
    is_kept = True
    table = Table(
        **{"attack": 34, "limit": 8, "calls": 6, "refused": 8, "grown": 10, "shown": 10, "gone_s": 7},
        **{"left": 9, "neighbour's": 12, "failed": 6},
    )
    size = FrontSize(calls=given.calls, unfinished=given.unfinished, big_bytes=given.mib * MIB)
    for row in rows(folder, size):
        gone = "never" if row.gone_s is None else row.gone_s
        grown, shown, left = (n / MIB for n in (row.grown_bytes, row.shown_bytes, row.left_bytes))
        other = row.neighbour
        counts = row.name, row.limit_bytes // MIB, row.calls, row.refused
        table.row(*counts, grown, shown, gone, left, other.calls, other.failed.total())
        is_kept &= row.is_kept
    promise = f"at most the limit, by unread replies {SLACK_BYTES // MIB} MiB more, gone within {GONE_S:g} s"
    return verdict(promise, is_kept)


def _over_unix(given: Any, folder: Path) -> bool:
    return over_unix(folder, FrontSize(calls=given.calls), given.exits)


PARTS: Mapping[str, Callable[[Any, Path], bool]] = {"tcp": _table, "unix": _over_unix}


if __name__ == "__main__":
    run(
        lambda given, folder: all([PARTS[part](given, folder) for part in given.parts]),
        __doc__,
        parts=([*PARTS], "what to do"),
        calls=(60, "unread replies"),
        unfinished=(1000, "unfinished messages"),
        mib=(256, "size of a big reply"),
        exits=(50, "servers ended"),
    )
