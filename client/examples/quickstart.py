"""One gradient from the service: group normalisation, checked against finite differences on this side.

    python client/examples/quickstart.py --target localhost:50051

Shows a call, where it ran, and what a call that the documents refuse looks like.
Needs nothing but the client.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad_client import Client, InvalidOperand

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

N, C, SIDE, GROUPS = 2, 8, 6, 4
EPS = 1e-5


def group_norm(x: Floats) -> tuple[Floats, Floats, Floats]:
    """Normalises (N, C, H, W) by group; also mean and reciprocal deviation of each group, (N, GROUPS)."""
    groups = x.reshape(N, GROUPS, -1)
    mean, rstd = groups.mean(axis=2), 1 / np.sqrt(groups.var(axis=2) + EPS)
    return ((groups - mean[..., None]) * rstd[..., None]).reshape(x.shape), mean, rstd


def remote_gradient(client: Client, x: Floats, grad_out: Floats, groups: int = GROUPS) -> Any:
    """The result of the operator: gradients, and where they were computed."""
    _, mean, rstd = group_norm(x)
    return client.group_norm_backward(
        grad_out=grad_out.astype(np.float32),
        input=x.astype(np.float32),
        mean=mean.astype(np.float32),
        rstd=rstd.astype(np.float32),
        n=N,
        c=C,
        hxw=SIDE * SIDE,
        group=groups,
        output_mask=(True, True, True),
        timeout_s=30,
    )


def slope(x: Floats, grad_out: Floats, direction: Floats, step: float = 1e-4) -> float:
    """Derivative of sum(grad_out * group_norm(x)) along a direction, by central differences in float64."""
    ahead, behind = (np.sum(grad_out * group_norm(x + sign * step * direction)[0]) for sign in (1, -1))
    return float((ahead - behind) / (2 * step))


def main() -> int:
    """Command line; the exit status tells whether the gradient is right."""
    parser = argparse.ArgumentParser(description="One gradient from the service, checked here.")
    parser.add_argument("--target", default="localhost:50051", help="address of the server")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    x, grad_out, direction = rng.standard_normal((3, N, C, SIDE, SIDE))
    with Client(options.target) as client:
        grads = remote_gradient(client, x, grad_out)
        found = float(np.sum(grads.grad_input.astype(np.float64) * direction))
        expected = slope(x, grad_out, direction)
        print(f"grad_input {grads.grad_input.shape} from {grads.info.device} ({grads.info.backend})")
        print(f"slope along a random direction: {found:.5f} by the service, {expected:.5f} by differences")
        try:
            remote_gradient(client, x, grad_out, groups=3)
        except InvalidOperand as error:
            print(f"refused with {error.code}: {error}")
        else:
            return 1
    return 0 if abs(found - expected) <= 1e-3 * max(1.0, abs(expected)) else 1


if __name__ == "__main__":
    sys.exit(main())
