"""A script as a user has it, which `make prove-advise` gives to `npugrad advise`: trains a model of a name.

`vae` is diffusers' AutoencoderKL where that is installed, else one of the same parts; `warp` has every
operator that `remote` sends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block of a VAE: two norms, two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        parts = [(nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))] * 2
        self.body = nn.Sequential(*(part for three in parts for part in three))

    def forward(self, x: Any) -> Any:
        return x + self.body(x)


class Vae(nn.Module):
    """Halves an image three times and makes it again."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (32, 64, 128, 128)
        down = [nn.Sequential(Block(a), nn.Conv2d(a, b, 3, 2, 1)) for a, b in pairwise(sizes)]
        up = [nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(b, a, 3, padding=1), Block(a))
              for a, b in pairwise(sizes)]  # fmt: skip
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *down, Block(128), *up[::-1],
                                  nn.Conv2d(32, 3, 3, padding=1))  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.body(x)


class Warp(nn.Module):
    """Normalises an image, warps it by a grid that it finds, and normalises the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU())
        self.locate = nn.Conv2d(32, 2, 3, padding=1)
        self.rows = nn.LayerNorm(128)

    def forward(self, x: Any) -> Any:
        features = self.trunk(x)
        still = F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), list(x.shape), align_corners=False)
        grid = still + 0.1 * torch.tanh(self.locate(features)).permute(0, 2, 3, 1)
        return self.rows(F.grid_sample(features, grid, align_corners=False)).mean(1, keepdim=True)


def autoencoder() -> tuple[str, nn.Module]:
    try:
        diffusers: Any = import_module("diffusers")
    except ImportError:
        return "a VAE of GroupNorm blocks", Vae()
    sizes = (32, 64, 128, 128)
    found: nn.Module = diffusers.AutoencoderKL(
        block_out_channels=sizes,
        down_block_types=("DownEncoderBlock2D",) * len(sizes),
        up_block_types=("UpDecoderBlock2D",) * len(sizes),
    )
    return "diffusers' AutoencoderKL", found


def make(name: str) -> tuple[str, Callable[[], Any]]:
    """What a model is called, and its loss on a fixed batch of images."""
    torch.manual_seed(7)
    title, model = autoencoder() if name == "vae" else ("a warp of normalised features", Warp())
    x = torch.randn(4, 3, 128, 128)

    def loss() -> Any:
        model.zero_grad()
        out = model(x)
        return (getattr(out, "sample", out) - x).square().mean()

    return title, loss


if __name__ == "__main__":
    _, once = make(sys.argv[1])
    while True:  # `npugrad advise` ends it
        once().backward()
