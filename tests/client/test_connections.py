"""Clients that are closed, forked, or have lost their server; odd targets, sockets and proxies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.client.fake_service import (
    STREAMED,
    UNARY,
    Context,
    Gate,
    fake_service,
    group_norm,
    stream_zeros,
    zeros,
)

from npugrad_client import Cancelled, Client, ConnectError, NpugradError, TransportError
from npugrad_client._channels import channel_options
from npugrad_client._transport import _OPEN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npugrad.spec import OpSpec

WAYS = pytest.mark.parametrize("stream_from_bytes", [UNARY, STREAMED], ids=["unary", "streamed"])


# --------------------------------------------------------------------------------------- closed and forked


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

    def unary(spec: OpSpec, request: Any, context: Context) -> Any:
        gate.hold()
        return zeros(spec, request, context)

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        gate.hold()
        yield from stream_zeros(frames, context)

    with fake_service(unary, execute) as service, ThreadPoolExecutor(1) as pool:
        client = Client(service.address, timeout_s=30, stream_from_bytes=stream_from_bytes)
        flying = pool.submit(client.group_norm_backward, **group_norm())
        gate.wait_for_call()
        client.close()
        with pytest.raises(Cancelled, match="group_norm_backward"):
            flying.result(20)
        gate.open()


FORKS = {
    # What the parent does before the fork, the environment, and what the child sees.
    "inherited": ("", {}, "use inherited", "another process opened"),
    "new": ("", {}, "use new", "forked while a client for"),
    "new, the parent's was closed": ("client.close()", {}, "use new", "ok"),
    "new, the parent's was collected": ("del client", {}, "use new", "ok"),
    "new, with gRPC's support": ("", {"GRPC_ENABLE_FORK_SUPPORT": "1"}, "use new", "ok"),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.parametrize(("before", "environment", "act", "expected"), FORKS.values(), ids=FORKS)
def test_a_fork_is_an_error_where_it_would_be_a_hang(
    before: str, environment: dict[str, str], act: str, expected: str
) -> None:
    """In a process of its own: forking the test runner would fork its servers' threads as well."""
    program = f"""
        import os, sys
        import numpy as np
        from npugrad_client import Client
        client = Client(sys.argv[1], timeout_s=20)
        one = np.ones((1, 1), np.float32)
        operands = dict(grad_out=one, input=one, mean=one, rstd=one, n=1, c=1, hxw=1, group=1,
                        output_mask=(True, True, True))
        client.group_norm_backward(**operands)
        {before}
        child = os.fork()
        if child == 0:
            try:
                used = client if {act == "use inherited"} else Client(sys.argv[1], timeout_s=20)
                used.group_norm_backward(**operands)
                print("ok", flush=True)
            except BaseException as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    with fake_service() as service:
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), service.address]
        ran = subprocess.run(
            command, env=clean | environment, capture_output=True, text=True, timeout=60, check=True
        )
    assert expected in ran.stdout


def test_threads_may_open_and_close_clients_at_once() -> None:
    def open_some(number: int) -> None:
        for _ in range(200):
            Client(f"127.0.0.1:{number + 1}").close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(open_some, range(8)))
    assert not [target for _, target in _OPEN.values() if target in {f"127.0.0.1:{n + 1}" for n in range(8)}]


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
