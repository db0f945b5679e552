"""ServerService: what the server is, its devices and its operators."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import npugrad
from npugrad.attributes import KINDS
from npugrad.codec import CHUNK_BYTES, MAX_CHUNK_BYTES
from npugrad.operator import AttrParam, TensorParam
from npugrad.ops import OPERATORS
from npugrad.v1 import server_pb2
from npugrad_server.rpc.validation import encode_sources, requested_product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.operator import Constraint, OpRecord, Param
    from npugrad.products import Product
    from npugrad_server.config import ServerSettings
    from npugrad_server.pool import DevicePool, DeviceStatus, PoolSettings
    from npugrad_server.rpc.front_memory import FrontMemory
    from npugrad_server.rpc.funnel import Funnel, RpcCall
    from npugrad_server.rpc.register import Handler

_BUILT_ON = ("grpcio", "protobuf", "numpy", "ml_dtypes")


@dataclass(frozen=True)
class Facts:
    """Facts that do not change while a server runs.

    Attributes:
        settings: Settings of its pool.
        server: Its own settings.
        memory: Its front memory, with the limits.
        started_s: `time.monotonic()` at its start.
        records: The operators by name.
    """

    settings: PoolSettings
    server: ServerSettings
    memory: FrontMemory
    started_s: float
    records: Mapping[str, OpRecord] = field(default_factory=lambda: OPERATORS)


class ServerServicer:
    """Describes the server."""

    def __init__(self, pool: DevicePool, facts: Facts) -> None:
        self._pool, self._facts = pool, facts
        self._versions = versions()  # read from files, which no call should have to do
        self._draining = False

    def start_draining(self) -> None:
        """Reports draining from now on."""
        self._draining = True

    def handlers(self, funnel: Funnel) -> dict[str, Handler]:
        """Every method for `register`."""
        return {
            "GetServerInfo": funnel.unary("GetServerInfo", self.get_server_info, funnel.queries),
            "ListOperators": funnel.unary("ListOperators", self.list_operators, funnel.queries),
        }

    async def get_server_info(
        self, message: server_pb2.GetServerInfoRequest, call: RpcCall
    ) -> server_pb2.GetServerInfoResponse:
        """Versions, limits, product, devices, and current figures."""
        stats, settings, memory = self._pool.stats(), self._facts.settings, self._facts.memory
        return server_pb2.GetServerInfoResponse(
            version=npugrad.__version__,
            product=settings.product.wire,  # type: ignore[arg-type]
            devices=[_device(status) for status in self._pool.devices()],
            limits=_limits(self._facts),
            versions=self._versions,
            operators=[
                name
                for name, record in self._facts.records.items()
                if settings.product in record.products and not self._pool.unavailable(name)
            ],
            draining=self._draining,
            uptime_s=time.monotonic() - self._facts.started_s,
            queue_depth=stats.queue_depth,
            accepted_calls=stats.accepted_calls,
            input_arena_used_bytes=stats.input_arena_used_bytes,
            output_arena_used_bytes=stats.output_arena_used_bytes,
            front_requests_bytes=memory.requests_bytes,
            front_replies_bytes=memory.replies_bytes,
            verify_sample=settings.verify_sample,
            cann=settings.cann,
        )

    async def list_operators(
        self, message: server_pb2.ListOperatorsRequest, call: RpcCall
    ) -> server_pb2.ListOperatorsResponse:
        """Every operator with parameters and constraints.

        Raises:
            MalformedRequest: There is no such product.
        """
        product = requested_product(message.product, self._facts.settings.product)
        own = product is self._facts.settings.product
        return server_pb2.ListOperatorsResponse(
            operators=[
                _operator(record, product, missing=self._pool.unavailable(record.name) if own else "")
                for record in self._facts.records.values()
            ]
        )


def versions() -> dict[str, str]:
    """Versions of npugrad and of what the server is built on, by name."""
    found = {"npugrad": npugrad.__version__, "python": platform.python_version()}
    for name in _BUILT_ON:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # pragma: no cover - installed some other way
            found[name] = "unknown"
    return found


def _limits(facts: Facts) -> server_pb2.Limits:
    settings = facts.settings
    return server_pb2.Limits(
        max_message_bytes=int(facts.server.max_message_bytes),
        max_chunk_bytes=MAX_CHUNK_BYTES,
        recommended_chunk_bytes=CHUNK_BYTES,
        input_arena_bytes=settings.input_arena_bytes,
        output_arena_bytes=settings.output_arena_bytes,
        max_queue_depth=settings.max_queue_depth,
        front_memory_bytes=facts.memory.limits.total_bytes,
        max_calls=facts.server.max_calls,
        max_streams_per_connection=facts.server.max_streams_per_connection,
        max_connections=facts.server.max_connections,
    )


def _device(status: DeviceStatus) -> server_pb2.Device:
    return server_pb2.Device(
        name=status.name,
        backend=status.backend,
        description=status.description,
        simulated=status.simulated,
        state=server_pb2.DeviceState.Value(f"DEVICE_STATE_{status.state.name}"),
        restarts=status.restarts,
        reason=status.reason,
    )


def _operator(record: OpRecord, product: Product, missing: str) -> server_pb2.Operator:
    return server_pb2.Operator(
        name=record.name,
        aclnn_name=record.aclnn_name,
        summary=record.summary,
        parameters=[_parameter(record, param, product) for param in record.params],
        constraints=[_constraint(c) for c in record.constraints if c.applies(product)],
        supported=product in record.products and not missing,
        min_cann=record.min_cann,
    )


def _parameter(record: OpRecord, param: Param, product: Product) -> server_pb2.Parameter:
    if isinstance(param, AttrParam):
        return server_pb2.Parameter(
            name=param.name,
            c_name=param.c_name,
            role="attribute",
            doc=param.doc,
            optional=_may_be_null(record, param),
        )
    return server_pb2.Parameter(
        name=param.name,
        c_name=param.c_name,
        role=param.role,
        doc=param.doc,
        data_types=[d.wire for d in param.dtypes.get(product, ())],  # type: ignore[misc]
        optional=_may_be_null(record, param),
    )


def _may_be_null(record: OpRecord, param: Param) -> bool:
    """Whether some legal call has null there."""
    if isinstance(param, TensorParam):
        masked = param.masked_by is not None and param.when_masked == "null"
        return param.optional if param.role == "input" else masked
    checked = {c.id for c in record.constraints}
    return KINDS[param.type].is_pointer and f"{param.name}.not_null" not in checked


def _constraint(constraint: Constraint) -> server_pb2.OperatorConstraint:
    return server_pb2.OperatorConstraint(
        id=constraint.id,
        code=constraint.code,
        text=constraint.text,
        sources=encode_sources(constraint.sources),
        operands=constraint.operands,
        vendor_code=constraint.vendor_words,
    )
