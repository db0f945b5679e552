"""ValidationService: what the operator's first phase would answer, without data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from npugrad.codec import decode_request, encode_meta, unwrap
from npugrad.errors import MalformedRequest
from npugrad.products import Product, product_from_wire
from npugrad.registry import REGISTRY, Registry
from npugrad.v1 import validation_pb2
from npugrad.validation import validate_call
from npugrad_server.plans import Known
from npugrad_server.pool import PlannedCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npugrad.errors import Source, Violation
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.validation import Verdict
    from npugrad_server.rpc.funnel import Funnel, RpcCall
    from npugrad_server.rpc.register import Handler


class Predictor(Protocol):
    """The part of the pool that validation uses."""

    async def workspace_bytes(self, record: OpRecord, call: CallMeta) -> int | None:
        """Workspace that a legal call would need; None if no device can tell it now."""

    def predict(self, planned: PlannedCall) -> tuple[float | None, float | None]:
        """Seconds that a call sent now would wait and run; None for what is unknown."""
        ...


class ValidationServicer:
    """Validates calls against the documented constraints."""

    def __init__(self, product: Product, pool: Predictor, registry: Registry = REGISTRY) -> None:
        """Stores the arguments.

        Args:
            product: Product the server serves.
            pool: Predicts what a call would need.
            registry: The operators and their messages.
        """
        self._registry = registry
        self._product = product
        self._pool = pool

    def handlers(self, funnel: Funnel) -> dict[str, Handler]:
        """Every method for `register`."""
        return {"Validate": funnel.unary("Validate", self.validate)}

    async def validate(self, message: Any, call: RpcCall) -> validation_pb2.ValidateResponse:
        """Every violated constraint; or the inferred outputs and, as far as known, workspace and seconds.

        Raises:
            MalformedRequest: There is no call, an attribute is missing, or there is no such product.
            MalformedTensor: Types, sizes or strides are invalid.
        """
        product = requested_product(message.product, self._product)
        record, request = unwrap(message.call, self._registry, "validate: call")
        call.operator = record.name
        wire = decode_request(record, request, product)
        call.describe(wire.call)
        verdict = validate_call(record, wire.call)
        response = encode_verdict(verdict, product)
        if not verdict.status and product is self._product:
            workspace_bytes = await self._pool.workspace_bytes(record, wire.call)
            if workspace_bytes is not None:
                response.workspace_bytes = workspace_bytes
            plan = Known.of(wire, verdict.outputs, is_kept=False).plan
            planned = PlannedCall(plan, wire.options, call.request_id, None, tenant=call.tenant)
            wait_s, run_s = self._pool.predict(planned)
            if wait_s is not None:
                response.predicted_wait_s = wait_s
            if run_s is not None:
                response.predicted_run_s = run_s
        return response


def requested_product(number: int, default: Product) -> Product:
    """The product of a request; the server's own when it names none.

    Raises:
        MalformedRequest: There is no product of this number.
    """
    product = product_from_wire(number) if number else default
    if product is None:
        known = ", ".join(f"{p.wire} ({p})" for p in Product)
        raise MalformedRequest(f"product: found {number}; expected one of {known}", operand="product")
    return product


def encode_verdict(verdict: Verdict, product: Product) -> validation_pb2.ValidateResponse:
    """The wire form of a verdict."""
    response = validation_pb2.ValidateResponse(status=verdict.status, product=product.wire)  # type: ignore[arg-type]
    response.violations.extend(_violation(v) for v in verdict.violations)
    for name, meta in verdict.outputs.items():
        output = response.outputs.add(name=name)
        if meta is not None:
            encode_meta(meta, output.meta)
    return response


def _violation(violation: Violation) -> validation_pb2.Violation:
    return validation_pb2.Violation(
        id=violation.id,
        code=violation.code,
        operands=violation.operands,
        found=violation.found,
        expected=violation.expected,
        text=violation.text,
        sources=encode_sources(violation.sources),
    )


def encode_sources(sources: Iterable[Source]) -> list[validation_pb2.Source]:
    """The wire form of citations."""
    return [validation_pb2.Source(document=s.document, section=s.section, row=s.row) for s in sources]
