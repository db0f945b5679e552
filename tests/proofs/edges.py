"""Shows what verification makes of pixel edges: `make prove-edges`.

Results by every rule, on identity grids, on a Deformable-DETR encoder at its own initialisation, on lattices
and on random points, and real PyTorch's on the CPU, none of which may be refused; and results with a mistake,
all of which have to be. A mistake that changes no result by more than the tolerance is none, and is counted
apart: nearest interpolation has no floor that one could take for a ceiling.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.edge_calls import (
    ATTENTION,
    DTYPES,
    IMAGES,
    KINDS,
    MUTANTS,
    SAMPLERS,
    EdgeCall,
    edge_call,
    modes_of,
)
from tests.proofs.proof import run, verdict


def calls(count: int, seed: int) -> Iterator[tuple[str, EdgeCall]]:
    rng = np.random.default_rng(seed)
    for number in range(count):
        record = SAMPLERS[number % len(SAMPLERS)]
        kind = KINDS[number // len(SAMPLERS) % len(KINDS)]
        dtype = DTYPES[number // 9 % len(DTYPES)]
        options = {"dtype": dtype, "scale": float(rng.uniform(0.75, 1.25))}
        seed = int(rng.integers(2**31))
        yield kind, edge_call(record, kind, seed, int(rng.integers(len(modes_of(record)))), **options)


def by_pytorch(call: EdgeCall) -> dict[str, Any]:
    """What PyTorch's kernels for the CPU answer on the operands in float32, rounded to their type."""
    import torch

    names = ("grad_output", "input", "grid")
    operands = [torch.from_numpy(np.ascontiguousarray(call.inputs[n], np.float32)) for n in names]
    attrs = call.meta.attrs
    modes = (attrs["interpolation_mode"], attrs["padding_mode"], attrs["align_corners"])
    aten = torch.ops.aten
    function = aten.grid_sampler_2d_backward if call.record is IMAGES else aten.grid_sampler_3d_backward
    found = function(*operands, *modes, (True, True))
    dtype = call.inputs["grid"].dtype
    return dict(zip(("input_grad", "grid_grad"), (t.numpy().astype(dtype) for t in found), strict=True))


class Counts:
    """What was accepted and refused, by what it was."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str, str]] = Counter()
        self.right: Counter[tuple[str, str, str]] = Counter()
        self.told: Counter[str] = Counter()

    def accept(self, call: EdgeCall, kind: str, source: str, results: dict[str, Any]) -> None:
        """Results that must be accepted."""
        found = call.judged(results)
        self._count((call.record.name, kind, source), found.ok)
        if found.ok:
            self.told["moved" if "but for" in found.explanation else found.explanation or "own rule"] += 1
        else:
            print(f"REFUSED: {call}, {source}: {found}", flush=True)

    def refuse(self, call: EdgeCall, kind: str, mutant: str, number: int) -> None:
        """Results that must be refused, if they are wrong at all."""
        rule = call.rules[number % len(call.rules)]
        results = call.mutated(mutant, rule, number)
        if not call.differ(results, call.by_rule(rule)):
            self._count((call.record.name, kind, f"{mutant}, no mistake here"), True)
            return
        found = call.judged(results)
        self._count((call.record.name, kind, mutant), not found.ok)
        if found.ok:
            print(f"ACCEPTED: {call}, {mutant} by {rule}: {found}", flush=True)

    def _count(self, key: tuple[str, str, str], right: bool) -> None:
        self.seen[key] += 1
        self.right[key] += right

    def lines(self) -> Iterator[str]:
        for key in sorted(self.seen):
            record, kind, what = key
            yield f"{record:40} {kind:10} {what:28} {self.right[key]:5} of {self.seen[key]:5} as they must be"
        yield ", ".join(f"{count} {told}" for told, count in self.told.most_common())


def proved(count: int, seed: int) -> Counts:
    found = Counts()
    for number, (kind, call) in enumerate(calls(count, seed)):
        for rule in call.rules:
            found.accept(call, kind, rule.value, call.by_rule(rule))
        if call.record is not ATTENTION:
            found.accept(call, kind, "PyTorch", by_pytorch(call))
        for mutant in MUTANTS:
            found.refuse(call, kind, mutant, number)
    return found


def main(given: Any, folder: Path) -> bool:
    import torch

    torch.set_num_threads(1)
    start_s = time.monotonic()
    found = proved(given.calls, given.seed)
    for line in found.lines():
        print(line)
    wrong = found.seen.total() - found.right.total()
    results = f"{given.calls} calls, {found.seen.total()} results, {wrong} judged wrongly"
    return verdict(f"prove-edges: {results}, {time.monotonic() - start_s:.0f} s", not wrong)


if __name__ == "__main__":
    run(main, __doc__, calls=(1000, "how many"), seed=(1, "of what is drawn"))
