"""Makes the contents of operands that came as recipes, on threads other than the event loop's."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from npugrad.errors import RecipeMismatch
from npugrad_server.machine import cpu_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.recipe import Recipe
    from npugrad_server.pool import Ticket

PIECE_BYTES = 4 * 2**20
"""Bytes a thread makes, in some milliseconds, between checks whether the call was abandoned."""
_MAX_THREADS = 4


class Maker:
    """Threads that write recipes into the input arena.

    NumPy releases the interpreter lock inside each of its operations on a tile, so the event loop keeps
    running. Only the memory that the call has reserved is written, plus some hundred kilobytes per thread.
    """

    def __init__(self) -> None:
        """Starts no thread before the first recipe."""
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, cpu_count()), thread_name_prefix="recipe")

    async def write(self, ticket: Ticket, recipes: Mapping[str, Recipe]) -> None:
        """Generates contents from recipes and writes them.

        Args:
            ticket: The call, not yet started.
            recipes: Recipe of each operand that has one.

        Raises:
            RecipeMismatch: RECIPE_MISMATCH. A content's digest differs from the one that the caller expects.
        """
        for name, recipe in recipes.items():
            await self._write(ticket, name, recipe)

    async def _write(self, ticket: Ticket, name: str, recipe: Recipe) -> None:
        view, digest = ticket.view(name), hashlib.sha256()

        def make(start: int) -> None:
            piece = view[start : start + PIECE_BYTES]
            recipe.fill(piece, start)
            if recipe.digest:
                digest.update(piece)

        for start in range(0, len(view), PIECE_BYTES):
            await _to_its_end(asyncio.get_running_loop().run_in_executor(self._threads, make, start))
        if recipe.digest not in (b"", digest.digest()):
            operator = ticket.planned.plan.record.name
            raise RecipeMismatch(
                f"{operator}: {name}: found content with digest {digest.hexdigest()} made from {recipe}; "
                f"expected {recipe.digest.hex()}",
                operator=operator,
                operand=name,
            )


async def _to_its_end(work: asyncio.Future[None]) -> None:
    """Waits for a thread even if cancelled: the memory that it writes may go to another call afterwards."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        raise
