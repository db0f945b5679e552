"""Train a small spatial transformer network whose sampling gradient comes from the service.

Images of a bar are rotated by a random angle; a classifier must tell in which of four places the bar has a
notch. Before it, a localisation network chooses an affine map of the plane by which the image is resampled
(Jaderberg et al., "Spatial Transformer Networks"). The model is plain PyTorch and knows nothing about the
service; one line around `backward` sends the gradient of the sampling to it.

    python client/examples/spatial_transformer.py --target localhost:50051

Ends with status 1 unless the accuracy on images it has not seen reaches 0.9. Needs torch (a CPU is enough).
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from npugrad_client import Client
from npugrad_client.torch import Remote, remote

SIDE, CLASSES = 24, 4
STEPS, BATCH, RATE = 80, 64, 3e-3
WANTED_ACCURACY = 0.9


class SpatialTransformer(nn.Module):
    """Straightens its input by a learned affine map, then classifies it."""

    def __init__(self) -> None:
        super().__init__()
        self.localisation = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * 3 * 3, 32), nn.ReLU(), nn.Linear(32, 6),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 10 * 10, CLASSES)
        )
        last = self.localisation[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)  # so that it starts with the identity
        with torch.no_grad():
            last.bias.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, image: Tensor) -> Tensor:
        """Scores (N, CLASSES) of images (N, 1, H, W)."""
        theta = self.localisation(image).view(-1, 2, 3)
        grid = functional.affine_grid(theta, list(image.shape), align_corners=False)
        scores: Tensor = self.classifier(functional.grid_sample(image, grid, align_corners=False))
        return scores


def make_images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bars (N, 1, SIDE, SIDE) with a notch in one of four places, rotated by up to 60 degrees, and labels."""
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    angles = (torch.rand(count, generator=generator) * 2 - 1) * math.pi / 3
    line = (torch.arange(SIDE) + 0.5) / SIDE * 2 - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
    along, across = cos * x + sin * y, cos * y - sin * x
    centre = ((labels + 0.5) / CLASSES * 1.6 - 0.8)[:, None, None]
    bar = torch.sigmoid(20 * (0.25 - across.abs())) * torch.sigmoid(20 * (0.8 - along.abs()))
    notch = torch.sigmoid(20 * (0.18 - (along - centre).abs()))
    return (bar * (1 - notch))[:, None], labels


def train(model: SpatialTransformer, mode: Remote, generator: torch.Generator) -> None:
    """Runs Adam on fresh images at every step."""
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    for step in range(1, STEPS + 1):
        images, labels = make_images(BATCH, generator)
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        with mode:
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 0:
            print(f"  step {step:3d}: loss {loss.item():.3f}", flush=True)


def accuracy(model: SpatialTransformer, generator: torch.Generator) -> float:
    """Share of right answers on 1024 unseen images."""
    images, labels = make_images(1024, generator)
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def main() -> int:
    """Command line; the exit status tells whether it learned."""
    parser = argparse.ArgumentParser(description="Train a spatial transformer with remote gradients.")
    parser.add_argument("--target", default="localhost:50051", help="address of the server")
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    with Client(options.target, timeout_s=60) as client:
        mode = remote(client, min_bytes=0, label="spatial_transformer")  # 0: however small, as here
        model = SpatialTransformer()
        before = accuracy(model, generator)
        train(model, mode, generator)
        after = accuracy(model, generator)
    print(mode.summary())
    print(f"accuracy {before:.3f} before, {after:.3f} after {STEPS} steps")
    return 0 if after >= WANTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
