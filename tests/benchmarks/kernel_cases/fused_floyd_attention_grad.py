"""Cases of fused_floyd_attention_grad: cubes of scores, those of one head and of four.

Limit: the multipliers. 20 operations for each of N x M x K x D; torch runs ten batches of matrix products
over tensors of scores, which leave the caches, and permutes them in memory between the products. The roofline
counts every product as its own; ours computes those that share a factor together, with half of the
multiplications.

Expected before the first run, from a prototype: 2.5 to 4 against torch in float32; 1 to 2 in bfloat16, whose
products torch computes with instructions of twice the rate.
"""

from __future__ import annotations

from tests.benchmarks.goals import Goal, at_least, at_most
from tests.benchmarks.kernel_cases import ERROR, JAX, MEMORY, TORCH, KernelCase

_SIZES = (
    ("B1 H4 128^3 D32", {"b": 1, "h": 4, "n": 128, "m": 128, "k": 128, "d": 32}),
    ("B1 H1 256^3 D64", {"b": 1, "h": 1, "n": 256, "m": 256, "k": 256, "d": 64}),
    ("B1 H1 384^3 D32", {"b": 1, "h": 1, "n": 384, "m": 384, "k": 384, "d": 32}),
)
_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
_LARGE = "B1 H1 384^3 D32"


def _goals(name: str, dtype: str) -> dict[str, Goal]:
    if dtype != "float32":
        return {"torch": at_least(2.0 if name == _LARGE else 1.0, 2.0)}
    goals = {"torch": at_least(2.5, 5.0), ERROR: at_most(2e-6)}
    return {**goals, MEMORY: at_least(4.0, 6.0)} if name == _LARGE else goals


def _flops(sizes: dict[str, int]) -> float:
    found = 20.0
    for size in sizes.values():
        found *= size
    return found


CASES = tuple(
    KernelCase(
        "fused_floyd_attention_grad",
        name,
        dtype,
        sizes,
        peers={"torch": TORCH, "jax": JAX},
        flops=_flops(sizes),
        tolerance=tolerance,
        goals=_goals(name, dtype),
    )
    for dtype, tolerance in _TOLERANCE.items()
    for name, sizes in _SIZES
)
