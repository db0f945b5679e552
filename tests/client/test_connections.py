"""Clients that are closed or have lost their server; odd targets, sockets and proxies."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.client.fake_service import (
    STREAMED,
    UNARY,
    Gate,
    fake_service,
    group_norm,
)

import npugrad
from npugrad_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectError,
    NpugradError,
    RetryPolicy,
    TransportError,
    UnsupportedOperator,
)
from npugrad_client._channels import KEEPALIVE_S, channel_options
from npugrad_client._targets import DEFAULT_PORT
from npugrad_server.config import ServerSettings
from npugrad_server.rpc.transport import LEAST_PING_INTERVAL_S

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
            with pytest.raises(RuntimeError, match=f"the client for {service.address} is closed"):
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
def test_an_unreachable_server_is_named_even_without_a_deadline(
    closed_port: str, stream_from_bytes: int
) -> None:
    policy = RetryPolicy(retry_for_s=0)
    with Client(closed_port, stream_from_bytes=stream_from_bytes, retry=policy) as client:
        with pytest.raises(
            ConnectError, match=f"^group_norm_backward: cannot reach {closed_port}: "
        ) as caught:
            client.group_norm_backward(**group_norm())
        with pytest.raises(ConnectError, match=f"^server_info: cannot reach {closed_port}: "):
            client.server_info()
    assert caught.value.retryable
    assert isinstance(caught.value, TransportError)


def test_a_socket_that_is_not_there_is_named_too() -> None:
    target = "unix:/nonexistent/npugrad.sock"
    with (
        Client(target, retry=RetryPolicy(retry_for_s=0)) as client,
        pytest.raises(ConnectError, match=target) as caught,
    ):
        client.server_info()
    assert not caught.value.is_misconfigured


def test_a_name_that_nobody_knows_is_given_up_soon() -> None:
    with (
        Client("no.such.invalid:1") as client,
        pytest.raises(ConnectError, match=r"no\.such\.invalid") as caught,
    ):
        client.server_info()
    assert caught.value.is_misconfigured
    assert caught.value.tries == 4


class _Page(BaseHTTPRequestHandler):
    """A web server's answer to bytes that are no HTTP/1 request."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(params=["HTTP/0.9", "HTTP/1.0"], ids=["bare page", "status line"])
def web_port(request: pytest.FixtureRequest) -> Iterator[str]:
    """A web server; Python's own answers with a bare page, as metrics ports do, others with a status line."""
    handler = type("Page", (_Page,), {"default_request_version": request.param})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web, ThreadPoolExecutor(1) as pool:
        pool.submit(web.serve_forever)
        yield f"127.0.0.1:{web.server_port}"
        web.shutdown()


@WAYS
def test_a_port_that_speaks_http1_is_told_from_a_server(web_port: str, stream_from_bytes: int) -> None:
    expected = (
        rf"cannot reach {web_port}: what listens there does not speak HTTP/2.*listening on., port 50051"
    )
    with (
        Client(web_port, stream_from_bytes=stream_from_bytes) as client,
        pytest.raises(ConnectError, match=expected) as caught,
    ):
        client.group_norm_backward(**group_norm())
    assert caught.value.is_misconfigured
    assert caught.value.tries == 4


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("localhost", "localhost:50051"),
        ("localhost:1", "localhost:1"),
        ("10.0.0.1", "10.0.0.1:50051"),
        ("npu-7.example.org", "npu-7.example.org:50051"),
        ("dns:///npugrad", "dns:///npugrad:50051"),
        ("dns:npugrad", "dns:npugrad:50051"),
        ("dns://8.8.8.8/npugrad", "dns://8.8.8.8/npugrad:50051"),
        ("dns:///npugrad:443", "dns:///npugrad:443"),
        ("[::1]", "[::1]:50051"),
        ("::1", "[::1]:50051"),
        ("dns:///[::1]", "dns:///[::1]:50051"),
        ("[::1]:443", "[::1]:443"),
        ("unix:/run/npugrad.sock", "unix:/run/npugrad.sock"),
        ("unix:npugrad.sock", "unix:npugrad.sock"),
        ("ipv4:127.0.0.1:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2"),
        ("xds:///npugrad", "xds:///npugrad"),
    ],
)
def test_a_host_without_a_port_is_asked_on_ours(target: str, expected: str) -> None:
    assert Client(target).target == expected
    assert AsyncClient([target, "other"]).target == f"{expected}, other:50051"
    assert Client([target, expected]).target == expected


def test_the_client_pings_seldom_enough_for_the_server() -> None:
    """Half as often as it may, as clocks and networks differ."""
    assert KEEPALIVE_S >= 2 * LEAST_PING_INTERVAL_S
    assert ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000) in channel_options("localhost:1")


def test_the_default_port_is_the_one_that_the_server_listens_on() -> None:
    assert ServerSettings.model_fields["listen"].default.endswith(f":{DEFAULT_PORT}")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://localhost:1", "'localhost:1'"),
        ("http://localhost", "'localhost:50051'"),
        ("HTTP://localhost/path?query", "'localhost:50051'"),
        ("grpc://[::1]:1", r"'\[::1\]:1'"),
        ("https://npu.example.org", r"'npu.example.org:50051' and tls=True \(--tls\)"),
        ("grpcs://npu:443/", r"'npu:443' and tls=True \(--tls\)"),
        ("tcp://", "'localhost:50051'"),
    ],
)
@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_a_url_is_told_from_a_target(cls: Any, target: str, expected: str) -> None:
    for given in (target, ["localhost", target]):
        with pytest.raises(
            ValueError, match=f"^target: found the URL '.*'; expected host:port .* {expected}$"
        ):
            cls(given)


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
        flying = client.submit.group_norm_backward(**group_norm())
        assert not wait([flying], 3).done, "it did not wait for the server"
        with fake_service(address=address):
            assert flying.result(30).info.tries > 1


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


@pytest.mark.parametrize(
    ("target", "is_short"),
    [
        ("localhost:50051", True),
        ("dns:///localhost:1", True),
        ("unix:/run/npugrad.sock", True),
        ("unix:///run/npugrad.sock", True),
        ("unix-abstract:npugrad", True),
        ("unix.example.org:1", False),
        ("10.0.0.1:1", False),
        ("dns:///service.ns:50051", False),
    ],
)
def test_little_is_read_ahead_on_one_host_alone(target: str, is_short: bool) -> None:
    assert (("grpc.http2.bdp_probe", 0) in channel_options(target)) is is_short


def test_a_service_of_another_kind_is_told_what_was_expected() -> None:
    with (
        fake_service() as service,
        Client(service.address, timeout_s=20) as client,
        pytest.raises(UnsupportedOperator) as caught,
    ):
        client.server_info()
    assert str(caught.value) == (
        f"server_info: {service.address}: the server does not know this method of npugrad.v1; "
        f"it must speak npugrad.v1, as this client of version {npugrad.__version__} does "
        "(gRPC: Method not found!)"
    )
    assert isinstance(caught.value.cause, grpc.RpcError)


def test_bytes_that_are_no_reply_are_an_error() -> None:
    with (
        fake_service(unary=lambda *_: b"\xff\xff") as service,
        Client(service.address, timeout_s=20) as client,
        pytest.raises(NpugradError, match=f"{service.address}: INTERNAL: .*deserializ"),
    ):
        client.group_norm_backward(**group_norm())


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x12\x04\x1a\x09ab"], ids=["nothing", "half a chunk"])
def test_frames_that_are_none_are_an_error(data: Any) -> None:
    with (
        fake_service(execute=lambda *_: iter([data])) as service,
        Client(service.address, timeout_s=20, stream_from_bytes=STREAMED) as client,
        pytest.raises(NpugradError, match=f"{service.address}: INTERNAL: .*deserializ"),
    ):
        client.group_norm_backward(**group_norm())
