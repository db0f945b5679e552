"""How a server ends: it goes on serving, closes connections and finishes their calls, or is cut short."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.calls import TIMEOUT_S, UPLOAD_HXW, call_execute, call_unary, failure_of, gated, sample
from tests.e2e.test_server_lifecycle import NOT_SERVING, SERVING, health_of, watch_health
from tests.fix_server import StartServer
from tests.http2 import frame, message, start_call

from npugrad.errors import ServerDraining
from npugrad.v1 import backward_pb2_grpc


def test_everything_is_served_during_the_drain_delay(start_server: StartServer) -> None:
    """Over connections old and new; all that differs is what health and info say."""
    draining = start_server("--drain-delay-s", "600", "--metrics-listen", "127.0.0.1:0", check_end=False)
    made = sample()
    with draining.channel() as old:
        watch = watch_health(old)
        assert next(watch).status == SERVING
        draining.signal()
        assert next(watch).status == NOT_SERVING
        assert draining.page("/readyz") == (503, "draining\n")
        assert draining.page("/livez")[0] == 200
        for channel in (old, draining.channel()):
            with channel:
                assert health_of(channel) == health_of(channel, "npugrad.v1.BackwardService") == NOT_SERVING
                assert health_of(channel, "liveness") == SERVING
                unary = call_unary(channel, made.record, made.message())
                assert {name: content.data for name, content in unary.contents.items()} == made.reference()
                assert call_execute(channel, made.frames()).contents == made.reference()
    assert draining.info().draining
    draining.assert_nothing_leaked()
    draining.signal()
    assert draining.wait() == 0, "nothing was cut off"


def test_drain_lets_everything_finish_that_was_opened_before_goaway(start_server: StartServer) -> None:
    """One call runs, one waits, one uploads, one only announced itself, of one not even the header came."""
    draining = start_server(devices="test:1?ms=300&compute=1", check_end=False)
    made, large, gate = sample(), sample(hxw=UPLOAD_HXW), threading.Event()
    ready, left = threading.Event(), threading.Event()
    with draining.channel() as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        uploads = [stub.Execute(gated(large.frames(), gate, n), timeout=TIMEOUT_S) for n in (0, 1, 2)]
        accepted = [stub.GroupNormBackward.future(made.message(), timeout=TIMEOUT_S) for _ in range(2)]
        draining.wait_accepted(3)

        def changed(state: grpc.ChannelConnectivity) -> None:
            if state is grpc.ChannelConnectivity.READY:
                ready.set()
            elif ready.is_set():
                left.set()

        channel.subscribe(changed)
        assert ready.wait(TIMEOUT_S)
        draining.signal()
        assert left.wait(TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as caught:
            call_unary(channel, made.record, made.message())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        gate.set()
        for call in accepted:
            assert call.result().grad_input.data == made.reference()["grad_input"]
        for upload in uploads:
            first, *_ = upload
            assert first.WhichOneof("frame") == "header"
        assert draining.wait() == 0
    assert draining.log_lines("drained")


def test_drain_that_takes_too_long_is_cut_and_said(start_server: StartServer) -> None:
    """The caller learns that another server may take the call; SIGINT knows no delay."""
    flags = ("--drain-timeout-s", "0.3", "--drain-delay-s", "600")
    stuck = start_server(*flags, devices="test:1?hang=forever", check_end=False)
    made = sample()
    with stuck.channel() as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        call = stub.GroupNormBackward.future(made.message(label="forever"), timeout=TIMEOUT_S)
        stuck.wait_accepted(1)
        stuck.signal(signal.SIGINT)
        assert stuck.wait() == 1
        failure = failure_of(call.result)
        assert failure.status is grpc.StatusCode.UNAVAILABLE
        assert isinstance(failure.error, ServerDraining)
        assert failure.error.retryable
        assert failure.error.retry_after_s is None
    assert stuck.log_lines("drain cut short")


def test_second_signal_ends_at_once(start_server: StartServer) -> None:
    stuck = start_server("--drain-timeout-s", "100", devices="test:1?hang=forever", check_end=False)
    made = sample()
    with stuck.channel() as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        watch = watch_health(channel)
        assert next(watch).status == SERVING
        call = stub.GroupNormBackward.future(made.message(label="forever"), timeout=TIMEOUT_S)
        stuck.wait_accepted(1)
        stuck.signal()
        assert next(watch).status == NOT_SERVING
        stuck.signal()
        assert stuck.wait() == 1
        assert isinstance(failure_of(call.result).error, ServerDraining)


def test_clients_that_do_not_take_their_end_do_not_hold_up_the_servers(start_server: StartServer) -> None:
    """A watch and a reflection stream that stay open, and a connection on which nobody answers."""
    watched = start_server("--drain-timeout-s", "100")
    host, _, port = watched.address.rpartition(":")
    asked, done = threading.Event(), threading.Event()

    def requests() -> Iterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        asked.set()
        done.wait(TIMEOUT_S)

    with watched.channel() as channel, socket.create_connection((host, int(port))) as silent:
        silent.sendall(start_call(b"/grpc.health.v1.Health/Watch") + frame(0, 1, 1, message(0, b"")))
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = stub.ServerReflectionInfo(requests(), timeout=TIMEOUT_S)
        assert next(answers).WhichOneof("message_response") == "list_services_response"
        assert asked.wait(TIMEOUT_S)
        watch = watch_health(channel)
        assert next(watch).status == SERVING
        watched.signal()
        assert next(watch).status == NOT_SERVING
        assert watched.wait() == 0
        done.set()
