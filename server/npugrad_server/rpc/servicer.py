"""BackwardService: a unary RPC for each operator, and Execute."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from npugrad_server.rpc.streaming import Execute

if TYPE_CHECKING:
    from npugrad.operator import OpRecord
    from npugrad_server.dispatch import Dispatcher
    from npugrad_server.rpc.funnel import Funnel, RpcCall
    from npugrad_server.rpc.register import Handler


class BackwardServicer:
    """Runs the operators."""

    def __init__(
        self, dispatcher: Dispatcher, *, upload_idle_timeout_s: float, reply_idle_timeout_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._execute = Execute(dispatcher, upload_idle_timeout_s, reply_idle_timeout_s)

    def handlers(self, funnel: Funnel) -> dict[str, Handler]:
        """Every method for `register`."""
        records = self._dispatcher.registry.records.values()
        unary = {record.rpc: funnel.unary(record.rpc, partial(self._call, record)) for record in records}
        return {**unary, "Execute": funnel.stream("Execute", self._execute)}

    async def _call(self, record: OpRecord, message: Any, call: RpcCall) -> Any:
        call.operator = record.name
        request = self._dispatcher.plan(
            record,
            message,
            request_id=call.request_id,
            timeout_s=call.timeout_s,
            chunked=False,
        )
        call.describe(request.planned.call)
        call.received_bytes = request.content_bytes
        response, call.info = await self._dispatcher.call(request)
        call.sent_bytes = sum(meta.nbytes for meta in request.planned.outputs.values() if meta is not None)
        return response
