"""A model and losses with the operators that `remote` sends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = Any  # with its own type, each `grad` would have to be shown not to be None


class Transformer(nn.Module):
    """A spatial transformer with a normalised trunk: both operators in one backward pass."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.Tanh())
        self.locate = nn.Linear(channels, 6)
        self.head = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Any:
        features = self.trunk(x)
        theta = self.locate(features.mean((2, 3))).reshape(-1, 2, 3) * 0.3 + torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(theta, [x.shape[0], 3, 9, 7], align_corners=False)
        return self.head(F.grid_sample(features, grid, align_corners=False))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of input and parameters of a fixed loss."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weights).sum().backward()
    return [tensor.grad.clone() for tensor in (x, *model.parameters())]  # `double()` converts them


def loss_of_group_norm(dtype: Any = torch.float32, **kwargs: Any) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 8, 5, 4, dtype=dtype, requires_grad=True)
    return x, (F.group_norm(x, 4, **kwargs) * torch.linspace(-1, 1, 20).reshape(5, 4).to(dtype)).sum()


def loss_of_grid_sample(dtype: Any = torch.float32, mode: str = "bilinear") -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 3, 6, 5, dtype=dtype, requires_grad=True)
    grid = (torch.rand(2, 4, 3, 2) * 2.4 - 1.2).to(dtype).requires_grad_()
    return x, F.grid_sample(x, grid, mode=mode, align_corners=False).square().sum()
