"""What slow streams cost a neighbour: `make prove-slow-streams`, one line for each part.

- slow: 300 uploads that send one byte each 20 s, and a reply of 128 MiB that fills its device's arena and
  that nobody reads, from the neighbour's own address, for longer than the server's idle timeout.
- idle: 1,100 streams, more than there are places, of which nothing comes but the headers: of Execute, of
  Health.Watch, which are answered, of Health.Check and of GetServerInfo, from another address.
- clients: 2,000 clients of a name at once, each with its connection and its Health.Watch.

The neighbour calls alone first, then beside them; streams that are ended are opened again. The device is
simulated.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.benchmarks.resident import status_bytes
from tests.calls import TIMEOUT_S, chunk, repeated, sample
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
    call_headers,
    frame,
    message,
    split_frames,
)
from tests.proofs.callers import Call, Load, plain, sdk
from tests.proofs.proof import run, told, verdict

from npugrad.v1 import backward_pb2_grpc

DEVICES = "test:1?ms=20&compute=1"
STREAMS, BYTE_EACH_S, REPLY_BYTES = 300, 20.0, 128 * 2**20
ALONE_S, BESIDE_S = 30.0, 70.0
MOST_RATIO = 2.0
"""How much longer the neighbour's 99th percentile may be than alone."""
IDLE_STREAMS, IDLE_S, CLIENTS = 1100, 8.0, 2000
_EXECUTE = b"/npugrad.v1.BackwardService/Execute"
IDLE: Mapping[str, tuple[bytes, bool]] = {
    "Execute": (_EXECUTE, False),
    "Watch": (b"/grpc.health.v1.Health/Watch", True),
    "Check": (b"/grpc.health.v1.Health/Check", False),
    "GetServerInfo": (b"/npugrad.v1.ServerService/GetServerInfo", False),
}
"""Path of each method that is held open, and whether its message is sent: an empty one."""
_ELSEWHERE = "127.0.0.2"
"""Where idle streams come from, so that they are another tenant than the neighbour."""
_ARENA_BYTES = REPLY_BYTES + 2 * 64
"""What the unread reply takes, with its two results of 4 bytes."""
_MOST_OF_CONNECTION, _LOOK_S = 250, 0.1
_NEIGHBOUR_PACE_S, _REOPEN_PAUSE_S = 0.05, 0.05


# ---------------------------------------------------------------------------------------- who is slow


class SlowUploads:
    """Uploads over some connections, which send a byte now and then; ended ones are opened again."""

    def __init__(self, address: str, streams: int, byte_each_s: float, source: str = "") -> None:
        host, _, port = address.rpartition(":")
        connections = 1 + streams // _MOST_OF_CONNECTION
        self._sockets = [
            socket.create_connection((host, int(port)), TIMEOUT_S, (source, 0)) for _ in range(connections)
        ]
        self._received = {each: b"" for each in self._sockets}
        self._sent: dict[socket.socket, dict[int, int]] = {each: {} for each in self._sockets}
        self._next = dict.fromkeys(self._sockets, 1)
        self._byte_each_s, self.ended = byte_each_s, 0
        self._header = sample(n=1, c=8, hxw=2**14, group=2).header()[0].SerializeToString()
        for each in self._sockets:
            each.sendall(PREFACE + frame(SETTINGS, 0, 0))
            self._open(each, -(-streams // connections))
        self._missing = Counter[socket.socket]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> SlowUploads:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(TIMEOUT_S)
        for each in self._sockets:
            each.close()

    def _open(self, connection: socket.socket, count: int) -> None:
        """Begins uploads, each with the header of a call and a first byte."""
        for _ in range(count):
            stream = self._next[connection]
            self._next[connection] += 2
            connection.sendall(self._begun(stream))
            self._sent[connection][stream] = 1

    def _begun(self, stream: int) -> bytes:
        header = frame(DATA, 0, stream, message(len(self._header), self._header))
        return call_headers(_EXECUTE, stream) + header + _byte(stream, 0)

    def _work(self) -> None:
        next_s = time.monotonic() + self._byte_each_s
        while not self._is_over.is_set():
            for each in select.select(self._sockets, [], [], _LOOK_S)[0]:
                self._take(each)
            for each in +self._missing:  # one at a time, as this is no flood
                self._open(each, 1)
                self._missing[each] -= 1
            self._is_over.wait(_REOPEN_PAUSE_S)
            if time.monotonic() >= next_s:
                next_s += self._byte_each_s
                for each, sent in self._sent.items():
                    each.sendall(b"".join(_byte(stream, at) for stream, at in sent.items()))
                    self._sent[each] = {stream: at + 1 for stream, at in sent.items()}

    def _take(self, connection: socket.socket) -> None:
        """Reads what has come, answers what HTTP/2 wants answered, and opens ended uploads again."""
        frames, self._received[connection] = split_frames(self._received[connection] + connection.recv(2**16))
        ended = 0
        for kind, flags, stream, payload in frames:
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                ended += self._sent[connection].pop(stream, 0) > 0
        self.ended += ended
        self._missing[connection] += ended


class IdleStreams(SlowUploads):
    """Streams of which nothing comes but the headers, or an empty message as well; from another address."""

    def __init__(self, address: str, streams: int, path: bytes, *, has_message: bool) -> None:
        self._path, self._has_message = path, has_message
        super().__init__(address, streams, math.inf, _ELSEWHERE)

    def _begun(self, stream: int) -> bytes:
        sent = frame(DATA, END_STREAM, stream, message(0, b"")) if self._has_message else b""
        return call_headers(self._path, stream) + sent


def _byte(stream: int, offset: int) -> bytes:
    data = chunk(0, offset, b"\0").SerializeToString()
    return frame(DATA, 0, stream, message(len(data), data))


def repeated_request(reply_bytes: int) -> Any:
    """The header of a call with results of so many bytes, and with operands of one element, repeated."""
    return repeated(reply_bytes).header(chunk_from_bytes=reply_bytes)[0]


@contextmanager
def unread_reply(server: ServerProcess, nbytes: int) -> Iterator[None]:
    """A reply of so many bytes, of which nobody reads more than the first frame."""
    with server.channel() as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        replies = stub.Execute(iter([repeated_request(nbytes)]), timeout=10 * TIMEOUT_S)
        next(replies)
        yield
        replies.cancel()


# -------------------------------------------------------------------------------------- what it costs


def made(call: Call, seconds: float, least: int) -> Load:
    """A neighbour's calls, one after the other, for so long, and so many at least."""
    with Load(call, callers=1) as load:
        end_s = time.monotonic() + seconds
        load.wait(lambda: time.monotonic() >= end_s and load.calls >= least, seconds + TIMEOUT_S * least)
    return load


def p99_s(load: Load) -> float:
    seconds = sorted(each.end_s - each.begin_s for each in load.ended if not each.told)
    return seconds[len(seconds) * 99 // 100] if seconds else math.inf


def figures(load: Load) -> str:
    return (
        f"{load.calls} calls, {load.failed.total()} refused, p99 {p99_s(load) * 1e3:.1f} ms, longest "
        f"{load.longest_s * 1e3:.0f} ms"
    )


@dataclass(frozen=True)
class SlowStreams:
    alone: Load
    beside: Load
    ended: int
    held: tuple[int, int]

    @property
    def ratio(self) -> float:
        return p99_s(self.beside) / p99_s(self.alone)

    @property
    def is_kept(self) -> bool:
        return not self.beside.failed and self.ratio <= MOST_RATIO

    def __str__(self) -> str:
        return (
            f"neighbour {figures(self.beside)}; alone {figures(self.alone)}; ratio {self.ratio:.2f}; "
            f"{self.ended} uploads ended; "
            f"held {self.held[0]} queue places, {self.held[1]} bytes of operands"
        )


def prove(server: ServerProcess, byte_each_s: float, seconds: tuple[float, float], least: int) -> SlowStreams:
    """Has a neighbour call alone and then beside slow streams, so many times and seconds each at least."""
    with plain([server.address]) as call:
        call()
        alone = made(call, seconds[0], least)
        with SlowUploads(server.address, STREAMS, byte_each_s) as uploads:
            eventually(lambda: streams_in_progress(server) >= STREAMS, "all uploads have begun", server)
            with unread_reply(server, REPLY_BYTES):
                info = server.info()
                assert info.output_arena_used_bytes >= REPLY_BYTES
                beside = made(call, seconds[1], least)
    eventually(lambda: not server.info().output_arena_used_bytes, "the reply is gone", server)
    return SlowStreams(alone, beside, uploads.ended, (info.queue_depth, info.input_arena_used_bytes))


def streams_in_progress(server: ServerProcess) -> int:
    return int(server.metric("npugrad_active_calls", 'method="Execute"'))


@contextmanager
def slow_server(folder: Path) -> Iterator[ServerProcess]:
    # Each upload may be in the middle of a frame of 4 MiB: room for all of them, and to spare.
    room = ("--front-memory-bytes", "3GiB")
    flags = ("--output-arena-bytes", str(_ARENA_BYTES), "--metrics-listen", "127.0.0.1:0", *room)
    with run_server(folder / "server.log", *flags, devices=DEVICES) as running:
        yield running


# ------------------------------------------------------------------------------ who holds streams open


@contextmanager
def neighbours(server: ServerProcess) -> Iterator[dict[str, Call]]:
    """Calls of several kinds, each tried once but for the SDK's."""
    request, target = health_pb2.HealthCheckRequest(), f"dns:///{server.address}"

    def new_client() -> object:
        with sdk([target], retry=None) as call:
            return call()

    with ExitStack() as stack:
        enter = stack.enter_context
        check = health_pb2_grpc.HealthStub(enter(server.channel())).Check  # type: ignore[attr-defined]
        yield {
            "plain": enter(plain([server.address])),
            "SDK": enter(sdk([server.address])),
            "new dns:/// client": new_client,
            "Check": lambda: check(request, timeout=TIMEOUT_S),
            "GetServerInfo": server.info,
        }


def all_made(calls: Mapping[str, Call], seconds: float, least: int) -> dict[str, Load]:
    """Calls of each kind beside those of the others, for so long, and so many at least."""
    loads = {name: Load(call, callers=1, pace_s=_NEIGHBOUR_PACE_S) for name, call in calls.items()}
    with ExitStack() as stack:
        for load in loads.values():
            stack.enter_context(load)
        end_s = time.monotonic() + seconds
        for load in loads.values():
            load.wait(lambda: time.monotonic() >= end_s and load.calls >= least, seconds + TIMEOUT_S * least)  # noqa: B023
    return loads


@dataclass(frozen=True)
class IdleRow:
    """Calls of each kind, alone and beside idle streams of a method, and how many of those were ended."""

    method: str
    alone: Mapping[str, Load]
    beside: Mapping[str, Load]
    ended: int

    @property
    def failed(self) -> Counter[str]:
        return sum((load.failed for load in self.beside.values()), Counter())

    @property
    def is_kept(self) -> bool:
        ratios = (p99_s(load) / p99_s(self.alone[name]) for name, load in self.beside.items())
        return not self.failed and max(ratios) <= MOST_RATIO

    def __str__(self) -> str:
        parts = (
            f"{name} {load.calls - load.failed.total()} of {load.calls}, p99 {p99_s(load) * 1e3:.0f} ms "
            f"({p99_s(self.alone[name]) * 1e3:.0f} alone)"
            for name, load in self.beside.items()
        )
        failed = f"failed: {told(self.failed)}; {self.ended} streams ended"
        return f"idle streams of {self.method}: {', '.join(parts)}; {failed}"


def idle_rows(server: ServerProcess, streams: int, seconds: float, least: int) -> Iterator[IdleRow]:
    """Has neighbours call alone, and then beside idle streams of each method."""
    with neighbours(server) as calls:
        for call in calls.values():
            call()
        for method, (path, has_message) in IDLE.items():
            alone = all_made(calls, seconds, least)
            with IdleStreams(server.address, streams, path, has_message=has_message) as idle:
                eventually(lambda: idle.ended, "some find no place", server)
                all_made(calls, 0.0, 1)  # what opening them costs is not about places
                beside = all_made(calls, seconds, least)
            yield IdleRow(method, alone, beside, idle.ended)


def client_bytes(server: ServerProcess, clients: int) -> float:
    """Bytes by which the front process grows for each of so many clients of a name, all of them served."""
    with ExitStack() as stack:
        before = 0
        for _ in range(clients + 1):
            stack.enter_context(sdk([f"dns:///{server.address}"], retry=None))()
            before = before or status_bytes("RssAnon", server.process.pid)
        return (status_bytes("RssAnon", server.process.pid) - before) / clients


def main(given: Any, folder: Path) -> bool:
    return all([PARTS[part](given, folder) for part in given.parts])


def _slow(given: Any, folder: Path) -> bool:
    with slow_server(folder) as server:
        found = prove(server, BYTE_EACH_S, (given.alone, given.beside), 1)
    streams = f"{STREAMS} uploads of 1 byte each {BYTE_EACH_S:g} s, unread reply of {REPLY_BYTES >> 20} MiB"
    return verdict(f"{streams} (SIMULATED device): {found}", found.is_kept)


def _idle(given: Any, folder: Path) -> bool:
    # A stream may be in the middle of a frame of 4 MiB; the second time, memory is no limit to streams.
    kept = True
    for memory in ("", "16GiB"):
        flags = ("--front-memory-bytes", memory) if memory else ()
        with run_server(folder / "server.log", *flags, devices=DEVICES) as server:
            for row in idle_rows(server, given.streams, given.idle, 1):
                kept &= verdict(f"{given.streams} {row}, front memory {memory or 'as it comes'}", row.is_kept)
    return kept


def _clients(given: Any, folder: Path) -> bool:
    with run_server(folder / "server.log", devices=DEVICES) as server:
        each = client_bytes(server, given.clients)
    line = f"{given.clients} clients of a name at once, each served: {each / 1024:.1f} KiB each"
    return verdict(line, is_kept=True)


PARTS: Mapping[str, Callable[[Any, Path], bool]] = {"slow": _slow, "idle": _idle, "clients": _clients}

if __name__ == "__main__":
    run(
        main,
        __doc__,
        parts=([*PARTS], "what to do"),
        alone=(ALONE_S, "seconds alone"),
        beside=(BESIDE_S, "seconds beside slow streams"),
        streams=(IDLE_STREAMS, "idle streams"),
        idle=(IDLE_S, "seconds beside idle streams"),
        clients=(CLIENTS, "clients of a name"),
    )
