"""The pages of the metrics port: ``/metrics`` for Prometheus, ``/livez`` and ``/readyz`` for HTTP probes.

A probe page answers 200, or 503 with one line that says why. Threads serve the pages, but each page queries
the event loop: a server whose loop hangs fails its probes, even if its threads still run.
"""

from __future__ import annotations

import io
import socket
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from npugrad_server.addresses import Address, AddressError
from npugrad_server.collectors import PoolFigures, ask
from npugrad_server.logs import get_logger

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from _typeshed.wsgi import StartResponse, WSGIEnvironment
    from prometheus_client import CollectorRegistry

LIVEZ, READYZ = "/livez", "/readyz"
PROBE_TIMEOUT_S = 2.0
"""Seconds a probe waits for the event loop: less than a prober waits, so that it learns the reason."""
_CALLER_LIMIT_S = 10.0
"""Seconds for a caller to send its whole request and read the answer."""
_MAX_CALLERS = 64
"""Callers at once; the next one takes the place of the oldest that is sending or reading, so that slow ones
cannot keep probes out, and no number of them exhausts memory and files."""
_SCRAPES = 4
"""Answers to others than probes that are made at once."""
_MAX_HEAD_BYTES = 16 << 10
"""Bytes of a request that are read."""
_CALLER = "npugrad.caller"
"""Where a request's environment has its `_Caller`."""
_TEXT = ("Content-Type", "text/plain; charset=utf-8")


class Condition(Protocol):
    """The server state that probes report."""

    @property
    def is_serving(self) -> bool:
        """Whether calls are served now."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the server needs no restart."""
        ...


class Pages:
    """The pages of the metrics port.

    Thread safety: made and changed on the event loop, called as a WSGI application from any thread.
    """

    def __init__(
        self, registry: CollectorRegistry, loop: asyncio.AbstractEventLoop, timeout_s: float = PROBE_TIMEOUT_S
    ) -> None:
        """Starts as alive and not ready.

        Args:
            registry: What ``/metrics`` shows.
            loop: The server's event loop.
            timeout_s: Seconds a probe waits for the loop.
        """
        self._loop, self._timeout_s = loop, timeout_s
        self._state: tuple[Condition, PoolFigures] | None = None
        self._pages: dict[str, Callable[..., Iterable[bytes]]] = {
            "/metrics": make_wsgi_app(registry),
            LIVEZ: partial(self._probe, self._why_not_alive),
            READYZ: partial(self._probe, self._why_not_ready),
        }

    def show_state(self, condition: Condition, pool: PoolFigures) -> None:
        """From now on, answers probes by the state of the server."""
        self._state = condition, pool

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answers GET and HEAD requests for the pages."""
        method, page = environ["REQUEST_METHOD"], self._pages.get(environ["PATH_INFO"])
        if page is None:
            return _say(start_response, "404 Not Found", f"the pages are {', '.join(self._pages)}")
        if method not in ("GET", "HEAD"):
            found = f"found {method}; expected GET or HEAD"
            return _say(start_response, "405 Method Not Allowed", found, ("Allow", "GET, HEAD"))
        answers: list[tuple[Any, ...]] = []
        try:
            body = b"".join(
                page({**environ, "REQUEST_METHOD": "GET"}, lambda *answer: answers.append(answer))
            )
        except TimeoutError as error:
            return _say(start_response, "503 Service Unavailable", str(error))
        status, headers = answers[0]
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body] if method == "GET" else []

    def _probe(self, why_not: Callable[[], str], _: WSGIEnvironment, respond: StartResponse) -> list[bytes]:
        problem = ask(self._loop, why_not, self._timeout_s)
        return _say(respond, "503 Service Unavailable" if problem else "200 OK", problem or "ok")

    def _why_not_ready(self) -> str:
        if self._state is None:
            return "starting"
        condition, pool = self._state
        if condition.is_serving:
            return ""
        return "draining" if condition.is_draining else f"no device is ready: {_devices(pool)}"

    def _why_not_alive(self) -> str:
        if self._state is None or self._state[0].is_alive:
            return ""
        return f"no device has been ready for too long: {_devices(self._state[1])}"


def serve_pages(pages: Pages, address: Address) -> tuple[Address, Callable[[], None]]:
    """Serves the pages from threads.

    Args:
        pages: What to show.
        address: Where to listen; port 0 takes a free one.

    Returns:
        The bound address, and a function that stops serving.

    Raises:
        AddressError: The address cannot be bound.
    """
    try:
        server = _Server(address)
    except OSError as error:
        raise AddressError(f"cannot serve metrics on {address}: {error.strerror or error}") from None
    server.serve(pages)
    thread = threading.Thread(target=server.serve_forever, name="pages", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return address.with_port(server.server_port), close


@dataclass(eq=False)
class _Caller:
    """One connection.

    Attributes:
        begun_s: When it was accepted.
        is_answered: Whether its answer is being made: such a caller keeps its place.
        is_ended: Whether it was ended before its answer.
    """

    connection: socket.socket
    begun_s: float = field(default_factory=time.monotonic)
    is_answered: bool = False
    is_ended: bool = False

    def end(self) -> None:
        """Ends the connection; its thread notices."""
        self.is_ended = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class _Head(io.BufferedReader):
    """A request; lines beyond its limit are not there."""

    _left = _MAX_HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        limit = self._left if size is None or size < 0 else min(size, self._left)
        line = super().readline(limit)
        self._left -= len(line)
        return line


class _Handler(WSGIRequestHandler):
    timeout = _CALLER_LIMIT_S

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile.detach())

    def get_environ(self) -> dict[str, Any]:
        return {**super().get_environ(), _CALLER: cast("_Server", self.server).callers[self.connection]}

    def log_message(self, format: str, *args: Any) -> None:  # the library chose the name
        """Logs nothing: a probe every few seconds is not an event."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = _MAX_CALLERS
    allow_reuse_port = False  # some versions of Python would let two servers share a port, and its scrapes

    def __init__(self, address: Address) -> None:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family = found[0][0]
        self.callers: dict[socket.socket, _Caller] = {}
        self._lock = threading.Lock()
        super().__init__((str(found[0][4][0]), address.port), _Handler)

    def serve(self, pages: Pages) -> None:
        """Serves the pages from now on."""
        at_once = threading.BoundedSemaphore(_SCRAPES)

        def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            caller: _Caller = environ[_CALLER]
            with nullcontext() if environ["PATH_INFO"] in (LIVEZ, READYZ) else at_once:
                caller.is_answered = True
                try:
                    if caller.is_ended:
                        return _say(start_response, "503 Service Unavailable", "too many callers")
                    return pages(environ, start_response)
                finally:
                    caller.is_answered = False

        self.set_app(answer)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # out of files: the caller still waits, and retrying at once would use up a core
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_room = len(self.callers) < _MAX_CALLERS or self._make_room()
            if is_room:
                self.callers[request] = _Caller(request)
        if not is_room:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            del self.callers[request]

    def _make_room(self) -> bool:
        """Ends the caller that has been sending or reading for longest, if there is one."""
        for caller in self.callers.values():
            if not caller.is_answered and not caller.is_ended:
                caller.end()
                return True
        return False

    def service_actions(self) -> None:
        """Ends callers that take too long; the library calls it twice a second."""
        oldest_s = time.monotonic() - _CALLER_LIMIT_S
        with self._lock:
            for caller in self.callers.values():
                if caller.begun_s < oldest_s and not caller.is_ended:
                    caller.end()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs callers that disconnect or stay silent; the library would print a traceback."""
        get_logger().debug("metrics caller", peer=str(client_address), error=repr(sys.exc_info()[1]))


def _say(respond: StartResponse, status: str, text: str, *headers: tuple[str, str]) -> list[bytes]:
    respond(status, [_TEXT, *headers])
    return [f"{text}\n".encode()]


def _devices(pool: PoolFigures) -> str:
    """Every device's state, and its reason if there is one."""
    return "; ".join(f"{d.name} {d.state}" + (f", {d.reason}" if d.reason else "") for d in pool.devices())
