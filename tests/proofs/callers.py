"""Who calls while servers suffer: plain grpcio and the SDK, in threads that note what became of each call."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from tests.calls import UPLOAD_HXW, Sample, gated, sample
from tests.client.both import Make
from tests.e2e.harness import eventually
from tests.fix_server import ServerProcess, run_server
from tests.fix_tls import Certificates

from npugrad.v1 import backward_pb2_grpc
from npugrad_client import Client, Tls

CALLERS, TIMEOUT_S, PACE_S, WRONG = 4, 60.0, 0.01, "a wrong result"
Call = Callable[[], object]
"""Makes a call; returns what it was answered, or False for a wrong result."""
ROUND_ROBIN = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)


def arguments(made: Sample | None = None) -> dict[str, Any]:
    """What the SDK's method takes for a call; a small one of GroupNorm."""
    made = made or sample()
    return {**made.arrays, **made.call.attrs}


def plain_calls(channel: grpc.Channel, made: Sample | None = None) -> Call:
    made = made or sample()
    stub, message = backward_pb2_grpc.BackwardServiceStub(channel), made.message()
    expected = made.reference()["grad_input"]
    return lambda: stub.GroupNormBackward(message, timeout=TIMEOUT_S).grad_input.data == expected


@contextmanager
def plain(targets: Sequence[str], made: Sample | None = None) -> Iterator[Call]:
    """One channel, as a process has, and a stub that tries once."""
    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    target = targets[0]
    if len(targets) > 1:
        target = f"ipv4:{','.join(targets)}"
        options.append(("grpc.service_config", ROUND_ROBIN))
    with grpc.insecure_channel(target, options=options) as channel:
        yield plain_calls(channel, made)


@contextmanager
def sdk(
    targets: Sequence[str], made: Sample | None = None, make: Make = Client, **options: Any
) -> Iterator[Call]:
    """One client as it comes, but for options; a call gives a right result's info."""
    made = made or sample()
    given, expected = arguments(made), made.reference()
    with make(list(targets), **{"timeout_s": TIMEOUT_S, **options}) as client:

        def call() -> object:
            found = client.group_norm_backward(**given)
            is_right = {name: getattr(found, name).tobytes() for name in expected} == expected
            return is_right and found.info

        yield call


KINDS: dict[str, Callable[..., AbstractContextManager[Call]]] = {"plain": plain, "SDK": sdk}


def reason_of(error: Exception) -> str:
    """What a failure says, short enough to be counted by."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"[:60]
    return getattr(error, "reason", "") or type(error).__name__


class Ended(NamedTuple):
    """A call that has ended: when, by `time.monotonic()`, and what it failed with, or its answer."""

    begin_s: float
    end_s: float
    told: str
    answer: Any


class Load:
    """Callers in threads, each of which calls again when it has its answer, but not at once."""

    def __init__(
        self, *calls: Call, callers: int = CALLERS, pace_s: float = PACE_S, refused_pause_s: float = 0.0
    ) -> None:
        """Starts nothing yet.

        Args:
            calls: What each caller calls, one for all or one for each.
            callers: How many, if one call is for all.
            pace_s: From the start of a call to that of the next one at least, so that failures, which are
                quick, do not outnumber answers.
            refused_pause_s: From a failure to the next call at least.
        """
        self.ended: list[Ended] = []
        self._pace_s, self._refused_pause_s = pace_s, refused_pause_s
        self._changed, self._over = threading.Condition(), threading.Event()
        each = calls if len(calls) > 1 else calls * callers
        self._threads = [threading.Thread(target=self._work, args=(call,), daemon=True) for call in each]

    def _work(self, call: Call) -> None:
        while not self._over.is_set():
            begin_s, answer = time.monotonic(), None
            try:
                answer = call()
                told = WRONG if answer is False else ""
            except Exception as error:
                told = reason_of(error)
            end_s = time.monotonic()
            with self._changed:
                self.ended.append(Ended(begin_s, end_s, told, answer))
                self._changed.notify_all()
            pause_s = self._refused_pause_s if told else 0.0
            self._over.wait(max(pause_s, self._pace_s - (end_s - begin_s)))

    @property
    def calls(self) -> int:
        return len(self.ended)

    @property
    def failed(self) -> Counter[str]:
        """Failures by what they say, wrong results included."""
        return Counter(each.told for each in self.ended if each.told)

    @property
    def longest_s(self) -> float:
        return max((each.end_s - each.begin_s for each in self.ended), default=0.0)

    def between(self, start_s: float, end_s: float = float("inf")) -> list[Ended]:
        with self._changed:
            return [each for each in self.ended if start_s <= each.end_s < end_s]

    def wait(self, reached: Callable[[], object], timeout_s: float = 300.0) -> bool:
        """Waits until they have come so far, which is looked at after each call; whether they did in time."""
        with self._changed:
            return bool(self._changed.wait_for(reached, timeout_s))

    def wait_for(self, calls: int, timeout_s: float = 300.0) -> None:
        """Waits until so many calls have ended; raises TimeoutError if they have not in time."""
        if not self.wait(lambda: self.calls >= calls, timeout_s):
            raise TimeoutError(f"found {self.calls} calls after {timeout_s:g} s; expected {calls}")

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
        assert not any(thread.is_alive() for thread in self._threads), "a call got no answer"


@contextmanager
def server_of_tenants(
    folder: Path, weights: Mapping[str, float], *flags: str, devices: str
) -> Iterator[tuple[ServerProcess, list[Tls]]]:
    """A server with tenants of these names and weights, and what a client of each needs."""
    certificates, file = Certificates(folder), folder / "tenants.toml"
    line = '[[tenant]]\nname = "{0}"\nidentities = ["{0}.example.org"]\nweight = {1}\n'
    file.write_text("".join(line.format(*each) for each in weights.items()))
    names = [f"{name}.example.org" for name in weights]
    flags = (*certificates.mutual_flags, "--tenants", str(file), *flags)
    seen = certificates.credentials(certificates.named_caller(names[-1]))
    with run_server(folder / "server.log", *flags, devices=devices, credentials=seen) as server:
        yield server, [certificates.tls(name) for name in names]


class HeldCall:
    """A streamed call that an idle server has accepted, and whose other operands come when it is let go."""

    def __init__(self, server: ServerProcess) -> None:
        self._go = threading.Event()
        self._channel = server.channel()
        accepted = server.info().accepted_calls
        stub = backward_pb2_grpc.BackwardServiceStub(self._channel)
        self._answer = stub.Execute(gated(sample(hxw=UPLOAD_HXW).frames(), self._go, 2), timeout=TIMEOUT_S)
        eventually(lambda: server.info().accepted_calls > accepted, "the held call is accepted", server)

    def outcome(self) -> str:
        """Lets it go; ``"answered"``, or what it says."""
        self._go.set()
        try:
            first, *_ = self._answer
            return "answered" if first.WhichOneof("frame") == "header" else "no header"
        except grpc.RpcError as error:
            return reason_of(error)
        finally:
            self._channel.close()
