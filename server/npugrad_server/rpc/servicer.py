"""BackwardService: a unary RPC for each operator, and Execute."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from npugrad.codec import CHUNK_BYTES
from npugrad_server.rpc.funnel import sane
from npugrad_server.rpc.headers import header_decoder
from npugrad_server.rpc.register import frame_deserializer, tolerant_deserializer
from npugrad_server.rpc.streaming import Execute

if TYPE_CHECKING:
    from npugrad.operator import OpRecord
    from npugrad_server.dispatch import Dispatcher
    from npugrad_server.rpc.funnel import Funnel, RpcCall
    from npugrad_server.rpc.pace import PaceLimits
    from npugrad_server.rpc.register import Deserializer, Handler, Serializer


class BackwardServicer:
    """Runs the operators.

    Attributes:
        deserializers: For `register`: requests stay serialized, because most are recognised without parsing.
        serializers: For `register`.
    """

    def __init__(self, dispatcher: Dispatcher, *, upload: PaceLimits, reply: PaceLimits) -> None:
        registry = dispatcher.registry
        self._dispatcher = dispatcher
        parse = frame_deserializer(registry.execute_request)
        self._execute = Execute(dispatcher, upload, reply)
        rpcs = [record.rpc for record in registry.records.values()]
        self.deserializers: dict[str, Deserializer] = dict.fromkeys(rpcs, bytes)
        self.deserializers["Execute"] = header_decoder(registry, parse)
        self.serializers: dict[str, Serializer] = dict.fromkeys(rpcs, bytes)

    def handlers(self, funnel: Funnel) -> dict[str, Handler]:
        """Every method for `register`."""
        registry = self._dispatcher.registry
        unary = {
            record.rpc: funnel.unary(
                record.rpc, partial(self._call, record, tolerant_deserializer(registry.requests[name]))
            )
            for name, record in registry.records.items()
        }
        return {**unary, "Execute": funnel.stream("Execute", self._execute)}

    async def _call(self, record: OpRecord, parse: Deserializer, data: bytes, call: RpcCall) -> bytes:
        def read() -> Any:
            message = sane(parse(data), record.name)
            call.operator = record.name
            return message

        if len(data) >= CHUNK_BYTES:
            await asyncio.sleep(0)  # gRPC took a while to copy it
        request = self._dispatcher.planner.plan(
            record,
            data,
            read,
            request_id=call.request_id,
            timeout_s=call.timeout_s,
            chunked=False,
            marks=call.marks,
            tenant=call.tenant,
        )
        call.operator = record.name
        call.describe(request.plan.call)
        call.received_bytes = request.known.content_bytes
        call.memory.hold_reply(call, request.known.reply_bytes)
        reply, call.info = await self._dispatcher.call_whole(request)
        call.sent_bytes = request.known.reply_bytes
        return reply
