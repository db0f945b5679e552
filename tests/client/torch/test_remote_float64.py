"""`remote` against differences and against whole models in float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.client.torch.agreement import assert_close
from tests.client.torch.models import (
    gradients,
)
from torch import nn

from npugrad_client import Client
from npugrad_client.torch import remote

pytestmark = pytest.mark.torch
Tensor = Any  # with its own type, each `grad` would have to be shown not to be None


FLOAT32_IS_MEANT = pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")


@FLOAT32_IS_MEANT
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
def test_gradcheck_of_grid_sample(client: Client, padding_mode: str) -> None:
    x = torch.randn(1, 2, 4, 5, requires_grad=True)
    # Mid-cell points: within the step of the check no sample crosses a pixel, where the gradient jumps.
    cells = torch.tensor([[0.5, 0.4], [1.45, 2.5], [3.4, 1.6], [2.5, 0.5]])
    grid = ((2 * cells + 1) / torch.tensor([5.0, 4.0]) - 1).reshape(1, 2, 2, 2).requires_grad_()

    def sample(a: Tensor, b: Tensor) -> Any:
        return F.grid_sample(a, b, padding_mode=padding_mode, align_corners=False)

    with remote(client, min_bytes=0, on_refused="raise") as mode:
        assert torch.autograd.gradcheck(
            sample, (x, grid), eps=1e-2, atol=2e-3, rtol=1e-2, fast_mode=True, check_batched_grad=False
        )
    assert mode.summary().sent > 0
    assert mode.summary().local == 0


@FLOAT32_IS_MEANT
def test_gradcheck_of_group_norm(client: Client) -> None:
    x = torch.randn(2, 4, 6, requires_grad=True)
    w, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)

    def norm(*operands: Tensor) -> Any:
        return F.group_norm(operands[0], 2, operands[1], operands[2])

    with remote(client, min_bytes=0, on_refused="raise") as mode:
        assert torch.autograd.gradcheck(norm, (x, w, b), eps=1e-2, atol=2e-3, rtol=1e-2, fast_mode=True)
    assert mode.summary().sent > 0
    assert mode.summary().local == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_models_against_float64(client: Client, seed: int) -> None:
    """Each gradient within the project's tolerance of the whole model in float64."""
    torch.manual_seed(seed)
    channels = 4 * int(torch.randint(1, 5, ()))
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 1)]
    for _ in range(int(torch.randint(1, 3, ()))):
        layers += [nn.GroupNorm(4, channels), nn.Softplus(), nn.Conv2d(channels, channels, 1)]
    model, padding = nn.Sequential(*layers), ("zeros", "border", "reflection")[seed % 3]
    # Points well inside cells of the 6 x 8 image: no kink near them.
    cells = torch.rand(2, 5, 4, 2) * 0.8 + 0.1 + torch.randint(0, 5, (2, 5, 4, 2))
    grid = (2 * cells + 1) / torch.tensor([8.0, 6.0]) - 1

    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.grid = nn.Parameter(grid)

        def forward(self, x: Tensor) -> Any:
            return F.grid_sample(self.model(x), self.grid, padding_mode=padding, align_corners=False)

    sampled, x = Sampled(), torch.randn(2, 3, 6, 8)
    with remote(client, min_bytes=0) as mode:
        got = gradients(sampled, x)
    assert mode.summary().sent == len([m for m in model if isinstance(m, nn.GroupNorm)]) + 1
    expected = gradients(sampled.double(), x.double())
    names = ["x", *(name for name, _ in sampled.named_parameters())]
    for name, one, other in zip(names, got, expected, strict=True):
        if name.endswith(".bias") and _is_normalised_away(sampled, name):
            continue  # exactly zero but for cancellation: there is nothing to be relative to
        assert_close(one, other, name, extra=1e-5 * float(other.abs().max()))


def _is_normalised_away(sampled: nn.Module, name: str) -> bool:
    """Whether a bias is followed by a normalisation over a single channel a group."""
    model: Any = sampled.model
    number = int(name.split(".")[1])
    after = model[number + 1] if number + 1 < len(model) else None
    return isinstance(after, nn.GroupNorm) and after.num_groups == after.num_channels
