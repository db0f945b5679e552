"""Calls through something that takes less as one message than their client thought: streamed, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from tests.client.both import BOTH, Make, call_once
from tests.client.fake_service import group_norm
from tests.fix_server import ServerProcess
from tests.operators import GROUP_NORM

from npugrad_client import Client, Recipe

LIMIT_BYTES = 2**20 + 2**18
"""Room for a chunk; not for calls that are sent as one message up to 2 MiB."""
HXW = 24 * 2**10
Proxy = tuple[str, list[str]]


# -------------------------------------------------- a gRPC proxy that takes no large messages, as gateways do


class _Forward(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.Channel, methods: list[str]) -> None:
        self._channel, self._methods = channel, methods

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        if name == "Execute":
            stream: Any = self._channel.stream_stream(details.method)
            return grpc.stream_stream_rpc_method_handler(lambda frames, context: self._stream(stream, frames))
        unary: Any = self._channel.unary_unary(details.method)
        return grpc.unary_unary_rpc_method_handler(
            lambda data, context: self._whole(unary, name, data, context)
        )

    def _stream(self, stream: Any, frames: Iterator[bytes]) -> Iterator[bytes]:
        self._methods.append("Execute")
        yield from stream(frames, timeout=60)

    def _whole(self, unary: Any, name: str, data: bytes, context: grpc.ServicerContext) -> Any:
        self._methods.append(name)
        try:
            return unary(data, timeout=60)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")


@contextmanager
def limiting_proxy(address: str, max_message_bytes: int) -> Iterator[Proxy]:
    """Runs one for a block: its address, and the methods of the calls that it has passed on so far."""
    options = [("grpc.max_receive_message_length", max_message_bytes), ("grpc.use_local_subchannel_pool", 1)]
    methods: list[str] = []
    with grpc.insecure_channel(address, options=options) as channel:
        server = grpc.server(futures.ThreadPoolExecutor(8), options=[*options, ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((_Forward(channel, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}", methods
        finally:
            server.stop(0).wait(10)


# -------------------------------------------------------------------------------------------------- tests


@pytest.fixture
def proxy(server: ServerProcess) -> Iterator[Proxy]:
    with limiting_proxy(server.address, LIMIT_BYTES) as made:
        yield made


def large_reply() -> dict[str, Any]:
    """A call of a short request, whose operands the server makes, with a long reply."""
    call = group_norm(n=2, c=8, hxw=HXW)
    for name in ("grad_out", "input"):
        call[name] = Recipe("normal", shape=call[name].shape, seed=1)
    return call


@BOTH
@pytest.mark.parametrize(
    "call", [lambda: group_norm(n=2, c=4, hxw=HXW), large_reply], ids=["request", "reply"]
)
def test_what_is_too_large_as_one_message_is_streamed(
    server: ServerProcess, proxy: Proxy, make: Make, call: Callable[[], dict[str, Any]]
) -> None:
    """The first call of its size twice, the second time as a stream; those that follow only so."""
    address, methods = proxy
    given = call()
    with make(address, timeout_s=60) as client:
        found = [client.group_norm_backward(**each) for each in (given, given, group_norm())]
        found.append(client.submit.group_norm_backward(**given).result(60))
    assert [each.info.tries for each in found] == [2, 1, 1, 1]
    assert [name for name in methods if name == "Execute"] == ["Execute"] * 3
    right = call_once(Client, server.address, given)
    for each in (found[0], found[1], found[3]):
        assert np.array_equal(each.grad_input, right.grad_input)
        assert np.array_equal(each.grad_gamma, right.grad_gamma)


def test_it_is_remembered_for_that_server_only(server: ServerProcess, proxy: Proxy) -> None:
    """Calls of the one signature go either way, by the server that they go to, also by plan."""
    address, methods = proxy
    call = group_norm(n=2, c=4, hxw=HXW)
    with Client([address, server.address], timeout_s=60) as client:
        found = [client.group_norm_backward(**call) for _ in range(8)]
    assert sum(each.info.tries for each in found) == 9
    assert 1 <= methods.count("Execute") < 8
    assert methods.count(GROUP_NORM.rpc) == 0  # the proxy's own gRPC refused it
    assert all(np.array_equal(each.grad_input, found[0].grad_input) for each in found)


def test_a_call_whose_plan_is_of_one_message_is_streamed(server: ServerProcess, proxy: Proxy) -> None:
    """Another server takes it whole, and an operand of which no value is used stays at home either way."""
    address, methods = proxy
    call = group_norm(n=2, c=4, hxw=2 * HXW) | {"output_mask": (False, False, True)}
    with Client([server.address, address], timeout_s=60) as client:
        found = [client.group_norm_backward(**call) for _ in range(6)]
    assert sum(each.info.tries for each in found) == 7
    assert set(methods) == {"Execute"}
    for each in found:
        assert np.array_equal(each.grad_beta, found[0].grad_beta)
