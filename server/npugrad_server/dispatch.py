"""One request, from message to reply. Read this file first.

    decode -> validate -> check contents -> plan -> admit -> write or make operands -> run -> encode

Wire integrity comes first, then the documented constraints, then the lengths of contents; only then is
memory reserved. A unary call carries its contents in the message; a streamed one brings them in chunks
between `admit` and `run` (see `rpc/streaming.py`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from npugrad.codec import CHUNK_BYTES, MAX_MESSAGE_BYTES, check_contents, decode_request, encode_response
from npugrad.errors import CallTooLarge
from npugrad.registry import REGISTRY, Registry
from npugrad.validation import error_from_verdict, validate_call
from npugrad_server.pool import PlannedCall
from npugrad_server.recipes import Maker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.call import ExecutionInfo
    from npugrad.codec import WireCall, WireContent
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_server.pool import Admission, DevicePool, Outcome

INLINE_REPLY_BYTES = 256 * 1024
"""Results below this length travel in the header of a streamed reply, the others in chunks after it. The
header so stays below gRPC's default message limit of 4 MiB, which other clients may have."""
_REPLY_OVERHEAD_BYTES = 64 * 1024
"""More than everything in a response but its contents."""


@dataclass(frozen=True)
class Request:
    """A request that was decoded, validated and found complete.

    Attributes:
        planned: The call, as the pool takes it.
        contents: Content of each operand that is not null: inline, to follow in chunks, or a recipe.
    """

    planned: PlannedCall
    contents: Mapping[str, WireContent]

    @property
    def content_bytes(self) -> int:
        """Length of all contents that travel."""
        return sum(content.nbytes for content in self.contents.values() if content.recipe is None)


class Dispatcher:
    """Takes calls to the pool and brings the results back.

    Attributes:
        pool: Where calls run.
        product: Product the server serves.
        registry: The operators and their messages.
    """

    def __init__(
        self,
        pool: DevicePool,
        product: Product,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        registry: Registry = REGISTRY,
    ) -> None:
        """Makes it.

        Args:
            pool: Where calls run.
            product: Product the server serves.
            max_message_bytes: Largest message that can be sent.
            registry: The operators and their messages.
        """
        self.pool = pool
        self.product = product
        self.registry = registry
        self._maker = Maker()
        self._max_message_bytes = max_message_bytes

    def plan(
        self, record: OpRecord, message: Any, *, request_id: str, timeout_s: float | None, chunked: bool
    ) -> Request:
        """Decodes and validates a message and checks the lengths of its contents.

        Args:
            record: The operator.
            message: Its typed request.
            request_id: Identifier for the log.
            timeout_s: Seconds until the result is of no use; None for never.
            chunked: Whether contents may follow in chunks.

        Raises:
            MalformedTensor: Types, sizes or strides are not sane, or a content does not fit its tensor.
            MalformedRequest: An attribute is missing or an option is out of range.
            OperatorError: 161001, 161002, 561002 or an unsupported operator: a constraint is broken.
            InvalidRecipe: RECIPE_INVALID.
            RequestError: CONTENT_UNSUPPORTED.
        """
        wire = decode_request(record, message, self.product)
        verdict = validate_call(record, wire.call)
        if verdict.violations:
            raise error_from_verdict(record, verdict)
        check_contents(wire, chunked=chunked)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        call, unused = set_aside(wire, verdict.outputs)
        planned = PlannedCall(record, call, verdict.outputs, wire.options, request_id, deadline_s, unused)
        return Request(planned, wire.contents)

    async def call(self, request: Request) -> tuple[Any, ExecutionInfo]:
        """Runs a call whose contents are all inline.

        Returns:
            The typed response with its contents inline, and what produced it.

        Raises:
            CallTooLarge: The reply would not fit into one message, or the call into the server's memory.
            RecipeMismatch: RECIPE_MISMATCH.
            TransportError: Overload, shutdown, deadline: see `DevicePool.admit` and `DevicePool.run`.
            OperatorError: The device refused or failed.
        """
        check_reply_fits(request.planned, self._max_message_bytes)
        with self.pool.admit(request.planned) as admission:
            await self.write(admission, request)
            outcome = await self.run(admission)
            response, _ = encode_response(
                request.planned.record,
                request.planned.outputs,
                outcome.contents,
                outcome.info,
                registry=self.registry,
            )
        return response, outcome.info

    async def write(self, admission: Admission, request: Request) -> None:
        """Writes the contents that are here, and makes those that came as recipes.

        Raises:
            RecipeMismatch: RECIPE_MISMATCH.
        """
        await write_inline(admission, request)
        await self._maker.write(admission, request.contents)

    async def run(self, admission: Admission) -> Outcome:
        """Runs an admitted call whose operands are all written; errors as in `DevicePool.run`."""
        outcome = await self.pool.run(admission)
        planned = admission.planned
        info = replace(outcome.info, product=planned.call.product, request_id=planned.request_id)
        return replace(outcome, info=info)


def set_aside(wire: WireCall, outputs: Mapping[str, TensorMeta | None]) -> tuple[CallMeta, frozenset[str]]:
    """Finds the operands on whose values no wanted result depends: their contents need not be kept.

    Those that come as recipes are made all the same: their digest is part of the contract.

    Args:
        wire: A legal call whose contents fit it.
        outputs: Its outputs, None for masked-out ones.

    Returns:
        The call with these operands contiguous, their axes in the order of the formula, and their names.
    """
    record, call = wire.record, wire.call
    made = {name for name, content in wire.contents.items() if content.recipe is not None}
    unused = record.unused(call) - made
    is_run = any(meta is not None for meta in outputs.values())  # else nobody looks at its operands
    ordered = record.ordered(call) if unused and is_run else call
    return call.with_inputs(**{name: ordered.tensor(name).contiguous() for name in unused}), unused


def check_reply_fits(planned: PlannedCall, max_message_bytes: int) -> None:
    """Refuses a unary call whose reply would pass the limit of one message, before anything is run.

    Raises:
        CallTooLarge: It would; Execute has no such limit.
    """
    found = sum(meta.nbytes for meta in planned.outputs.values() if meta is not None) + _REPLY_OVERHEAD_BYTES
    if found > max_message_bytes:
        raise CallTooLarge(
            f"{planned.record.name}: found a reply of {found} bytes; expected at most {max_message_bytes} "
            "in a unary call, use Execute",
            operator=planned.record.name,
        )


async def write_inline(admission: Admission, request: Request) -> None:
    """Copies inline contents into the input arena, in pieces between which other calls get their turn."""
    for name, content in request.contents.items():
        if not content.data or name in request.planned.unused:
            continue
        source, target = memoryview(content.data), admission.view(name)
        for start in range(0, len(source), CHUNK_BYTES):
            target[start : start + CHUNK_BYTES] = source[start : start + CHUNK_BYTES]
            await asyncio.sleep(0)
