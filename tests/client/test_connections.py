"""Clients that are closed or have lost their server; odd targets, sockets and proxies."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.client.fake_service import (
    STREAMED,
    UNARY,
    Gate,
    fake_service,
    group_norm,
)

from npugrad_client import Cancelled, Client, ConnectError, NpugradError, TransportError
from npugrad_client._channels import channel_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


WAYS = pytest.mark.parametrize("stream_from_bytes", [UNARY, STREAMED], ids=["unary", "streamed"])


# ------------------------------------------------------------------------------------------------- closed


@WAYS
def test_a_closed_client_says_so(stream_from_bytes: int) -> None:
    with fake_service() as service:
        client = Client(service.address, timeout_s=20, stream_from_bytes=stream_from_bytes)
        client.group_norm_backward(**group_norm())
        client.close()
        client.close()
        for act in (lambda: client.group_norm_backward(**group_norm()), client.server_info):
            with pytest.raises(RuntimeError, match=f"found the client for {service.address} closed"):
                act()


@WAYS
def test_closing_cancels_calls_in_flight(stream_from_bytes: int) -> None:
    gate = Gate()
    with fake_service(gate.unary, gate.execute) as service, ThreadPoolExecutor(1) as pool:
        client = Client(service.address, timeout_s=30, stream_from_bytes=stream_from_bytes)
        flying = pool.submit(client.group_norm_backward, **group_norm())
        gate.wait_for_call()
        client.close()
        with pytest.raises(Cancelled, match="group_norm_backward"):
            flying.result(20)
        gate.open()


def test_threads_may_open_and_close_clients_at_once() -> None:
    def open_some(number: int) -> None:
        for _ in range(100):
            client = Client(service.address, timeout_s=20)
            if number % 2:
                client.group_norm_backward(**group_norm())
            client.close()

    with fake_service() as service, ThreadPoolExecutor(8) as pool:
        list(pool.map(open_some, range(8)))


# ------------------------------------------------------------------------------------------- connections


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address that is taken by a socket that does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@WAYS
def test_an_unreachable_server_is_named_at_once_even_without_a_deadline(
    closed_port: str, stream_from_bytes: int
) -> None:
    with Client(closed_port, stream_from_bytes=stream_from_bytes) as client:
        with pytest.raises(
            ConnectError, match=f"^group_norm_backward: cannot reach {closed_port}: "
        ) as caught:
            client.group_norm_backward(**group_norm())
        with pytest.raises(ConnectError, match=f"^server_info: cannot reach {closed_port}: "):
            client.server_info()
    assert caught.value.retryable
    assert isinstance(caught.value, TransportError)


@pytest.mark.parametrize(
    "target", ["unix:/nonexistent/npugrad.sock", "http://localhost:1", "no.such.invalid:1"]
)
def test_odd_targets_are_named_too(target: str) -> None:
    with Client(target, timeout_s=20) as client, pytest.raises(TransportError, match=target):
        client.server_info()


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (50051, TypeError, "target: found int; expected text such as 'localhost:50051'"),
        (None, TypeError, "target: found NoneType"),
        ("", ValueError, "target: found empty text; expected host:port"),
    ],
)
def test_what_is_no_target_is_told_at_once(target: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Client(target)


def test_a_client_reads_a_unix_socket(tmp_path: Path) -> None:
    with (
        fake_service(address=f"unix:{tmp_path / 's'}") as service,
        Client(service.address, timeout_s=20) as c,
    ):
        assert c.group_norm_backward(**group_norm()).info.device == "test:0"


def test_a_server_that_comes_back_is_found_again(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    with Client(address, timeout_s=20) as client:
        with fake_service(address=address):
            client.group_norm_backward(**group_norm())
        with pytest.raises(ConnectError):
            client.group_norm_backward(**group_norm())
        with fake_service(address=address):
            deadline, pause = time.monotonic() + 30, threading.Event()
            while True:
                try:
                    client.group_norm_backward(**group_norm())
                    break
                except ConnectError:
                    assert time.monotonic() < deadline, "the client did not find the server again"
                    pause.wait(0.05)  # nothing tells that grpc's backoff is over


def test_loopback_is_never_asked_of_a_proxy(closed_port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{closed_port}")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with fake_service() as service, Client(service.address, timeout_s=20) as client:
        client.group_norm_backward(**group_norm())


@pytest.mark.parametrize(
    ("target", "is_direct"),
    [
        ("localhost:50051", True),
        ("127.0.0.1:50051", True),
        ("127.1.2.3", True),
        ("[::1]:50051", True),
        ("dns:///localhost:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("localhost.example.org:1", False),
        ("10.0.0.1:1", False),
        ("127.example.org:1", False),
        ("[2001:db8::1]:1", False),
        ("dns:///service.ns:50051", False),
    ],
)
def test_other_hosts_may_be_behind_one(target: str, is_direct: bool) -> None:
    assert (("grpc.enable_http_proxy", 0) in channel_options(target)) is is_direct


def test_a_service_of_another_kind_is_named() -> None:
    with (
        fake_service() as service,
        Client(service.address, timeout_s=20) as client,
        pytest.raises(NpugradError, match=f"server_info: {service.address}: UNIMPLEMENTED") as caught,
    ):
        client.server_info()
    assert isinstance(caught.value.cause, grpc.RpcError)


def test_bytes_that_are_no_reply_are_an_error() -> None:
    with (
        fake_service(unary=lambda *_: b"\xff\xff") as service,
        Client(service.address, timeout_s=20) as client,
        pytest.raises(NpugradError, match=f"{service.address}: INTERNAL: .*deserializ"),
    ):
        client.group_norm_backward(**group_norm())
