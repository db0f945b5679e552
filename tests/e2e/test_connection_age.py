"""Servers that come and go under load, for callers with plain grpcio on a connection that they keep."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.calls import TIMEOUT_S, gated, sample
from tests.e2e.harness import eventually
from tests.e2e.service_address import service_address

from npugrad.v1 import backward_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.calls import Sample
    from tests.fix_server import ServerProcess, StartServer

pytestmark = pytest.mark.slow
CALLERS = 4
DEVICES, STREAMS = "test:1?ms=2&compute=1", ("--streams-per-device", "8")


class Callers:
    """Threads that call one after another over one connection, with nothing but grpcio.

    Attributes:
        outcomes: Answers by "right" and "wrong", failures by status and message.
    """

    def __init__(self, channel: grpc.Channel, made: Sample) -> None:
        self.outcomes: Counter[str] = Counter()
        self._stub = backward_pb2_grpc.BackwardServiceStub(channel)
        self._message, self._expected = made.message(), made.reference()["grad_input"]
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(CALLERS)]

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                found = self._stub.GroupNormBackward(self._message, timeout=TIMEOUT_S)
                outcome = "right" if found.grad_input.data == self._expected else "wrong"
            except grpc.RpcError as error:
                outcome = f"{error.code().name}: {error.details()}"
            with self._lock:
                self.outcomes[outcome] += 1

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    @property
    def failures(self) -> dict[str, int]:
        """What was not right."""
        return {outcome: count for outcome, count in self.outcomes.items() if outcome != "right"}


@contextmanager
def plain_channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def held_upload(channel: grpc.Channel, made: Sample, gate: threading.Event, frames_before: int) -> Any:
    """The answer to a streamed call whose later frames wait for a gate."""
    stub = backward_pb2_grpc.BackwardServiceStub(channel)
    return stub.Execute(gated(made.frames(), gate, frames_before), timeout=TIMEOUT_S)


def accepted(server: ServerProcess) -> int:
    return int(server.info().accepted_calls)


def kinds(answer: Any) -> list[str]:
    return [frame.WhichOneof("frame") for frame in answer]


def test_a_server_that_ends_costs_plain_callers_no_more_than_what_is_on_the_wire_at_that_moment(
    start_server: StartServer,
) -> None:
    """Two uploads hold the first server open; one of them has sent nothing yet."""
    first = start_server("--drain-delay-s", "1", *STREAMS, devices=DEVICES, check_end=False)
    second = start_server(*STREAMS, devices=DEVICES)
    made, gate = sample(), threading.Event()
    with service_address(first.address) as front, plain_channel(front.address) as channel:
        held = [held_upload(channel, made, gate, frames_before) for frames_before in (0, 2)]
        with Callers(channel, made) as callers:
            eventually(lambda: accepted(first) > 20, "the first server gets calls", first)
            front.servers = (second.address,)
            first.signal()
            eventually(lambda: accepted(second) > 200, "the second server gets calls", second)
            gate.set()
            assert [kinds(answer) for answer in held] == [["header"], ["header"]]
            assert first.wait() == 0
    # grpc refuses, by itself and with CANCELLED, what reaches a server after it began to end.
    assert sum(callers.failures.values()) <= CALLERS, callers.outcomes
    assert set(callers.failures) <= {"CANCELLED: CANCELLED"}


def test_a_new_server_gets_calls_once_connections_reach_their_age(start_server: StartServer) -> None:
    """And none is lost: not those in progress when a connection is told to go, however long they take."""
    flags = ("--max-connection-age-s", "1", *STREAMS)
    first = start_server(*flags, devices=DEVICES)
    made, gate = sample(), threading.Event()
    with service_address(first.address) as front, plain_channel(front.address) as channel:
        held = held_upload(channel, made, gate, 2)
        with Callers(channel, made) as callers:
            eventually(lambda: accepted(first) > 20, "the first server gets calls", first)
            second = start_server(*flags, devices=DEVICES)
            front.servers = (second.address, first.address)
            eventually(lambda: accepted(second) > 50, "the new server gets calls", second)
            gate.set()
            assert kinds(held) == ["header"]
    assert callers.failures == {}
