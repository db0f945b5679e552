"""Places of calls in progress, which tenants share by weight.

When all are taken, the tenant with the most for its weight gives one up to a call of a tenant that stays
below that, as in the queue: its youngest call that still waits for its caller, or else its youngest one.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from npugrad.errors import ServerBusy
from npugrad_server.pool.quotas import Quotas
from npugrad_server.pool.tenant import Tenant
from npugrad_server.rpc.identity import address_of
from npugrad_server.rpc.rpc_call import RpcCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from npugrad_server.rpc.front_memory import FrontMemory

_RETRY_AFTER_S = 1.0
_LATE = grpc.StatusCode.DEADLINE_EXCEEDED


class OpenCalls:
    """The calls in progress that have a place; used on the event loop only.

    Attributes:
        memory: The memory of these calls.
    """

    def __init__(self, memory: FrontMemory) -> None:
        """Starts without calls.

        Args:
            memory: Has the number of places, and counts who got none.
        """
        self.memory, self._quotas = memory, Quotas()
        self._calls: dict[asyncio.Task[Any] | None, RpcCall] = {}

    def enter(self, call: RpcCall) -> None:
        """Takes a place, until `leave`; another tenant's call may be ended for it.

        Raises:
            ServerBusy: QUEUE_FULL, no other tenant has more for its weight.
        """
        if len(self._calls) >= self.memory.limits.calls:
            self._make_room(call)
        self._calls[call.task] = call
        self._quotas.enter(call.tenant, 0)

    def calls(self) -> list[RpcCall]:
        """Those that have a place."""
        return list(self._calls.values())

    def leave(self, call: RpcCall) -> None:
        """The call has its answer, or lost its place already."""
        if self._calls.pop(call.task, None) is not None:
            self._quotas.leave(self._quotas.uses[call.tenant.name], 0, waits=True)

    def _make_room(self, call: RpcCall) -> None:
        over = self._quotas.over_share_of_places(call.tenant)
        self.memory.refused["slot"] += 1
        if not over:
            raise self._busy(call, "")
        youngest = [found for found in reversed(self._calls.values()) if found.tenant.name == over[0].name]
        last = next((found for found in youngest if not found.reply_bytes), youngest[0])
        busy = self._busy(last, "ended for a call of another tenant: ")
        self.leave(last)
        if last.failure is None:
            last.end(busy)

    def _busy(self, call: RpcCall, event: str) -> ServerBusy:
        limit, use = self.memory.limits.calls, self._quotas.uses.get(call.tenant.name)
        own = 0 if use is None else use.call_count
        return ServerBusy(
            f"{call.operator or call.method}: {event}found {limit} calls in progress, {own} of them of this "
            f"tenant; expected fewer than {limit}, or others with more for their weight (setting max_calls)",
            retry_after_s=_RETRY_AFTER_S,
            operator=call.operator,
        )

    @asynccontextmanager
    async def reading(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        method: str,
        busy: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED,
    ) -> AsyncIterator[None]:
        """A place, and memory, for reading a message of an RPC that no funnel sees.

        Its address counts as its tenant. The RPC ends with DEADLINE_EXCEEDED if the message takes too long.

        Args:
            context: gRPC's side of it.
            method: Its name.
            busy: What the RPC ends with if there is no place or no memory, or if it loses its place.
        """
        memory, tenant = self.memory, Tenant(address_of(context))
        call = RpcCall(context, method, "", tenant, task=asyncio.current_task(), memory=memory)
        try:
            self.enter(call)
            nbytes = memory.limits.message_bytes
            if not memory.arrive(call, nbytes):
                await memory.wait_for_room(call, nbytes)
            call.reading_s = time.monotonic()
            yield
        except ServerBusy as error:
            call.failure = error
        except asyncio.CancelledError:
            if not call.was_ended():
                raise
        finally:
            self.leave(call)
            memory.release(call)
        if call.failure is not None:
            await context.abort(busy if isinstance(call.failure, ServerBusy) else _LATE, str(call.failure))
