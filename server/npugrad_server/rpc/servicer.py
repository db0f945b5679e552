"""BackwardService: one line for each operator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from npugrad.ops import get_operator
from npugrad_server.rpc.streaming import Execute

if TYPE_CHECKING:
    from npugrad_server.dispatch import Dispatcher
    from npugrad_server.rpc.funnel import Funnel, RpcCall
    from npugrad_server.rpc.register import Handler

UNARY_RPCS = {
    "MultiScaleDeformableAttentionGrad": "multi_scale_deformable_attention_grad",
    "GridSampler2DBackward": "grid_sampler_2d_backward",
    "GroupNormBackward": "group_norm_backward",
    "FusedFloydAttentionGrad": "fused_floyd_attention_grad",
}
"""The operator that each unary RPC runs."""


class BackwardServicer:
    """Runs the operators."""

    def __init__(
        self, dispatcher: Dispatcher, *, upload_idle_timeout_s: float, reply_idle_timeout_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._execute = Execute(dispatcher, upload_idle_timeout_s, reply_idle_timeout_s)

    def handlers(self, funnel: Funnel) -> dict[str, Handler]:
        """Every method for `register`."""
        unary = {rpc: funnel.unary(rpc, partial(self._call, name)) for rpc, name in UNARY_RPCS.items()}
        return {**unary, "Execute": funnel.stream("Execute", self._execute)}

    async def _call(self, operator: str, message: Any, call: RpcCall) -> Any:
        call.operator = operator
        request = self._dispatcher.plan(
            get_operator(operator),
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
