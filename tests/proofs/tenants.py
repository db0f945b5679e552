"""Shows that no caller takes another one's share: `make prove-tenants`, one line for each part.

Two callers with certificates of equal weight call over TLS.

- devices: one keeps a few calls waiting. The other one asks for more than its share in some way: a fresh
  label for each call, the highest priority, twenty times as many calls at once, or all of it.
- uploads: one uploads a call as large as all memory for operands, at 26 KB/s and again when it is ended, next
  to the other's calls of 8 MiB; then calls of 256 MiB at 100 MB/s, ten of which have to be answered; then as
  much as all memory within 4 s, one after the other, beside calls that are retried as by default.
- verify: 40 callers of one tenant have their calls of 8 MiB compared with the reference; the other one calls
  with a deadline of 5 s, first without and then with `verify`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tests.calls import Sample, chunk, sample
from tests.e2e.harness import eventually
from tests.fix_server import ServerProcess
from tests.operators import GROUP_NORM
from tests.proofs.callers import CALLERS, TIMEOUT_S, Call, Load, arguments, server_of_tenants
from tests.proofs.proof import MIB, run, told, verdict

from npugrad.v1 import backward_pb2_grpc
from npugrad_client import Client, Tls

DEVICES, HOG_FACTOR = "test:1?ms=40", 20
WAYS: Mapping[str, tuple[bool, int, int]] = {
    "fresh labels": (True, 0, 2),
    "priority 100": (False, 100, 2),
    "20x calls": (False, 0, HOG_FACTOR),
    "all of it": (True, 100, HOG_FACTOR),
}
"""Whether each call has a label of its own, their priority, and how many there are for one of the other."""
SHARE, LEAST_PART, LEAST_BESIDE = 0.5, 0.9, 0.95
"""The other caller's share by weight, and what of it there must be: the rest is chance at the ends. And how
much of what it does alone it must do beside another one's uploads."""
LEAST_CALLS, VERIFY_TIMEOUT_S = 3, 5.0
_REFUSED_PAUSE_S = 0.4
"""Between a refusal and the next call of a thread: this is about shares, not about a flood."""
_PIECE_S, _CALL_EACH_S = 0.05, 0.15
"""From one chunk of an upload to the next, and from one call beside it to the next."""


def callers(stack: ExitStack, address: str, tls: Tls, *, way: str = "") -> Load:
    """Callers as one tenant; those that ask for more than their share do it in some way."""
    has_labels, priority, factor = WAYS.get(way, (False, 0, 1))
    client = stack.enter_context(Client(address, tls=tls, timeout_s=TIMEOUT_S, retry=None))
    numbers, given = itertools.count(), arguments()

    def call() -> object:
        label = str(next(numbers)) if has_labels else ""
        return client.group_norm_backward(**given, label=label, priority=priority)

    count = factor * CALLERS
    found = Load(call, callers=count, pace_s=0, refused_pause_s=_REFUSED_PAUSE_S)
    stack.enter_context(found).wait_for(2 * count, TIMEOUT_S)
    return found


@dataclass(frozen=True)
class Sharing:
    """What both callers were told, by reason."""

    way: str
    hog: Counter[str]
    other: Counter[str]

    @property
    def share(self) -> float:
        return self.other["OK"] / max(self.other["OK"] + self.hog["OK"], 1)

    @property
    def refused_count(self) -> int:
        return self.other.total() - self.other["OK"]

    @property
    def is_fair(self) -> bool:
        return self.share >= LEAST_PART * SHARE and not self.refused_count

    def __str__(self) -> str:
        refused = self.hog.total() - self.hog["OK"]
        return (
            f"{self.way}: other caller {self.other['OK']} of {self.other['OK'] + self.hog['OK']} answers "
            f"({self.share / SHARE:.2f} of its share), {self.refused_count} refused; hog {refused} of "
            f"{self.hog.total()} refused"
        )


def prove(address: str, hog_tls: Tls, other_tls: Tls, way: str, seconds: float) -> Sharing:
    """Has both call for so many seconds, once each has calls waiting."""
    with ExitStack() as stack:
        both = callers(stack, address, hog_tls, way=way), callers(stack, address, other_tls)
        begin_s = time.monotonic()
        threading.Event().wait(seconds)
        end_s = time.monotonic()
    hog, other = (Counter(each.told or "OK" for each in load.between(begin_s, end_s)) for load in both)
    return Sharing(way, hog, other)


def proofs(folder: Path, ways: Sequence[str], seconds: float) -> Iterator[Sharing]:
    flags, weights = ("--log-level", "error", "--max-queue-depth", "32"), {"hog": 1, "neighbour": 1}
    with server_of_tenants(folder, weights, *flags, devices=DEVICES) as (server, (hog, other)):
        for way in ways:
            yield prove(server.address, hog, other, way, seconds)


# --------------------------------------------------------------------------------------------------- uploads


@dataclass(frozen=True)
class UploadSize:
    """Bytes of the memory for operands, of a quick upload and of a call of the neighbour; the slow rate."""

    arena_bytes: int = 272 * MIB
    quick_bytes: int = 256 * MIB
    call_bytes: int = 8 * MIB
    bytes_per_s: int = 26_000
    quick_bytes_per_s: int = 100_000_000


def made(nbytes: int) -> Sample:
    """A call with operands of so many bytes, and a little more."""
    return sample(n=1, c=4, hxw=nbytes // 2 // 4 // 4, group=2)


class Uploads:
    """Uploads a call of so many bytes over and over, at some rate."""

    def __init__(self, server: ServerProcess, tls: Tls, nbytes: int, bytes_per_s: int) -> None:
        authorities, certificate, key = tls.read()
        self._channel = grpc.secure_channel(
            server.address, grpc.ssl_channel_credentials(authorities, key, certificate)
        )
        self._execute = backward_pb2_grpc.BackwardServiceStub(self._channel).Execute
        call = GROUP_NORM.build(n=1, c=4, hxw=nbytes // 2 // 4 // 4, group=2)
        contents = {name: memoryview(bytes(meta.content_bytes)) for name, meta in call.inputs.items() if meta}
        self._header, self._follow = Sample(GROUP_NORM, call, contents, {}).header()
        self._bytes_per_s, self._over = bytes_per_s, threading.Event()

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._over.set()
        self._channel.close()

    def once(self) -> None:
        for _ in self._execute(self._frames(), timeout=10 * TIMEOUT_S):
            pass

    def _frames(self) -> Iterator[Any]:
        yield self._header
        begin_s, sent_bytes = time.monotonic(), 0
        piece_bytes = min(int(self._bytes_per_s * _PIECE_S), MIB)
        for operand, content in self._follow:
            for offset in range(0, len(content), piece_bytes):
                data = content[offset : offset + piece_bytes]
                yield chunk(operand, offset, bytes(data))
                sent_bytes += len(data)
                if self._over.wait(max(0.0, begin_s + sent_bytes / self._bytes_per_s - time.monotonic())):
                    return


@dataclass(frozen=True)
class BesideUploads:
    """The neighbour's calls alone and beside a slow upload, and what became of slow and quick uploads."""

    alone: Load
    beside: Load
    slow: Load
    quick: Load
    quick_count: int
    in_turns: Load | None = None

    @property
    def part(self) -> float:
        """Calls answered beside the slow upload for one alone."""
        return good(self.beside) / good(self.alone)

    @property
    def is_kept(self) -> bool:
        is_served = self.in_turns is None or not self.in_turns.failed
        return self.part >= LEAST_BESIDE and good(self.quick) >= self.quick_count and is_served

    def __str__(self) -> str:
        return (
            f"neighbour {good(self.beside)} of {self.beside.calls} ({told(self.beside.failed, 1)}), "
            f"{self.part:.2f} of alone, longest {self.beside.longest_s:.2f} s; slow uploads ended: "
            f"{told(self.slow.failed, 2)}; quick uploads {good(self.quick)} of {self.quick_count}, ended: "
            f"{told(self.quick.failed, 2)}"
            + (
                f"; in turns, neighbour {good(self.in_turns)} of {self.in_turns.calls}"
                if self.in_turns
                else ""
            )
        )


def good(load: Load) -> int:
    return load.calls - load.failed.total()


def beside_uploads(folder: Path, size: UploadSize, seconds: float, quick_count: int) -> BesideUploads:
    """Has a neighbour call alone, beside a slow upload and beside quick ones."""
    arenas = ("--input-arena-bytes", "--output-arena-bytes")
    flags = ("--log-level", "error", *(word for name in arenas for word in (name, str(size.arena_bytes))))
    weights = {"hog": 1, "neighbour": 1}
    with ExitStack() as stack:
        server, (hog, other) = stack.enter_context(
            server_of_tenants(folder, weights, *flags, devices=DEVICES)
        )
        client = stack.enter_context(Client(server.address, tls=other, timeout_s=TIMEOUT_S, retry=None))
        call = partial(client.group_norm_backward, **arguments(made(size.call_bytes)))
        slow = stack.enter_context(Uploads(server, hog, size.arena_bytes - 2**16, size.bytes_per_s))
        quick = stack.enter_context(Uploads(server, hog, size.quick_bytes, size.quick_bytes_per_s))
        call()
        alone = during(call, seconds)
        with Load(slow.once, callers=1, refused_pause_s=_REFUSED_PAUSE_S) as slow_load:
            eventually(lambda: server.info().input_arena_used_bytes, "the upload has its memory", server)
            beside = during(call, seconds)
            slow.stop()
        with Load(call, callers=2, pace_s=_CALL_EACH_S), Load(quick.once, callers=1) as quick_load:
            quick_load.wait(lambda: good(quick_load) >= quick_count, 20 * TIMEOUT_S)
        in_turns = None
        if seconds:
            client = stack.enter_context(Client(server.address, tls=other, timeout_s=TIMEOUT_S))
            call = partial(client.group_norm_backward, **arguments(made(size.call_bytes)))
            nbytes = size.arena_bytes - 2**16
            whole = stack.enter_context(Uploads(server, hog, nbytes, nbytes // 4))
            with Load(whole.once, callers=1, refused_pause_s=_REFUSED_PAUSE_S):
                eventually(lambda: server.info().input_arena_used_bytes, "the upload has its memory", server)
                in_turns = during(call, seconds)
                whole.stop()
    return BesideUploads(alone, beside, slow_load, quick_load, quick_count, in_turns)


def during(call: Call, seconds: float, callers: int = 1) -> Load:
    """Calls for so many seconds, and until some are answered.

    There are pauses between them: this is about who is served, not about processors.
    """
    with Load(call, callers=callers, pace_s=_CALL_EACH_S) as load:
        end_s = time.monotonic() + seconds
        load.wait(lambda: time.monotonic() >= end_s and good(load) >= LEAST_CALLS, seconds + TIMEOUT_S)
    return load


# ---------------------------------------------------------------------------------------------- verification


@dataclass(frozen=True)
class BesideVerified:
    """The neighbour's calls next to many that are compared with the reference: plain ones, and compared ones.

    `hog` has how many of the others were answered next to the latter.
    """

    plain: Load
    verified: Load
    hog: int

    @property
    def share(self) -> float:
        """The neighbour's part of all comparisons."""
        return good(self.verified) / max(good(self.verified) + self.hog, 1)

    @property
    def is_kept(self) -> bool:
        is_answered = not (self.plain.failed or self.verified.failed)
        return is_answered and self.share >= LEAST_PART * SHARE

    def __str__(self) -> str:
        return (
            f"neighbour without verify {good(self.plain)} of {self.plain.calls} "
            f"({told(self.plain.failed, 1)} failed), longest {self.plain.longest_s:.2f} s; with verify "
            f"{good(self.verified)} of {self.verified.calls} ({told(self.verified.failed, 1)} failed), "
            f"longest {self.verified.longest_s:.2f} s, {self.share / SHARE:.2f} of its share"
        )


def beside_verified(folder: Path, nbytes: int, hogs: int, seconds: float) -> BesideVerified:
    """Has a neighbour call next to so many callers of another tenant whose calls are all compared."""
    weights, given = {"hog": 1, "neighbour": 1}, arguments(made(nbytes))
    with ExitStack() as stack:
        server, (hog, other) = stack.enter_context(
            server_of_tenants(folder, weights, "--log-level", "error", devices="cpu:0")
        )

        def call(tls: Tls, timeout_s: float, *, verify: bool) -> Call:
            client = Client(server.address, tls=tls, timeout_s=timeout_s, retry=None)
            return partial(stack.enter_context(client).group_norm_backward, **given, verify=verify)

        others = Load(call(hog, TIMEOUT_S, verify=True), callers=hogs, refused_pause_s=_REFUSED_PAUSE_S)
        stack.enter_context(others).wait(lambda: good(others) >= LEAST_CALLS)
        plain = during(call(other, VERIFY_TIMEOUT_S, verify=False), seconds)
        begin_s = time.monotonic()
        verified = during(call(other, VERIFY_TIMEOUT_S, verify=True), seconds, callers=CALLERS)
        end_s = max(each.end_s for each in verified.ended)
        found = sum(not each.told for each in others.between(begin_s, end_s))
    return BesideVerified(plain, verified, found)


def main(given: Any, folder: Path) -> bool:
    return all([PARTS[part](given, folder) for part in given.parts])


def _devices(given: Any, folder: Path) -> bool:
    found = list(proofs(folder, given.ways, given.seconds))
    line = f"two tenants of equal weight over TLS, {given.seconds:g} s each (SIMULATED device): "
    return verdict(line + "; ".join(map(str, found)), all(sharing.is_fair for sharing in found))


def _uploads(given: Any, folder: Path) -> bool:
    size = UploadSize()
    found = beside_uploads(folder, size, given.seconds, 10)
    what = f"upload of {size.arena_bytes // MIB} MiB, all memory for operands, at {size.bytes_per_s} bytes/s"
    return verdict(f"{what}, {given.seconds:g} s (SIMULATED device): {found}", found.is_kept)


def _verify(given: Any, folder: Path) -> bool:
    found = beside_verified(folder, 8 * MIB, 40, given.seconds)
    return verdict(f"40 callers of 8 MiB with verify, {given.seconds:g} s: {found}", found.is_kept)


PARTS: Mapping[str, Callable[[Any, Path], bool]] = {
    "devices": _devices,
    "uploads": _uploads,
    "verify": _verify,
}

if __name__ == "__main__":
    run(
        main,
        __doc__,
        parts=([*PARTS], "what to do"),
        seconds=(30.0, "of each way"),
        ways=([*WAYS], "how the other one asks for more"),
    )
