"""grpc.health.v1 and reflection.

While the server is not draining, ``""`` and every npugrad service are SERVING when some device is ready, and
``npugrad.v1.BackwardService/group_norm_backward``, and so on for each operator, when a ready device runs it.
As long as the event loop answers, ``"liveness"`` is SERVING, unless there is a limit and no device has been
ready for longer: then a supervisor may restart the process.

The library's servicer is not used: it writes to a watcher while it holds the lock that a change of status
needs, so that one client that does not read could hold up a drain, and its watchers never end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from npugrad_server.pool import DeviceState
from npugrad_server.rpc.front_memory import FrontMemory
from npugrad_server.rpc.identity import ARRIVED_BY
from npugrad_server.rpc.open_calls import OpenCalls
from npugrad_server.rpc.register import Garbage, register

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from google.protobuf.descriptor import ServiceDescriptor

    from npugrad_server.pool import DeviceStatus
    from npugrad_server.rpc.transport import GrpcServers

    Context = grpc.aio.ServicerContext[Any, Any]

LIVENESS = "liveness"
"""Service name of the process itself."""
WATCHES = 2
"""Watch streams of one connection; a client has one for each service that it watches."""
UNIX_WATCHES = 1024
"""Watch streams of all connections to a Unix socket, which gRPC does not tell apart."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """State of the server for probes and load balancers.

    Thread safety: use on the event loop only.
    """

    def __init__(
        self,
        services: Iterable[str],
        down_limit_s: float | None = None,
        operators: Mapping[str, str] = MappingProxyType({}),
        places: OpenCalls | None = None,
    ) -> None:
        """Starts as not serving, but alive.

        Args:
            services: Full names of the services that need a device.
            down_limit_s: Seconds without a ready device after which the process is not alive, once a device
                has been ready; the start has its own limits. None for never.
            operators: Operator by the service name it is checked under.
            places: Where Check and Watch take a place while their message comes; unbounded if None.
        """
        self._services, self._operators = ("", *services), operators
        self._status = dict.fromkeys((*self._services, *operators), _NOT_SERVING) | {LIVENESS: _SERVING}
        self._down_limit_s = down_limit_s
        self._was_ready = False
        self._expiry: asyncio.TimerHandle | None = None
        self._draining = False
        self._closed = False
        self._changed = asyncio.Event()
        self._places = places or OpenCalls(FrontMemory())
        self._watches = Counter[str]()

    def update(self, devices: Iterable[DeviceStatus]) -> None:
        """Updates the statuses from the states of the devices."""
        lacking = [device.unavailable for device in devices if device.state is DeviceState.READY]
        self._was_ready = self._was_ready or bool(lacking)
        self._set(self._services, bool(lacking))
        for name, operator in self._operators.items():
            self._set([name], any(operator not in unavailable for unavailable in lacking))
        self._limit(bool(lacking))

    def start_draining(self) -> None:
        """Reports not serving from now on, whatever the devices do; liveness stays as it is."""
        self._draining = True
        self._set((*self._services, *self._operators), False)
        self._stop_waiting()

    def close(self) -> None:
        """Ends all watchers."""
        self._closed = True
        self._stop_waiting()
        self._wake()

    @property
    def is_serving(self) -> bool:
        """Whether calls are served now."""
        return self._status[""] == _SERVING

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._draining

    @property
    def is_alive(self) -> bool:
        """Whether the server needs no restart: a device is ready, or was within the limit."""
        return self._status[LIVENESS] == _SERVING

    def _limit(self, ready: bool) -> None:
        """Starts or stops timing how long no device is ready."""
        if ready:
            self._stop_waiting()
            self._set_alive(_SERVING)
        elif self._was_ready and self._down_limit_s is not None and not (self._expiry or self._draining):
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._down_limit_s, self._set_alive, _NOT_SERVING)

    def _stop_waiting(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _set(self, names: Iterable[str], is_served: bool) -> None:
        self._change(names, _SERVING if is_served and not self._draining else _NOT_SERVING)

    def _set_alive(self, status: Any) -> None:
        self._change([LIVENESS], status)

    def _change(self, names: Iterable[str], status: Any) -> None:
        for name in names:
            if self._status[name] != status:
                self._status[name] = status
                self._wake()

    def _wake(self) -> None:
        # Waiters on the old event see this change; the next change gets a new event.
        self._changed.set()
        self._changed = asyncio.Event()

    async def check(self, _: Any, context: Context) -> health_pb2.HealthCheckResponse:
        """Answers at once; NOT_FOUND for an unknown name."""
        async with self._places.reading(context, "Check"):
            request = await context.read()
        name = await _service(request, context)
        if name not in self._status:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._status[name])

    async def watch(self, _: Any, context: Context) -> None:
        """Answers at once and at every change, until the server ends; at most `WATCHES` per connection."""
        peer = ARRIVED_BY.get() or context.peer()
        found, most = self._watches[peer], WATCHES if peer.startswith("ip") else UNIX_WATCHES
        if found >= most:
            # To gRPC's clients, this status means a healthy server, and any other a dead one.
            text = f"Watch: found {found} Watch streams on this connection; expected at most {most}"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{text}: use Check")
        self._watches[peer] += 1
        try:
            async with self._places.reading(context, "Watch", grpc.StatusCode.UNIMPLEMENTED):
                request = await context.read()
                name = await _service(request, context)
                # From its end on, a client cannot send what nobody would read.
                await _service(request if await context.read() is grpc.aio.EOF else grpc.aio.EOF, context)
            await self._watch(name, context)
        finally:
            self._watches[peer] -= 1
            if not self._watches[peer]:
                del self._watches[peer]

    async def _watch(self, name: str, context: Context) -> None:
        last = None
        while True:
            changed, status = self._changed, self._status.get(name, _UNKNOWN)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status  # it may have changed during the write
            elif self._closed:
                return
            else:
                await changed.wait()

    async def list(self, _: Any, context: Context) -> Any:
        """The status of every service."""
        async with self._places.reading(context, "List"):
            await context.read()  # gRPC would keep what came of it
        answers = {
            name: health_pb2.HealthCheckResponse(status=status) for name, status in self._status.items()
        }
        return health_pb2.HealthListResponse(statuses=answers)  # type: ignore[attr-defined]


async def _service(request: Any, context: Context) -> str:
    if request is grpc.aio.EOF or isinstance(request, Garbage):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected grpc.health.v1.HealthCheckRequest")
    return str(request.service)


def register_health(server: grpc.aio.Server | GrpcServers, health: Health) -> str:
    """Adds grpc.health.v1 and returns the service's name."""
    service: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]  # type: ignore[assignment]
    # Older versions of the library have no List.
    offered = {"Check": health.check, "Watch": health.watch, "List": health.list}
    register(server, service, {name: offered[name] for name in service.methods_by_name})
    return str(service.full_name)


class _Reflection:
    """The library's servicer, with places and memory for reading each message."""

    def __init__(self, services: Iterable[str], places: OpenCalls) -> None:
        self._servicer: Any = reflection.aio.ReflectionServicer(services)
        self._places = places

    async def ServerReflectionInfo(self, requests: Any, context: Context) -> AsyncIterator[Any]:
        async for answer in self._servicer.ServerReflectionInfo(self._read(context), context):
            yield answer

    async def _read(self, context: Context) -> AsyncIterator[Any]:
        while True:
            async with self._places.reading(context, "ServerReflectionInfo"):
                request = await context.read()
            if request is grpc.aio.EOF:
                return
            yield request


def register_reflection(
    server: grpc.aio.Server | GrpcServers, services: Iterable[str], places: OpenCalls
) -> None:
    """Adds server reflection for services and for itself; each message takes a place until it is read."""
    add: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
    add(_Reflection((*services, reflection.SERVICE_NAME), places), server)
