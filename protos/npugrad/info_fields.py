"""Encodes and decodes execution info in messages."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from npugrad.call import ExecutionInfo, VerifiedOutput, VerifiedOutputs
from npugrad.errors import MalformedRequest
from npugrad.products import product_from_wire

if TYPE_CHECKING:
    from npugrad.timeline import Recorded
    from npugrad.v1 import operators_pb2

_INFO_FIELDS = (
    "backend", "device", "simulated", "workspace_bytes", "attempts",
    "queued_s", "copy_in_s", "run_s", "copy_out_s", "request_id", "verification",
    "predicted_wait_s", "predicted_run_s",
)  # fmt: skip


def encode_info(info: ExecutionInfo, message: operators_pb2.ExecutionInfo) -> None:
    """Writes execution info, without its timeline, into a message."""
    for name in _INFO_FIELDS:
        setattr(message, name, getattr(info, name))
    for found in info.verified:
        message.verified.add(**asdict(found))
    message.product = info.product.wire  # type: ignore[assignment]


def decode_info(message: operators_pb2.ExecutionInfo, recorded: Recorded | None = None) -> ExecutionInfo:
    """Reads execution info from a message.

    Args:
        message: The message.
        recorded: What the client measured of the call.

    Raises:
        MalformedRequest: The product is unknown, or a name has control characters.
    """
    product = product_from_wire(message.product)
    if product is None:  # never guessed: a result must say what it was computed for
        found = f"info: found product {message.product}"
        raise MalformedRequest(f"{found}; expected one of the contract's numbers")
    fields = {name: getattr(message, name) for name in _INFO_FIELDS}
    texts = [value for value in fields.values() if isinstance(value, str)]
    texts += [each.name for each in message.verified]
    if not all(map(str.isprintable, texts)):
        raise MalformedRequest("info: found control characters; expected names")
    verified = VerifiedOutputs(
        VerifiedOutput(v.name, v.max_absolute_error, v.max_relative_error, v.tolerance_used)
        for v in message.verified
    )
    return ExecutionInfo(product=product, verified=verified, **fields).note(recorded)
