"""Clients that are closed or have lost their server; odd targets, sockets and proxies."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.client.both import BOTH, PAIRS, WAYS, Looped, Make, call_once, failures
from tests.client.fake_service import STREAMED, UNARY, Gate, fake_service, group_norm

from npugrad_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectError,
    DeadlineExceeded,
    NpugradError,
    RetryPolicy,
    TransportError,
)
from npugrad_client._channels import KEEPALIVE_S, _proxy_note, channel_options
from npugrad_client._targets import DEFAULT_PORT
from npugrad_server.config import ServerSettings
from npugrad_server.rpc.transport import LEAST_PING_INTERVAL_S


@WAYS
@BOTH
def test_closing_cancels_calls_in_flight_and_a_closed_client_says_so(make: Make, way: int) -> None:
    gate = Gate()
    with (
        fake_service(before=gate.hold) as service,
        make(service.address, timeout_s=30, stream_from_bytes=way) as client,
    ):
        flying = client.submit.group_norm_backward(**group_norm())
        gate.wait_for_call()
        client.close()
        client.close()
        with pytest.raises(Cancelled, match="group_norm_backward"):
            flying.result(20)
        for act in (lambda: client.group_norm_backward(**group_norm()), client.server_info):
            with pytest.raises(RuntimeError, match=f"the client for {service.address} is closed"):
                act()
        gate.open()


def test_threads_may_open_and_close_clients_at_once() -> None:
    def open_some(number: int) -> None:
        for _ in range(25):
            client = Client(service.address, timeout_s=20)
            if number % 2:
                client.group_norm_backward(**group_norm())
            client.close()

    with fake_service() as service, ThreadPoolExecutor(8) as pool:
        list(pool.map(open_some, range(8)))


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address that is taken by a socket that does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@WAYS
@BOTH
def test_an_unreachable_server_is_named_even_without_a_deadline(
    closed_port: str, make: Make, way: int
) -> None:
    with make(closed_port, stream_from_bytes=way, retry=RetryPolicy(retry_for_s=0)) as client:
        for what, act in (
            ("group_norm_backward", lambda: client.group_norm_backward(**group_norm())),
            ("server_info", client.server_info),
        ):
            with pytest.raises(ConnectError, match=f"^{what}: cannot reach {closed_port}: ") as caught:
                act()
            assert caught.value.retryable
            assert isinstance(caught.value, TransportError)


@pytest.mark.parametrize(
    ("target", "is_misconfigured", "tries"),
    [("unix:/nonexistent/npugrad.sock", False, 1), ("no.such.invalid:1", True, 4)],
)
def test_a_socket_or_a_name_that_is_not_there_is_named_too(
    target: str, is_misconfigured: bool, tries: int
) -> None:
    """A name that nobody knows is given up soon."""
    policy = RetryPolicy() if is_misconfigured else RetryPolicy(retry_for_s=0)
    with Client(target, retry=policy) as client, pytest.raises(ConnectError, match=target) as caught:
        client.server_info()
    assert (caught.value.is_misconfigured, caught.value.tries) == (is_misconfigured, tries)
    assert not caught.value.was_connected


class _Page(BaseHTTPRequestHandler):
    """A web server's answer to bytes that are no HTTP/1 request."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class _Refusing(_Page):
    """A proxy that lets nobody through."""

    def do_CONNECT(self) -> None:
        self.send_error(403)


@pytest.fixture(params=["HTTP/0.9", "HTTP/1.0"], ids=["bare page", "status line"])
def web_port(request: pytest.FixtureRequest) -> Iterator[str]:
    """A web server; Python's own answers with a bare page, as metrics ports do, others with a status line."""
    handler = type("Page", (_Page,), {"default_request_version": request.param})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web, ThreadPoolExecutor(1) as pool:
        pool.submit(web.serve_forever, 0.01)
        yield f"127.0.0.1:{web.server_port}"
        web.shutdown()


@PAIRS
def test_a_port_that_speaks_http1_is_told_from_a_server(web_port: str, make: Make, way: int) -> None:
    expected = (
        rf"cannot reach {web_port}: what listens there does not speak HTTP/2.*listening on., port 50051"
    )
    with pytest.raises(ConnectError, match=expected) as caught:
        call_once(make, web_port, stream_from_bytes=way)
    assert caught.value.is_misconfigured
    assert caught.value.tries == 4


TARGETS = [
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
    ("unix:///" + "x" * 106, "unix:///" + "x" * 106),
    ("unix-abstract:" + "x" * 107, "unix-abstract:" + "x" * 107),
    ("ipv4:127.0.0.1:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2"),
    ("ipv6:[::1]:1,::2", "ipv6:[::1]:1,[::2]:50051"),
    ("npu-7:65535", "npu-7:65535"),
    ("xds:///npugrad", "xds:///npugrad"),
]


def test_a_host_without_a_port_is_asked_on_ours() -> None:
    for target, expected in TARGETS:
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
def test_a_url_is_told_from_a_target(target: str, expected: str) -> None:
    message = f"^target: found the URL '.*'; expected host:port .* {expected}$"
    for cls, given in ((Client, target), (AsyncClient, ["localhost", target])):
        with pytest.raises(ValueError, match=message):
            cls(given)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (50051, TypeError, "found int; expected text such as 'localhost:50051'"),
        (None, TypeError, "found NoneType"),
        ("", ValueError, "found empty text; expected host:port"),
        *(
            (f"{host}:{port}", ValueError, f"found port '{port}' in '{host}:{port}'; expected 1 to 65535")
            for host, ports in (
                ("npu-7", ("115587", "0", "-1", "+1", "", "https", "1/", "1 ", "\u0661")),
                *((host, ("65536",)) for host in ("[::1]", "dns:///npu-7", "ipv4:127.0.0.1:1,127.0.0.2")),
            )
            for port in ports
        ),
        *(
            (target, ValueError, f"found {target!r}; expected host:port, unix:path or dns:///name:port")
            for target in (
                ":1",
                " a:1",
                "a:b:1",
                "[::1",
                "::1]:1",
                "dns:",
                "dns://a:1",
                "/run/socket",
                "50051",
            )
        ),
        *(
            (
                scheme + path,
                ValueError,
                f"found a socket path of {nbytes} bytes in {scheme + path!r}; expected 1 to 107",
            )
            for scheme in ("unix:", "unix://", "unix-abstract:")
            for path, nbytes in (("", 0), ("/" + 125 * "x", 126), ("/x" + 53 * "\u00e9", 108))
        ),
        ("unix:a\0b", ValueError, r"found a null byte in 'unix:a\x00b'; expected a socket path without"),
    ],
)
def test_what_is_no_target_is_told_at_once(target: Any, error: type[Exception], message: str) -> None:
    for cls in (Client, AsyncClient):
        with pytest.raises(error, match="^target: " + re.escape(message)):
            cls(target)


@BOTH
def test_a_server_that_comes_back_is_found_again(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = failures(monkeypatch)
    address = f"unix:{tmp_path / 's'}"
    with make(address, timeout_s=20) as client:
        with fake_service(address=address):
            client.group_norm_backward(**group_norm())
        flying = client.submit.group_norm_backward(**group_norm())
        for _ in range(4):
            assert failed.acquire(timeout=20)
        assert not flying.done(), "it did not wait for the server"
        with fake_service(address=address):
            assert flying.result(30).info.tries > 4


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that names no proxies."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_proxies")
def test_loopback_is_never_asked_of_a_proxy(closed_port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{closed_port}")
    with fake_service() as service, Client(service.address, timeout_s=20) as client:
        client.group_norm_backward(**group_norm())


@PAIRS
@pytest.mark.usefixtures("no_proxies")
def test_an_error_behind_a_proxy_names_it_and_its_variable(
    closed_port: str, monkeypatch: pytest.MonkeyPatch, make: Make, way: int
) -> None:
    """The address in gRPC's own message is one that the caller never gave."""
    monkeypatch.setenv("https_proxy", f"http://me:secret@{closed_port}")
    monkeypatch.setenv("http_proxy", "http://localhost:1")
    expected = (
        rf"^group_norm_backward: cannot reach npu-7.example.org:50051: .*{closed_port}.*; the environment "
        r"variable https_proxy sends connections to npu-7.example.org through the proxy "
        rf"http://{closed_port}; to do without it, add npu-7.example.org to no_proxy \(in lower case\) "
        r"before the client is made$"
    )
    policy = RetryPolicy(retry_for_s=0)
    with pytest.raises(ConnectError, match=expected) as caught:
        call_once(make, "npu-7.example.org", stream_from_bytes=way, retry=policy)
    assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("no_proxies")
def test_a_proxy_that_refuses_or_is_silent_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting does not help against a refusal."""
    named = "; the environment variable http_proxy sends connections to npu-7 through"
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as web, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{web.server_port}")
        with Client("npu-7", timeout_s=0.2) as client, pytest.raises(DeadlineExceeded, match=named):
            client.server_info()
        pool.submit(web.serve_forever, 0.01)
        with Client("npu-7") as client, pytest.raises(ConnectError, match=f"code 403{named}") as caught:
            client.server_info()
        web.shutdown()
    assert caught.value.is_misconfigured


PROXIES = [
    ({"http_proxy": "P"}, "localhost", "http_proxy"),
    ({"https_proxy": "P", "http_proxy": ""}, "localhost", "https_proxy"),
    ({"https_proxy": "", "http_proxy": "P"}, "localhost", ""),
    ({"grpc_proxy": "P", "https_proxy": ""}, "localhost", "grpc_proxy"),
    ({"HTTP_PROXY": "P", "HTTPS_PROXY": "P", "all_proxy": "P"}, "localhost", ""),
    ({"http_proxy": "https://localhost:1"}, "localhost", ""),
    ({"http_proxy": "localhost:1"}, "localhost", ""),
    ({"http_proxy": "P", "NO_PROXY": "localhost"}, "localhost", "http_proxy"),
    *(
        ({"http_proxy": "P", "no_proxy": listed}, host, "" if is_exempt else "http_proxy")
        for host, listed, is_exempt in (
            ("localhost", "localhost", True),
            ("localhost", "other, LOCALHOST ,another", True),
            ("localhost", "", False),
            ("localhost", "*", False),
            ("localhost", "localhost:1", False),
            ("a.localhost", "localhost", True),
            ("a.localhost", ".localhost", True),
            ("a.localhost", "*.localhost", False),
            ("127.0.0.1", "127.0.0.0/8", True),
            ("127.0.0.1", "10.0.0.0/8", False),
            ("127.0.0.1", "127.0.0.1", True),
        )
    ),
    ({"http_proxy": "P", "no_grpc_proxy": "", "no_proxy": "localhost"}, "localhost", "http_proxy"),
    ({"http_proxy": "P", "no_grpc_proxy": "localhost"}, "localhost", ""),
]


@pytest.mark.usefixtures("no_proxies")
def test_the_proxy_that_is_named_is_the_one_that_grpc_asks(
    closed_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked on loopback, where a client of ours would ask none."""
    with fake_service() as service:
        port, apart = service.address.rpartition(":")[2], (("grpc.use_local_subchannel_pool", 1),)
        for variables, host, expected in PROXIES:
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value.replace("P", f"http://{closed_port}"))
                note = _proxy_note(f"{host}:{port}", os.environ)
                assert (f"variable {expected} sends" in note) is bool(expected), (variables, host, note)
                with grpc.insecure_channel(f"{host}:{port}", options=apart) as channel:
                    absent: Any = channel.unary_unary("/absent")
                    with pytest.raises(grpc.RpcError) as caught:
                        absent(b"", timeout=20)
                assert (closed_port in str(caught.value)) is bool(expected), (variables, host, caught.value)


@pytest.mark.parametrize(
    ("target", "is_direct", "is_short"),
    [
        ("localhost:50051", True, True),
        ("127.0.0.1:50051", True, True),
        ("127.1.2.3", True, True),
        ("[::1]:50051", True, True),
        ("dns:///localhost:1", True, True),
        ("ipv4:127.0.0.1:1", True, True),
        ("unix:/run/npugrad.sock", True, True),
        ("unix:///run/npugrad.sock", True, True),
        ("unix-abstract:npugrad", True, True),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", True, False),
        ("ipv4:10.0.0.1:1", False, False),
        ("localhost.example.org:1", False, False),
        ("10.0.0.1:1", False, False),
        ("127.example.org:1", False, False),
        ("unix.example.org:1", False, False),
        ("[2001:db8::1]:1", False, False),
        ("dns:///service.ns:50051", False, False),
    ],
)
def test_other_hosts_may_be_behind_a_proxy_and_little_is_read_ahead_on_this_one_alone(
    target: str, is_direct: bool, is_short: bool
) -> None:
    options = channel_options(target)
    assert (("grpc.enable_http_proxy", 0) in options) is is_direct
    assert (("grpc.http2.bdp_probe", 0) in options) is is_short


@pytest.mark.parametrize(
    ("make", "way", "data"),
    [
        (Client, UNARY, b"\xff\xff"),
        (Looped, UNARY, b"\xff\xff"),
        (Client, STREAMED, b"\xff\xff"),
        (Client, STREAMED, b"\x12\x04\x1a\x09ab"),
    ],
    ids=["no reply", "no reply to a task", "no frame", "half a chunk"],
)
def test_bytes_that_are_no_reply_are_an_error(make: Make, way: int, data: bytes) -> None:
    with (
        fake_service(unary=lambda *_: data, execute=lambda *_: iter([data])) as service,  # type: ignore[arg-type]
        pytest.raises(NpugradError, match=f"{service.address}: INTERNAL: .*deserializ"),
    ):
        call_once(make, service.address, stream_from_bytes=way)
