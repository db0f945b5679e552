"""Who calls while servers come and go: plain grpcio and the SDK, in threads that note what they lose."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from tests.calls import UPLOAD_HXW, Sample, gated, sample
from tests.e2e.harness import eventually
from tests.fix_server import ServerProcess

from npugrad.v1 import backward_pb2_grpc
from npugrad_client import Client, NpugradError

CALLERS, TIMEOUT_S, PACE_S = 4, 60.0, 0.01
ROUND_ROBIN = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)


def plain_calls(channel: grpc.Channel, made: Sample | None = None) -> Callable[[], bool]:
    """What makes a call of GroupNorm over a channel, once, and says whether its result is right."""
    made = made or sample()
    stub, message = backward_pb2_grpc.BackwardServiceStub(channel), made.message()
    expected = made.reference()["grad_input"]
    return lambda: bool(stub.GroupNormBackward(message, timeout=TIMEOUT_S).grad_input.data == expected)


@contextmanager
def _plain(targets: tuple[str, ...], made: Sample | None = None) -> Iterator[Callable[[], bool]]:
    """One channel, as a process has, and a stub that tries once."""
    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    target = targets[0]
    if len(targets) > 1:
        target = f"ipv4:{','.join(targets)}"
        options.append(("grpc.service_config", ROUND_ROBIN))
    with grpc.insecure_channel(target, options=options) as channel:
        yield plain_calls(channel, made)


@contextmanager
def _sdk(
    targets: tuple[str, ...], made: Sample | None = None, **options: Any
) -> Iterator[Callable[[], bool]]:
    """One client as it comes, but for options."""
    made = made or sample()
    given: dict[str, Any] = {**made.arrays, **made.call.attrs}
    expected = made.reference()["grad_input"]
    with Client(list(targets), timeout_s=TIMEOUT_S, **options) as client:
        yield lambda: client.group_norm_backward(**given).grad_input.tobytes() == expected


KINDS: dict[str, Callable[..., Any]] = {"plain": _plain, "SDK": _sdk}


def reason_of(error: Exception) -> str:
    """What a failure says, short enough to be counted by."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"[:60]
    return getattr(error, "reason", "") or type(error).__name__


def in_columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A line of a table that is printed while its rows are measured."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


class Load:
    """Callers in threads, each of which calls again when it has its answer, but not at once.

    Attributes:
        failed: Failures by what they say, wrong results included.
        longest_s: The longest that a call took.
    """

    def __init__(self, call: Callable[[], bool]) -> None:
        self._call, self.failed, self.longest_s = call, Counter[str](), 0.0
        self._calls, self._changed, self._is_over = 0, threading.Condition(), False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(CALLERS)]

    def _work(self) -> None:
        while not self._is_over:
            begin_s = time.monotonic()
            try:
                told = "" if self._call() else "a wrong result"
            except (grpc.RpcError, NpugradError) as error:
                told = reason_of(error)
            took_s = time.monotonic() - begin_s
            with self._changed:
                self._calls += 1
                self.longest_s = max(self.longest_s, took_s)
                if told:
                    self.failed[told] += 1
                self._changed.notify_all()
            # So that failures, which are quick, do not outnumber answers.
            time.sleep(max(0.0, PACE_S - took_s))

    @property
    def calls(self) -> int:
        """Calls that have ended."""
        return self._calls

    def wait_for(self, calls: int, timeout_s: float = 300.0) -> None:
        """Waits until so many calls have ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._calls >= calls, timeout_s):
                raise TimeoutError(f"found {self._calls} calls after {timeout_s:g} s; expected {calls}")

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(TIMEOUT_S + 10)


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
