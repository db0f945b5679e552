"""One step of real models, here and under `remote`: `make models`.

Each model is built from its configuration, small and without weights. Its backward pass runs here, under
``remote(fused=False)`` and under ``remote()``, with everything sent that may be, to a service of its own on
this machine. Gradients are compared with those computed here by the same rule: without fusing by PyTorch
alone, with it by the operator's formula. The table has the calls that were sent, those of them that sample
(`grid_sample` and deformable attention), their MiB, and the least seconds of a backward pass; the differences
are relative norms over all parameters, and the largest of one parameter in units of its rounding here. Across
the two rules (the last column) points on edges between pixels differ, where untrained detectors have many.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tests.models.zoo import MODELS

from npugrad_client import Client
from npugrad_client.demo._service import local_service
from npugrad_client.torch import Remote, RemoteWarning, SummaryRow, remote

Gradients = dict[str, torch.Tensor]
ROUNDING = 1e-5
"""Largest relative norm of a difference, over all parameters."""
WORST = 8
"""Of one parameter, in units of what rounding makes of it here."""
TIMES = 3
SAMPLERS = (
    *("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    "multi_scale_deformable_attention_grad",
)


@dataclass(frozen=True)
class Step:
    """A step's gradients, the seconds of its backward pass, and what was sent."""

    gradients: Gradients
    seconds: float
    rows: tuple[SummaryRow, ...] = ()

    def calls(self, *operators: str) -> int:
        """Calls that were sent, of some operators or of all."""
        return sum(row.calls for row in self.rows if not operators or row.operator in operators)

    @property
    def mib(self) -> float:
        """What was sent and came back."""
        return sum(row.bytes for row in self.rows) / 2**20


def step(model: Any, output: Callable[[], Any], mode: Remote | None = None, share: float = 1.0) -> Step:
    """Runs a model forward and backward on a share of its loss, under `remote` if there is one."""
    model.zero_grad()
    with mode or nullcontext():
        loss = loss_of(output()) * share
        started = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - started
    rows = tuple(row for row in mode.summary().rows if row.is_sent) if mode else ()
    return Step(gradients(model), seconds, rows)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A weighted sum: the squares of what a layer norm gives have the same sum whatever the parameters."""
    weights = torch.linspace(-9, 9, output.numel()).reshape(output.shape)
    return (output * weights.sin()).sum()


def by_formula(model: Any, output: Callable[[], Any], mode: Remote) -> Gradients:
    """Gradients of a forward pass under `remote`, computed here, after it."""
    model.zero_grad()
    with mode:
        loss = loss_of(output())
    loss.backward()
    return gradients(model)


def gradients(model: Any) -> Gradients:
    """Those of all parameters that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def best(run: Callable[[], Step]) -> Step:
    """The fastest of some runs, all of which have the same gradients but for rounding."""
    return min((run() for _ in range(TIMES)), key=lambda one: one.seconds)


def difference(got: Gradients, expected: Gradients, rounding: dict[str, float]) -> tuple[float, float]:
    """The relative norm over all parameters, and the largest of one parameter in units of its rounding."""
    assert got.keys() == expected.keys()
    errors = {name: norm(got[name].double() - expected[name].double()) for name in expected}
    each = (errors[name] / rounding[name] for name in expected if errors[name])
    return math.hypot(*errors.values()) / math.hypot(*map(norm, expected.values())), max(each, default=0.0)


def rounding_of(model: Any, output: Callable[[], Any], expected: Gradients) -> dict[str, float]:
    """What rounding makes of each gradient here, as the backward pass of a third of the loss tells."""
    third = step(model, output, share=1 / 3).gradients
    return {
        name: norm(third[name].double() * 3 - tensor.double()) + 2**-23 * norm(tensor)
        for name, tensor in expected.items()
    }


def norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def compare(client: Client, made: Callable[[], Any]) -> tuple[tuple[str, ...], bool]:
    """A model's line of the table, and whether its gradients are right."""
    torch.manual_seed(0)
    model, output = made()
    model.eval()  # nothing random
    here = best(lambda: step(model, output))
    before = best(lambda: step(model, output, remote(client, min_bytes=0, fused=False)))
    after = best(lambda: step(model, output, remote(client, min_bytes=0)))
    formula = by_formula(model, output, remote(client, min_bytes=0))
    rounding = rounding_of(model, output, here.gradients)
    pairs = (
        (before.gradients, here.gradients),
        (after.gradients, formula),
        (after.gradients, here.gradients),
    )
    errors = [difference(*pair, rounding) for pair in pairs]
    counts = (
        f"{before.calls()} -> {after.calls()}",
        f"{before.calls(*SAMPLERS)} -> {after.calls(*SAMPLERS)}",
        f"{before.mib:.1f} -> {after.mib:.1f}",
    )
    seconds = (f"{one.seconds:.3f}" for one in (here, before, after))
    is_right = all(whole <= ROUNDING and worst <= WORST for whole, worst in errors[:2])
    shown = (*(f"{whole:.0e} {worst:.1f}" for whole, worst in errors[:2]), f"{errors[2][0]:.0e}")
    return (made.__name__, *counts, *seconds, *shown, "ok" if is_right else "WRONG"), is_right


HEADER: tuple[str, ...] = (
    *("model", "calls sent", "that sample", "MiB", "s here", "s fused=False", "s remote"),
    *("fused=False - here", "remote - formula", "remote - here", ""),
)


def main() -> int:
    """Prints the table; exit code 0 if all gradients are right."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("models", nargs="*", metavar="NAME", help="all by default")
    options.add_argument("--target", help="address of a service; default one of its own")
    given = options.parse_args()
    chosen, lines, is_right = given.models, [HEADER], True
    service = nullcontext(given.target) if given.target else local_service("--metrics-listen", "")
    with warnings.catch_warnings(), service as address, Client(address, timeout_s=120) as client:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RemoteWarning)
        for made in MODELS:
            if not chosen or made.__name__ in chosen:
                line, right = compare(client, made)
                lines.append(line)
                is_right &= right
                print(" ".join(line), file=sys.stderr, flush=True)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
