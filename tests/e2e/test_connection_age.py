"""Servers that are added under load, for callers with plain grpcio on a connection that they keep."""

from __future__ import annotations

import threading

import grpc
import pytest
from tests.calls import TIMEOUT_S, UPLOAD_HXW, gated, sample
from tests.e2e.harness import eventually
from tests.e2e.service_address import service_address
from tests.fix_server import ServerProcess, StartServer
from tests.proofs.callers import Load, plain_calls

from npugrad.v1 import backward_pb2_grpc

DEVICES = "test:1?ms=2&compute=1"


def accepted(server: ServerProcess) -> int:
    return int(server.info().accepted_calls)


@pytest.mark.slow
def test_a_new_server_gets_calls_once_connections_reach_their_age(start_server: StartServer) -> None:
    """And none is lost: not those in progress when a connection is closed, however long they take."""
    flags = ("--max-connection-age-s", "1", "--streams-per-device", "8")
    first, gate = start_server(*flags, devices=DEVICES), threading.Event()
    local = [("grpc.use_local_subchannel_pool", 1)]
    with service_address(first.address) as front, grpc.insecure_channel(front.address, local) as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        held = stub.Execute(gated(sample(hxw=UPLOAD_HXW).frames(), gate, 2), timeout=TIMEOUT_S)
        with Load(plain_calls(channel)) as load:
            eventually(lambda: accepted(first) > 20, "the first server gets calls", first)
            second = start_server(*flags, devices=DEVICES)
            front.servers = (second.address, first.address)
            eventually(lambda: accepted(second) > 50, "the new server gets calls", second)
            gate.set()
            header, *_ = held
            assert header.WhichOneof("frame") == "header"
    assert not load.failed
