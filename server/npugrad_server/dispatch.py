"""One call, from request to reply. Read this file first.

    plan -> admit -> write or make operands -> chunks -> run -> encode

A request is planned without reading any content (`plans.py`); only then is memory reserved. Every call takes
the same path: inline contents are written, recipes are run, announced contents are read from a source of
chunks, and the results go to a sink. The source of a unary call is empty (`rpc/servicer.py`); a streamed call
has frames at both ends (`rpc/streaming.py`).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from npugrad.codec import CHUNK_BYTES, MAX_MESSAGE_BYTES, encode_info, encode_response
from npugrad.errors import UNARY_LIMIT_HINT, CallTooLarge
from npugrad.registry import REGISTRY, Registry
from npugrad.timeline import encode_marks
from npugrad_server.plans import Planner, Request
from npugrad_server.recipes import Maker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from npugrad.call import ExecutionInfo
    from npugrad.products import Product
    from npugrad_server.pool import DevicePool, Outcome, Ticket

    OperandSource = Callable[[Ticket], Awaitable[None]]
    ResultSink = Callable[[Outcome], Awaitable[None]]

_REPLY_OVERHEAD_BYTES = 64 * 1024
"""More than a response takes besides its contents."""


class Dispatcher:
    """Runs calls on the pool and returns their results.

    Attributes:
        pool: Where calls run.
        planner: Turns requests into calls.
        registry: The operators and their messages.
    """

    def __init__(
        self,
        pool: DevicePool,
        product: Product,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        registry: Registry = REGISTRY,
    ) -> None:
        """Creates a dispatcher.

        Args:
            pool: Where calls run.
            product: Product the server serves.
            max_message_bytes: Largest message that can be sent.
            registry: The operators and their messages.
        """
        self.pool = pool
        self.planner = Planner(product, registry)
        self.registry = registry
        self._maker = Maker()
        self._max_message_bytes = max_message_bytes

    async def call(self, request: Request, source: OperandSource, sink: ResultSink) -> None:
        """Runs a call.

        Args:
            request: The call, from `planner`.
            source: Writes the announced contents into the operands.
            sink: Takes the results; they are gone once it returns.

        Raises:
            CallTooLarge: It does not fit into the server's memory.
            RecipeMismatch: RECIPE_MISMATCH.
            TransportError: Overload, shutdown, deadline: see `DevicePool.admit` and `DevicePool.run`.
            OperatorError: The device refused or failed.
        """
        # Leaving the block, in whatever way, releases every byte.
        with self.pool.admit(request, is_upload=bool(request.known.announced)) as ticket:
            await write_inline(ticket, request.inline)
            if request.recipes:
                await self._maker.write(ticket, request.recipes)
            await source(ticket)
            request.marks.append(("receive", time.monotonic()))
            try:
                outcome = await self.pool.run(ticket)
            except BaseException:
                ticket.mark_failed()
                raise
            finally:
                request.marks.extend(ticket.marks)
            await sink(outcome)

    async def call_whole(self, request: Request) -> tuple[bytes, ExecutionInfo]:
        """Runs a call whose contents are all in its request.

        Returns:
            The serialized response with its contents inline, and the execution info.

        Raises:
            CallTooLarge: The reply would not fit into one message; other errors as for `call`.
        """
        check_reply_fits(request, self._max_message_bytes)
        replies: list[tuple[bytes, ExecutionInfo]] = []

        async def sink(outcome: Outcome) -> None:
            reply = self.reply_by_template(request, outcome) or self._reply(request, outcome)
            replies.append((reply, outcome.info))

        await self.call(request, _nothing_follows, sink)
        if request.known.reply_bytes >= CHUNK_BYTES:
            await asyncio.sleep(0)  # building it took a while, and copying it will take gRPC as long
        return replies[0]

    def _reply(self, request: Request, outcome: Outcome) -> bytes:
        plan = request.plan
        whole, _ = encode_response(
            plan.record, plan.outputs, outcome.contents, outcome.info, registry=self.registry
        )
        mark_encoded(request, whole)
        return bytes(whole.SerializeToString())

    def reply_by_template(self, request: Request, outcome: Outcome) -> bytes | None:
        """The serialized response with its inline contents; None if no template is known."""
        known = request.known
        if known.reply is None:
            return None
        rest = self.registry.responses[request.plan.record.name]()
        encode_info(outcome.info, rest.info)
        mark_encoded(request, rest)
        carried = [*map(outcome.contents.__getitem__, known.carried)]
        return known.reply.encode(carried, rest.SerializeToString())


def mark_encoded(request: Request, response: Any) -> None:
    """Ends the encode stage, and writes the stages so far into the response."""
    request.marks.append(("encode", time.monotonic()))
    encode_marks(request.marks, response.info.timeline)


async def _nothing_follows(ticket: Ticket) -> None:
    """The source of a call whose contents are all in its request."""


def check_reply_fits(request: Request, max_message_bytes: int) -> None:
    """Refuses a unary call before it runs if its reply would exceed the message limit.

    Raises:
        CallTooLarge: It would; Execute has no such limit.
    """
    found = request.known.reply_bytes + _REPLY_OVERHEAD_BYTES
    if found > max_message_bytes:
        name = request.plan.record.name
        raise CallTooLarge(
            f"{name}: found a reply of {found} bytes; expected at most {max_message_bytes} "
            f"{UNARY_LIMIT_HINT}",
            operator=name,
        )


async def write_inline(ticket: Ticket, contents: Mapping[str, bytes | memoryview]) -> None:
    """Copies contents into the input arena, in pieces so that other calls get their turn in between."""
    copied = 0
    targets = ticket.views(contents)
    for (name, content), target in zip(contents.items(), targets, strict=True):
        if len(content) != len(target):
            raise ValueError(f"{name}: found {len(content)} bytes of content; expected {len(target)}")
        source = memoryview(content)
        for start in range(0, len(source), CHUNK_BYTES):
            piece = source[start : start + CHUNK_BYTES]
            copied += len(piece)
            if copied >= CHUNK_BYTES:
                copied = 0
                await asyncio.sleep(0)
            target[start : start + CHUNK_BYTES] = piece
