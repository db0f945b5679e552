from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

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


def visit(act: Callable[[str, Pages], None], *, hung: bool = False) -> None:
    """Calls something with the address of real pages, and with them; on the loop itself if it is to hang."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        metrics = Metrics("1", "atlas-a2")
        metrics.show_pool(Pool(), loop)
        pages = Pages(metrics.registry, loop, 0.1 if hung else 30)
        address, close = serve_pages(pages, LOOPBACK)
        try:
            if hung:
                act(str(address), pages)
            else:
                await asyncio.to_thread(act, str(address), pages)
        finally:
            await asyncio.to_thread(close)

    asyncio.run(run())


DEVICES = "npu:0 down, aclInit failed; npu:1 starting\n"


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        (None, (200, "ok\n"), (503, "starting\n")),
        (State(), (200, "ok\n"), (200, "ok\n")),
        (State(is_serving=False), (200, "ok\n"), (503, f"no device is ready: {DEVICES}")),
        (State(is_serving=False, is_draining=True), (200, "ok\n"), (503, "draining\n")),
        (
            State(is_serving=False, is_alive=False),
            (503, f"no device has been ready for too long: {DEVICES}"),
            (503, f"no device is ready: {DEVICES}"),
        ),
    ],
)
def test_probes_are_told_the_state_and_why(
    state: State | None, live: tuple[int, str], ready: tuple[int, str]
) -> None:
    def act(address: str, pages: Pages) -> None:
        if state is not None:
            pages.show_state(state, Pool())
        assert fetch_page(address, "/livez")[:2] == live
        assert fetch_page(address, "/readyz")[:2] == ready

    visit(act)


def test_loop_that_hangs_fails_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called on the loop itself, which so can answer nobody until the answers are there."""
    monkeypatch.setattr("npugrad_server.collectors.SNAPSHOT_TIMEOUT_S", 0.1)

    def act(address: str, pages: Pages) -> None:
        pages.show_state(State(), Pool())
        for path in PATHS:
            assert fetch_page(address, path)[:2] == (503, "the event loop did not answer within 0.1 s\n")

    visit(act, hung=True)


@pytest.mark.parametrize("path", ["/", "/healthz", "/favicon.ico", "/livez/", "/metrics/x"])
def test_other_paths_are_not_found(path: str) -> None:
    def act(address: str, pages: Pages) -> None:
        assert fetch_page(address, path)[:2] == (404, "the pages are /metrics, /livez, /readyz\n")

    visit(act)


def test_pages_are_read_and_nothing_else() -> None:
    def act(address: str, pages: Pages) -> None:
        for path in PATHS:
            status, body, headers = fetch_page(address, f"{path}?verbose=1")
            assert headers["Content-Type"].startswith("text/plain")
            told, nothing, same = fetch_page(address, path, "HEAD")
            assert (told, nothing) == (status, "")
            # Numbers on the page of metrics grow by a digit now and then.
            most = 64 if path == "/metrics" else 0
            assert abs(int(same["Content-Length"]) - int(headers["Content-Length"])) <= most
            assert int(headers["Content-Length"]) == len(body)
            status, _, headers = fetch_page(address, path, "POST")
            assert (status, headers["Allow"]) == (405, "GET, HEAD")

    visit(act)


def test_callers_that_say_nothing_are_limited_and_harm_no_other() -> None:
    def act(address: str, pages: Pages) -> None:
        host, _, port = address.rpartition(":")
        silent = [socket.create_connection((host, int(port)), 30) for _ in range(64)]
        with pytest.raises(OSError, match=r"."):  # closed before it is answered, or reset
            fetch_page(address, "/livez")
        for caller in silent:
            caller.close()
        for _ in range(1000):  # until their threads have seen it
            try:
                assert fetch_page(address, "/livez")[0] == 200
            except OSError:
                continue
            return
        pytest.fail("nobody is answered any more")

    visit(act)


def test_taken_port_is_named() -> None:
    def act(address: str, pages: Pages) -> None:
        with pytest.raises(AddressError, match=f"cannot serve metrics on {address}: Address already in use"):
            serve_pages(pages, Address("127.0.0.1", int(address.rpartition(":")[2])))

    visit(act)
