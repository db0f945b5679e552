"""One call, from request to reply. Read this file first.

    plan -> admit -> write or make operands -> chunks -> run -> encode

A request is planned without looking at any content (`plans.py`), and only then memory is reserved. Every call
takes the same path: contents that came with the request are written, those that come as recipes are made,
those that were announced are taken from a source of chunks, and the results go to a sink. A unary call is
one whose source has nothing (`rpc/servicer.py`); a streamed one has its frames on both ends
(`rpc/streaming.py`).
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
"""More than everything in a response but its contents."""


class Dispatcher:
    """Takes calls to the pool and brings the results back.

    Attributes:
        pool: Where calls run.
        planner: Makes calls of requests.
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
        self.planner = Planner(product, registry)
        self.registry = registry
        self._maker = Maker()
        self._max_message_bytes = max_message_bytes

    async def call(self, request: Request, source: OperandSource, sink: ResultSink) -> None:
        """Runs a call.

        Args:
            request: What `planner` made of it.
            source: Writes the contents that were announced into the operands.
            sink: Takes the results; they are gone when it returns.

        Raises:
            CallTooLarge: It does not fit into the server's memory.
            RecipeMismatch: RECIPE_MISMATCH.
            TransportError: Overload, shutdown, deadline: see `DevicePool.admit` and `DevicePool.run`.
            OperatorError: The device refused or failed.
        """
        # Leaving the block, by whatever way, gives every byte back.
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
            The serialized response with its contents inline, and what produced it.

        Raises:
            CallTooLarge: The reply would not fit into one message; and as `call`.
        """
        check_reply_fits(request, self._max_message_bytes)
        replies: list[tuple[bytes, ExecutionInfo]] = []

        async def sink(outcome: Outcome) -> None:
            reply = self.reply_by_template(request, outcome) or self._reply(request, outcome)
            replies.append((reply, outcome.info))

        await self.call(request, _nothing_follows, sink)
        if request.known.reply_bytes >= CHUNK_BYTES:
            await asyncio.sleep(0)  # it took a while to make, and takes gRPC as long to copy
        return replies[0]

    def _reply(self, request: Request, outcome: Outcome) -> bytes:
        plan = request.plan
        whole, _ = encode_response(
            plan.record, plan.outputs, outcome.contents, outcome.info, registry=self.registry
        )
        mark_encoded(request, whole)
        return bytes(whole.SerializeToString())

    def reply_by_template(self, request: Request, outcome: Outcome) -> bytes | None:
        """The serialized response with the contents that it carries; None where no template is known."""
        known = request.known
        if known.reply is None:
            return None
        rest = self.registry.responses[request.plan.record.name]()
        encode_info(outcome.info, rest.info)
        mark_encoded(request, rest)
        carried = [*map(outcome.contents.__getitem__, known.carried)]
        return known.reply.encode(carried, rest.SerializeToString())


def mark_encoded(request: Request, response: Any) -> None:
    """Ends the stage in which a response is made, and writes the stages so far into it."""
    request.marks.append(("encode", time.monotonic()))
    encode_marks(request.marks, response.info.timeline)


async def _nothing_follows(ticket: Ticket) -> None:
    """The source of a call whose contents are all in its request."""


def check_reply_fits(request: Request, max_message_bytes: int) -> None:
    """Refuses a unary call whose reply would pass the limit of one message, before anything is run.

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
    """Copies contents into the input arena, in pieces between which other calls get their turn."""
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
