"""`make prove-soak`: a server under load and mixed faults for twenty minutes, which leave nothing behind.

Good calls are compared with what is right, while workers are killed, calls crash or hang their workers,
callers vanish, cancel or run out of time, connections break off, and messages are damaged. Memory of the
front process in the last quarter is held against the second one; descriptors and threads are counted between,
when nobody calls. The devices are simulated, and compute as the CPU does.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tests.benchmarks.resident import status_bytes
from tests.calls import gated, sample
from tests.e2e.harness import STREAMED, UNARY, Wire, eventually, idle, workers_of
from tests.e2e.load import Work, mixed_work
from tests.fix_server import ServerProcess, run_server
from tests.http2 import start_call
from tests.proofs.callers import TIMEOUT_S, WRONG, Load, arguments
from tests.proofs.mutations import Mutator, corpus
from tests.proofs.proof import MIB, run, told, verdict
from tests.raw_calls import RawCaller

from npugrad.error_table import BY_REASON
from npugrad.v1 import server_pb2
from npugrad_client import Client, NpugradError

MOST_GROWTH_MIB, MOST_THREADS_MORE = 8.0, 2
QUARTERS = 4
_DEVICES = "test:2?ms=2&compute=1&crash=crash&hang=hang"
_FLAGS = ("--respawn-backoff-s", "0.05", "--hang-grace-s", "0.5", "--log-level", "error")
_PAUSE_S, _HUNG_S = 0.05, 0.25
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
        return self.resident_mib[-1] - self.resident_mib[1]

    @property
    def is_kept(self) -> bool:
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
        self._running, self._rng = running, random.Random(seed)
        self._mutator = Mutator(corpus(200, seed), seed)
        # Of a signature that no good call has: the circuits that it opens are its own.
        self._sample = sample(n=5)
        self._arguments = arguments(self._sample)
        kinds = (self.kill, self.crash, self.hang, self.vanish, self.cancel)
        self._kinds = itertools.cycle((*kinds, self.run_out_of_time, self.break_off, self.damage))
        self.made: Counter[str] = Counter()

    def make(self) -> None:
        act = next(self._kinds)
        act()
        self.made[act.__name__.replace("_", " ")] += 1

    def kill(self) -> None:
        if pids := workers_of(self._running.process.pid):
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(pids), signal.SIGKILL)

    def crash(self) -> None:
        self._call("crash", TIMEOUT_S)

    def hang(self) -> None:
        self._call("hang", _HUNG_S)

    def _call(self, label: str, timeout_s: float) -> None:
        with Client(self._running.address, timeout_s=timeout_s, retry=None) as client, suppress(NpugradError):
            client.group_norm_backward(**self._arguments, label=label)

    def vanish(self) -> None:
        """A connection that goes in the middle of an upload."""
        with self._running.channel() as channel, suppress(grpc.RpcError):
            gate = threading.Event()
            frames = gated(self._sample.frames(), gate, 2)
            answer = Wire.of(channel).backward.Execute(frames, timeout=TIMEOUT_S)
            time.sleep(self._rng.random() * _PAUSE_S)
            answer.cancel()
            gate.set()

    def cancel(self) -> None:
        with self._running.channel() as channel:
            message, stub = self._sample.message(), Wire.of(channel).backward
            calls = [stub.GroupNormBackward.future(message, timeout=TIMEOUT_S) for _ in range(20)]
            time.sleep(self._rng.random() * _PAUSE_S)
            for call in calls:
                call.cancel()

    def run_out_of_time(self) -> None:
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


def _quarter(running: ServerProcess, work: list[Work], faults: Faults, found: Soaked, seconds: float) -> None:
    """Load and faults for a while, and the memory of the front process meanwhile, then a time of rest."""
    pid, resident, end_s = running.process.pid, [], time.monotonic() + seconds
    with ExitStack() as stack:
        calls = []
        for way in (UNARY, STREAMED):  # large calls go streamed only
            client = Client(running.address, timeout_s=TIMEOUT_S, stream_from_bytes=way)
            works = itertools.cycle([each for each in work if way == STREAMED or not each.streamed])
            calls.append(partial(_is_right, stack.enter_context(client), works))
        load = stack.enter_context(Load(*calls, pace_s=0))
        harm = stack.enter_context(Load(faults.make, callers=1, pace_s=_PAUSE_S))
        while time.monotonic() < end_s and not harm.failed:
            resident.append(status_bytes("VmRSS", pid) / MIB)
            time.sleep(0.2)
    failed = load.failed
    found.right += load.calls - failed.total()
    found.wrong += failed.pop(WRONG, 0)
    found.failed += [told(harm.failed)] if harm.failed else []
    found.failed += [reason for reason in failed if reason not in BY_REASON]
    found.told += failed
    found.resident_mib.append(statistics.median(resident))
    _start_verifier(running)
    found.quiet.append(_quiet(running))


def _is_right(client: Client, works: Iterator[Work]) -> bool:
    work = next(works)
    return work.is_right(work.send(client))


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
            _quarter(running, work, faults, found, seconds / QUARTERS)
            if found.failed:
                break
        found.faults = faults.made
    return found


def main(given: Any, folder: Path) -> bool:
    found = soak(60 * given.minutes, folder, mixed_work(), given.seed)
    if found.failed:
        return verdict(f"{found}; {found.failed}", False)
    grown = f"the last quarter has {found.grown_mib:+.1f} MiB, at most {MOST_GROWTH_MIB:g} allowed"
    return verdict(f"{found}; {grown}", found.is_kept and found.grown_mib <= MOST_GROWTH_MIB)


if __name__ == "__main__":
    run(main, __doc__, minutes=(20.0, "how long"), seed=(0, "of what is drawn"))
