"""Many gradients at once from an event loop: each checked, all in flight together, one cancelled.

    python client/examples/quickstart_async.py --target localhost:50051

Shows concurrent calls, a batch with a limited number of calls in flight, and what cancelling does.
Needs nothing but the client.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad_client import AsyncClient, Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

N, C, SIDE, GROUPS = 2, 8, 16, 4


def call(seed: int) -> dict[str, Any]:
    """Arguments of a group normalisation whose grad_beta is the sum of grad_out, (C,)."""
    made = np.random.default_rng(seed)
    return {
        "grad_out": made.standard_normal((N, C, SIDE, SIDE), dtype=np.float32),
        "input": made.standard_normal((N, C, SIDE, SIDE), dtype=np.float32),
        "mean": np.zeros((N, GROUPS), np.float32),
        "rstd": np.ones((N, GROUPS), np.float32),
        "n": N,
        "c": C,
        "hxw": SIDE * SIDE,
        "group": GROUPS,
        "output_mask": (True, True, True),
    }


def is_right(seed: int, grads: Any) -> bool:
    """Whether grad_beta is that of the call with this seed."""
    expected = call(seed)["grad_out"].sum(axis=(0, 2, 3), dtype=np.float64)
    return bool(np.allclose(grads.grad_beta, expected, atol=1e-3))


async def side_by_side(client: AsyncClient, number: int) -> bool:
    """All calls in flight at once, each with its own answer."""
    found = await asyncio.gather(*(client.group_norm_backward(**call(seed)) for seed in range(number)))
    return all(is_right(seed, grads) for seed, grads in enumerate(found))


async def in_a_batch(client: AsyncClient, number: int) -> bool:
    """Calls from a generator, eight in flight: only their operands are in memory."""

    def calls() -> Iterator[dict[str, Any]]:
        for seed in range(number):
            yield call(seed)

    found = await client.run_many(client.group_norm_backward, calls(), concurrency=8)
    return all(is_right(seed, grads) for seed, grads in enumerate(found))


async def given_up(client: AsyncClient) -> bool:
    """Cancels a large call while it runs; the server gives it up, and the client goes on."""
    shape = (8, 64, 256, 256)  # 128 MiB, made by the server
    work = client.group_norm_backward(
        grad_out=Recipe("normal", shape=shape, seed=1),
        input=Recipe("normal", shape=shape, seed=2),
        mean=Recipe("constant", shape=(8, 8), value=0),
        rstd=Recipe("constant", shape=(8, 8), value=1),
        n=8,
        c=64,
        hxw=256 * 256,
        group=8,
        output_mask=(False, False, True),
    )
    try:
        await asyncio.wait_for(work, 0.05)
    except asyncio.TimeoutError:
        return is_right(0, await client.group_norm_backward(**call(0)))
    return False


async def run(target: str, number: int) -> bool:
    """Runs all three with one client."""
    async with AsyncClient(target, timeout_s=60.0) as client:
        right = await side_by_side(client, number)
        print(f"{number} calls side by side: {'all right' if right else 'WRONG'}")
        batch = await in_a_batch(client, number)
        print(f"{number} calls in a batch, 8 at a time: {'all right' if batch else 'WRONG'}")
        cancelled = await given_up(client)
        print(f"a call given up after 50 ms, the next one: {'right' if cancelled else 'WRONG'}")
    return right and batch and cancelled


def main() -> int:
    """Command line; the exit status tells whether every gradient is right."""
    parser = argparse.ArgumentParser(description="Many gradients at once from an event loop.")
    parser.add_argument("--target", default="localhost:50051", help="address of the server")
    parser.add_argument("--calls", type=int, default=50, help="calls at once")
    options = parser.parse_args()
    return 0 if asyncio.run(run(options.target, options.calls)) else 1


if __name__ == "__main__":
    sys.exit(main())
