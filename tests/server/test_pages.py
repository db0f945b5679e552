from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from tests.fix_server import fetch_page

from npugrad_server.addresses import Address, AddressError
from npugrad_server.metrics import Metrics
from npugrad_server.pages import Pages, serve_pages
from npugrad_server.pool import DeviceState, DeviceStatus, PoolStats

LOOPBACK = Address("127.0.0.1", 0)
PATHS = ("/metrics", "/livez", "/readyz")


@dataclass(frozen=True)
class State:
    """What probes ask for."""

    is_serving: bool = True
    is_draining: bool = False
    is_alive: bool = True


class Pool:
    """A pool whose devices are down."""

    def stats(self) -> PoolStats:
        return PoolStats(0, 0, 0, 0, 0, 0, 0, 0, 0)

    def devices(self) -> tuple[DeviceStatus, ...]:
        return (
            DeviceStatus("npu:0", "npu", "", False, DeviceState.DOWN, 4, "aclInit failed"),
            DeviceStatus("npu:1", "npu", "", False, DeviceState.STARTING, 0, ""),
        )


@asynccontextmanager
async def served(timeout_s: float = 30) -> AsyncIterator[tuple[str, Pages]]:
    """The address of real pages, and the pages."""
    loop = asyncio.get_running_loop()
    metrics = Metrics("1", "atlas-a2")
    metrics.show_pool(Pool(), loop)
    pages = Pages(metrics.registry, loop, timeout_s)
    address, close = serve_pages(pages, LOOPBACK)
    try:
        yield str(address), pages
    finally:
        await asyncio.to_thread(close)


async def fetched(address: str, *how: str) -> tuple[int, str, Any]:
    return await asyncio.to_thread(fetch_page, address, *how)


DEVICES = "npu:0 down, aclInit failed; npu:1 starting\n"


async def test_probes_are_told_the_state_and_why() -> None:
    fine, nothing_ready = (200, "ok\n"), (503, f"no device is ready: {DEVICES}")
    async with served() as (address, pages):
        for state, live, ready in (
            (None, fine, (503, "starting\n")),
            (State(), fine, fine),
            (State(is_serving=False), fine, nothing_ready),
            (State(is_serving=False, is_draining=True), fine, (503, "draining\n")),
            (
                State(is_serving=False, is_alive=False),
                (503, f"no device has been ready for too long: {DEVICES}"),
                nothing_ready,
            ),
        ):
            if state is not None:
                pages.show_state(state, Pool())
            assert (await fetched(address, "/livez"))[:2] == live
            assert (await fetched(address, "/readyz"))[:2] == ready


async def test_loop_that_hangs_fails_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called on the loop itself, which so can answer nobody until the answers are there."""
    monkeypatch.setattr("npugrad_server.collectors.SNAPSHOT_TIMEOUT_S", 0.1)
    async with served(0.1) as (address, pages):
        pages.show_state(State(), Pool())
        for path in PATHS:
            assert fetch_page(address, path)[:2] == (503, "the event loop did not answer within 0.1 s\n")


async def test_pages_are_read_and_nothing_else_and_other_paths_are_not_found() -> None:
    async with served() as (address, _):
        for path in PATHS:
            status, body, headers = await fetched(address, f"{path}?verbose=1")
            assert headers["Content-Type"].startswith("text/plain")
            told, nothing, same = await fetched(address, path, "HEAD")
            assert (told, nothing) == (status, "")
            # Numbers on the page of metrics grow by a digit now and then.
            most = 64 if path == "/metrics" else 0
            assert abs(int(same["Content-Length"]) - int(headers["Content-Length"])) <= most
            assert int(headers["Content-Length"]) == len(body)
            status, _, headers = await fetched(address, path, "POST")
            assert (status, headers["Allow"]) == (405, "GET, HEAD")
        for path in ("/", "/healthz", "/favicon.ico", "/livez/", "/metrics/x"):
            found = (await fetched(address, path))[:2]
            assert found == (404, "the pages are /metrics, /livez, /readyz\n"), path


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 30)


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /livez HTTP/1.1\r\nX: ", b"GET /metrics HTTP/1.0\r\n\r\n"])
async def test_slow_callers_keep_no_probe_out(sent: bytes) -> None:
    async with served() as (address, pages):
        pages.show_state(State(), Pool())
        with ExitStack() as slow:
            for _ in range(64 + 6):
                caller = slow.enter_context(_connected(address))
                caller.sendall(sent)
            for _ in range(3):
                for path in PATHS:
                    assert (await fetched(address, path))[0] == 200


async def test_a_request_has_a_limit_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npugrad_server.pages._CALLER_LIMIT_S", 0.3)
    async with served() as (address, _):
        with _connected(address) as caller:
            caller.setblocking(False)
            loop = asyncio.get_running_loop()
            with suppress(ConnectionError):  # until the server ends it, which sees bytes all the time
                while not (ended := loop.create_task(loop.sock_recv(caller, 1))).done():
                    await loop.sock_sendall(caller, b"G")
                    await asyncio.wait([ended], timeout=0.05)


async def test_no_more_than_the_head_of_a_request_is_read() -> None:
    async with served() as (address, pages):
        pages.show_state(State(), Pool())
        with _connected(address) as caller:
            # No end of the headers: it is answered once there are too many bytes of them.
            lines = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(20))
            await asyncio.to_thread(caller.sendall, b"GET /livez HTTP/1.0\r\n" + lines)
            answer = await asyncio.to_thread(caller.recv, 100)
        assert answer.startswith(b"HTTP/1.0 200 OK")


async def test_taken_port_is_named() -> None:
    async with served() as (address, pages):
        with pytest.raises(AddressError, match=f"cannot serve metrics on {address}: Address already in use"):
            serve_pages(pages, Address("127.0.0.1", int(address.rpartition(":")[2])))
