from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


async def test_callers_that_say_nothing_are_limited_and_harm_no_other() -> None:
    async with served() as (address, _):
        host, _, port = address.rpartition(":")
        silent = [socket.create_connection((host, int(port)), 30) for _ in range(64)]
        with pytest.raises(OSError, match=r"."):  # closed before it is answered, or reset
            await fetched(address, "/livez")
        for caller in silent:
            caller.close()
        for _ in range(1000):  # until their threads have seen it
            try:
                assert (await fetched(address, "/livez"))[0] == 200
            except OSError:
                continue
            return
        pytest.fail("nobody is answered any more")


async def test_taken_port_is_named() -> None:
    async with served() as (address, pages):
        with pytest.raises(AddressError, match=f"cannot serve metrics on {address}: Address already in use"):
            serve_pages(pages, Address("127.0.0.1", int(address.rpartition(":")[2])))
