"""`make prove-soak`: a server under load and mixed faults for twenty minutes, which leave nothing behind.

Good calls are compared with what is right, while workers are killed, calls crash or hang their workers,
callers vanish, cancel or run out of time, connections break off, and messages are damaged. Memory of the
front process in the last quarter is held against the second one; descriptors and threads are counted between,
when nobody calls. The devices are simulated, and compute as the CPU does.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tests.benchmarks.resident import status_bytes
from tests.calls import sample
from tests.e2e.harness import STREAMED, UNARY, Wire, eventually, idle, workers_of
from tests.e2e.load import Work, mixed_work
from tests.fix_server import ServerProcess, run_server
from tests.http2 import start_call
from tests.proofs.callers import TIMEOUT_S, arguments
from tests.proofs.mutations import Mutator, corpus
from tests.proofs.proof import MIB, run, told, verdict
from tests.raw_calls import RawCaller

from npugrad.v1 import server_pb2
from npugrad_client import Client, NpugradError

MOST_GROWTH_MIB, MOST_THREADS_MORE = 8.0, 2
QUARTERS = 4
_DEVICES = "test:2?ms=2&compute=1&crash=crash&hang=hang"
_FLAGS = ("--respawn-backoff-s", "0.05", "--hang-grace-s", "0.5", "--log-level", "error")
_CALLERS, _PAUSE_S, _HUNG_S = 2, 0.05, 0.25
_DAMAGED = 50


@dataclass
class Soaked:
    """What came of it.

    `told` are errors of good calls: some had two workers killed, which opens a circuit. `resident_mib` is the
    median of each quarter; `quiet` are descriptors and threads after it, when nobody called.
    """

    right: int = 0
    wrong: int = 0
    told: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    resident_mib: list[float] = field(default_factory=list)
    quiet: list[tuple[int, int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def grown_mib(self) -> float:
        """What the last quarter had more than the second one."""
        return self.resident_mib[-1] - self.resident_mib[1]

    @property
    def is_kept(self) -> bool:
        """Whether results were right and nothing was left behind, memory aside."""
        (handles, threads), (last_handles, last_threads) = self.quiet[1], self.quiet[-1]
        left = last_handles > handles or last_threads > threads + MOST_THREADS_MORE
        return self.right > 0 and not (self.wrong or self.failed or left)

    def __str__(self) -> str:
        memory = ", ".join(f"{mib:.1f}" for mib in self.resident_mib)
        return (
            f"soak: {self.right} right, {self.wrong} wrong, told {told(self.told)}; "
            f"faults: {told(self.faults)}; "
            f"MiB by quarter {memory}; descriptors and threads {', '.join(f'{h}/{t}' for h, t in self.quiet)}"
        )


class Faults:
    """What goes wrong, one thing after another."""

    def __init__(self, running: ServerProcess, seed: int) -> None:
        """Makes nothing yet."""
        self._running, self._rng = running, random.Random(seed)
        self._mutator = Mutator(corpus(200, seed), seed)
        # Of a signature that no good call has: the circuits that it opens are its own.
        self._sample = sample(n=5)
        self._arguments = arguments(self._sample)
        self.kinds: Sequence[Callable[[], None]] = (
            *(self.kill, self.crash, self.hang, self.vanish, self.cancel),
            *(self.run_out_of_time, self.break_off, self.damage),
        )

    def kill(self) -> None:
        """SIGKILL for a worker."""
        if pids := workers_of(self._running.process.pid):
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(pids), signal.SIGKILL)

    def crash(self) -> None:
        """A call that ends its worker."""
        self._call("crash", TIMEOUT_S)

    def hang(self) -> None:
        """A call that its worker never answers."""
        self._call("hang", _HUNG_S)

    def _call(self, label: str, timeout_s: float) -> None:
        with Client(self._running.address, timeout_s=timeout_s, retry=None) as client, suppress(NpugradError):
            client.group_norm_backward(**self._arguments, label=label)

    def vanish(self) -> None:
        """A connection that goes in the middle of an upload."""
        with self._running.channel() as channel, suppress(grpc.RpcError):
            frames = list(self._sample.frames())
            gate = threading.Event()

            def some() -> Iterator[Any]:
                yield from frames[:2]
                gate.wait(TIMEOUT_S)

            answer = Wire.of(channel).backward.Execute(some(), timeout=TIMEOUT_S)
            time.sleep(self._rng.random() * _PAUSE_S)
            answer.cancel()
            gate.set()

    def cancel(self) -> None:
        """Calls that are cancelled at any moment."""
        with self._running.channel() as channel:
            message, stub = self._sample.message(), Wire.of(channel).backward
            calls = [stub.GroupNormBackward.future(message, timeout=TIMEOUT_S) for _ in range(20)]
            time.sleep(self._rng.random() * _PAUSE_S)
            for call in calls:
                call.cancel()

    def run_out_of_time(self) -> None:
        """Calls whose deadlines pass at any moment."""
        for _ in range(5):
            self._call("", self._rng.random() * _PAUSE_S + 0.001)

    def break_off(self) -> None:
        """Connections that say half of something and end."""
        host, _, port = self._running.address.rpartition(":")
        data = start_call(b"/npugrad.v1.BackwardService/Execute")
        for _ in range(10):
            with suppress(OSError), socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
                connection.sendall(data[: self._rng.randrange(len(data))])

    def damage(self) -> None:
        """Damaged messages; what becomes of them is for `mutations` to judge."""
        with RawCaller(self._running.address) as caller:
            for _ in caller.statuses(self._mutator.call()[-1] for _ in range(_DAMAGED)):
                pass


class _Quarter:
    """Load and faults for a while, and the memory of the front process meanwhile."""

    def __init__(self, running: ServerProcess, work: list[Work], faults: Faults, found: Soaked) -> None:
        self._running, self._work, self._faults, self._found = running, work, faults, found
        self._lock, self._over = threading.Lock(), threading.Event()

    @contextmanager
    def _threads(self) -> Iterator[None]:
        work = [lambda n=n: self._send(n) for n in range(_CALLERS)]
        threads = [threading.Thread(target=self._guarded, args=(act,)) for act in (*work, self._harm)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(2 * TIMEOUT_S)
            if any(thread.is_alive() for thread in threads):
                self._found.failed.append("a call had no answer")

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._found.failed.append(f"{type(error).__name__}: {error}"[:2000])

    def _send(self, number: int) -> None:
        way = STREAMED if number % 2 else UNARY
        with Client(self._running.address, timeout_s=TIMEOUT_S, stream_from_bytes=way) as client:
            while not self._over.is_set():
                work = self._next(number)
                try:
                    right = work.is_right(work.send(client))
                except NpugradError as error:
                    with self._lock:
                        self._found.told[error.reason] += 1
                    continue
                with self._lock:
                    self._found.right += right
                    self._found.wrong += not right

    def _next(self, number: int) -> Work:
        """The next good call of a caller; large ones go streamed only."""
        works = [work for work in self._work if number % 2 or not work.streamed]
        return works[(self._found.right + number) % len(works)]

    def _harm(self) -> None:
        kinds = self._faults.kinds
        number = 0
        while not self._over.wait(_PAUSE_S):
            act = kinds[number % len(kinds)]
            act()
            self._found.faults[act.__name__.replace("_", " ")] += 1
            number += 1

    def run(self, seconds: float) -> None:
        """Lasts so long, then waits until the server has nothing to do."""
        pid, resident, end_s = self._running.process.pid, [], time.monotonic() + seconds
        with self._threads():
            while time.monotonic() < end_s and not self._found.failed:
                resident.append(status_bytes("VmRSS", pid) / MIB)
                time.sleep(0.2)
        self._found.resident_mib.append(statistics.median(resident))
        _start_verifier(self._running)
        self._found.quiet.append(_quiet(self._running))


def _start_verifier(running: ServerProcess) -> None:
    """A verified call: damaged messages start a verifier by chance, so that one is counted every time."""
    with Client(running.address, timeout_s=TIMEOUT_S) as client:
        client.group_norm_backward(**arguments(), verify=True)


def _quiet(running: ServerProcess) -> tuple[int, int]:
    """Descriptors and threads of the front process once it has nothing to do, the fewest of a few seconds."""
    ready = server_pb2.DeviceState.DEVICE_STATE_READY

    def at_rest() -> bool:
        info = running.info()
        return bool(idle(info)) and all(device.state == ready for device in info.devices)

    eventually(at_rest, "all devices are ready, and nothing is held", running, TIMEOUT_S)
    folder = Path(f"/proc/{running.process.pid}")
    found: list[tuple[int, ...]] = []
    for _ in range(20):
        found.append(tuple(len(list((folder / name).iterdir())) for name in ("fd", "task")))
        time.sleep(0.1)
    handles, threads = zip(*found, strict=True)
    return min(handles), min(threads)


def soak(seconds: float, folder: Path, work: list[Work], seed: int = 0) -> Soaked:
    """Load and faults on a server of its own for so long, quiet times aside."""
    found = Soaked()
    with ExitStack() as stack:
        running = stack.enter_context(run_server(folder / "server.log", *_FLAGS, devices=_DEVICES))
        faults = Faults(running, seed)
        for _ in range(QUARTERS):
            _Quarter(running, work, faults, found).run(seconds / QUARTERS)
            if found.failed:
                break
    return found


def main(given: Any, folder: Path) -> bool:
    """Prints one line."""
    found = soak(60 * given.minutes, folder, mixed_work(), given.seed)
    if found.failed:
        return verdict(f"{found}; {found.failed}", False)
    grown = f"the last quarter has {found.grown_mib:+.1f} MiB, at most {MOST_GROWTH_MIB:g} allowed"
    return verdict(f"{found}; {grown}", found.is_kept and found.grown_mib <= MOST_GROWTH_MIB)


if __name__ == "__main__":
    run(main, __doc__, minutes=(20.0, "how long"), seed=(0, "of what is drawn"))
