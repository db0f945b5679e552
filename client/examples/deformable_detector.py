"""Fine-tune a small detector with deformable attention, using gradients from the service.

Coloured discs, squares and triangles are drawn on a noisy canvas; the detector must find the box and the kind
of each shape. It is built like Deformable-DETR (Zhu et al., 2021), at laptop scale: a backbone gives two
levels of features, queries on a grid sample them in two layers of multi-scale deformable attention with
learned offsets, and each query is in charge of a shape whose centre is in its cell. The queries see only what
they sample of the picture. The kind is read from samples inside the box that was found.

The backbone is first trained alone, locally, to name the shape under each of its cells. Then the whole
detector is fine-tuned: the gradient of the attention comes from the service through
`multi_scale_deformable_attention`, those of all norms and grid samples through `remote`.

    python client/examples/deformable_detector.py --target localhost:50051

Prints how one step's gradients differ from PyTorch's own, the loss, and how well boxes fit before and after.
Ends with status 1 unless the gradients agree and 85 % of the shapes are found. Needs torch (a CPU is enough).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from npugrad_client import Client
from npugrad_client.torch import multi_scale_deformable_attention, remote

if TYPE_CHECKING:
    from collections.abc import Callable

    Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

KINDS = ("disc", "square", "triangle")
SIDE, MOST_SHAPES = 64, 3
LEVELS = torch.tensor([[16, 16], [8, 8]])
STARTS = torch.tensor([0, 256])
GRID, WIDTH, HEADS, POINTS = 8, 64, 4, 4
WARM_UP_STEPS, STEPS, BATCH, RATE = 60, 160, 16, 5e-3
WANTED_FOUND, WANTED_AGREEMENT = 0.85, 1e-3


# ------------------------------------------------------------------------------------------------ pictures


@dataclass(frozen=True)
class Scene:
    """Pictures and what is on them.

    Attributes:
        images: (N, 3, SIDE, SIDE).
        boxes: (N, MOST_SHAPES, 4). Centre x and y, width and height, 0 to 1 across the picture.
        kinds: (N, MOST_SHAPES). Index into KINDS, or -1 where there is no such shape.
        masks: (N, MOST_SHAPES, SIDE, SIDE), bool. Where each shape is.
    """

    images: Tensor
    boxes: Tensor
    kinds: Tensor
    masks: Tensor


def draw(count: int, generator: torch.Generator) -> Scene:
    """One to three shapes per picture, each in its own quarter, so that none covers another."""
    quarter = torch.rand(count, 4, generator=generator).argsort(1)[:, :MOST_SHAPES]
    size = (torch.rand(count, MOST_SHAPES, 2, generator=generator) * 0.22 + 0.2).clamp(max=0.42)
    room = 0.48 - size
    corner = torch.stack((quarter % 2, quarter // 2), -1) * 0.5
    centre = corner + 0.01 + size / 2 + room * torch.rand(count, MOST_SHAPES, 2, generator=generator)
    kinds = torch.randint(0, len(KINDS), (count, MOST_SHAPES), generator=generator)
    present = torch.arange(MOST_SHAPES) < torch.randint(1, MOST_SHAPES + 1, (count, 1), generator=generator)
    masks = shape_masks(kinds, centre, size) & present[..., None, None]
    colours = torch.rand(count, MOST_SHAPES, 3, 1, 1, generator=generator) * 0.7 + 0.3
    images = torch.randn(count, 3, SIDE, SIDE, generator=generator) * 0.1
    images = images + (masks.unsqueeze(2) * colours).sum(1)
    return Scene(images, torch.cat((centre, size), -1), kinds.where(present, torch.tensor(-1)), masks)


def shape_masks(kinds: Tensor, centre: Tensor, size: Tensor) -> Tensor:
    """The pixels (N, MOST_SHAPES, SIDE, SIDE) of shapes that fill boxes."""
    line = (torch.arange(SIDE) + 0.5) / SIDE
    y, x = torch.meshgrid(line, line, indexing="ij")
    across = (x - centre[..., 0, None, None]) / size[..., 0, None, None] * 2  # -1 to 1 inside the box
    down = (y - centre[..., 1, None, None]) / size[..., 1, None, None] * 2
    disc = across.square() + down.square() <= 1
    square = (across.abs() <= 1) & (down.abs() <= 1)
    triangle = (across.abs() <= (down + 1) / 2) & (down.abs() <= 1)
    return torch.stack((disc, square, triangle)).gather(
        0, kinds[None, ..., None, None].expand(1, *kinds.shape, SIDE, SIDE)
    )[0]


# ------------------------------------------------------------------------------------------------ detector


def convolution(channels: int, out: int) -> nn.Sequential:
    """Halves the resolution."""
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.GroupNorm(8, out), nn.ReLU())


class Backbone(nn.Module):
    """Features of two resolutions, LEVELS, WIDTH channels each."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(convolution(3, 32), convolution(32, WIDTH))
        self.coarse = convolution(WIDTH, WIDTH)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Two maps (N, WIDTH, height, width) of pictures (N, 3, SIDE, SIDE)."""
        fine = self.fine(images)
        return fine, self.coarse(fine)


class AttentionLayer(nn.Module):
    """Queries sample both levels at learned points, and process the samples."""

    def __init__(self) -> None:
        super().__init__()
        shape = (HEADS, len(LEVELS), POINTS)
        self.offsets = nn.Linear(WIDTH, math.prod(shape) * 2)
        self.weights = nn.Linear(WIDTH, math.prod(shape))
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        # At first, each head looks in its own direction, each of its points farther out, as in the paper, but
        # not by a whole number of pixels, where bilinear sampling has a kink.
        angle = torch.arange(HEADS) * (2 * math.pi / HEADS) + 0.4
        towards = torch.stack((angle.cos(), angle.sin()), -1)[:, None, None]
        distance = torch.arange(1, POINTS + 1)[:, None] * 0.7
        nn.init.zeros_(self.offsets.weight)
        with torch.no_grad():
            self.offsets.bias.copy_((towards * distance).expand(*shape, 2).reshape(-1))

    def forward(self, query: Tensor, reference: Tensor, maps: Tensor, attend: Attention) -> Tensor:
        """Queries (N, Q, WIDTH) at points (Q, 2) of the flattened maps (N, keys, WIDTH)."""
        count, queries, _ = query.shape
        shape = (count, queries, HEADS, len(LEVELS), POINTS)
        offsets = self.offsets(query).reshape(*shape, 2) / LEVELS.flip(1)[:, None]
        weights = self.weights(query).reshape(*shape[:3], -1).softmax(-1).reshape(shape)
        location = reference[:, None, None, None] + offsets
        value = self.value(maps).reshape(count, -1, HEADS, WIDTH // HEADS)
        seen = attend(value, LEVELS, STARTS, location, weights)
        query = self.norms[0](query + self.out(seen))
        result: Tensor = self.norms[1](query + self.mlp(query))
        return result


class Detector(nn.Module):
    """Boxes and kinds from queries on a grid."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.project = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.GroupNorm(8, WIDTH)) for _ in LEVELS
        )
        self.queries = nn.Parameter(torch.randn(GRID * GRID, WIDTH) * 0.1)
        self.layers = nn.ModuleList(AttentionLayer() for _ in range(2))
        self.box = nn.Linear(WIDTH, 4)
        self.kind = nn.Linear(WIDTH + 9 * WIDTH, len(KINDS) + 1)
        line = (torch.arange(GRID) + 0.5) / GRID
        y, x = torch.meshgrid(line, line, indexing="ij")
        self.register_buffer("reference", torch.stack((x, y), -1).reshape(-1, 2))

    def forward(self, images: Tensor, attend: Attention) -> tuple[Tensor, Tensor]:
        """Boxes (N, Q, 4) as centre and size, and scores (N, Q, KINDS + 1), nothing last."""
        reference = self.get_buffer("reference")
        levels = [project(one) for project, one in zip(self.project, self.backbone(images), strict=True)]
        maps = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], 1)
        query = self.queries.expand(len(images), -1, -1)
        for layer in self.layers:
            query = layer(query, reference, maps, attend)
        raw = self.box(query)
        boxes = torch.cat((reference + 0.2 * raw[..., :2].tanh(), 0.6 * raw[..., 2:].sigmoid()), -1)
        return boxes, self.kind(torch.cat((query, inside(levels[0], boxes.detach())), -1))


def inside(features: Tensor, boxes: Tensor) -> Tensor:
    """Features (N, Q, 9 * WIDTH) at three by three points of each box."""
    line = torch.tensor([-0.3, 0.0, 0.3])
    y, x = torch.meshgrid(line, line, indexing="ij")
    points = boxes[:, :, None, :2] + torch.stack((x, y), -1).reshape(9, 2) * boxes[:, :, None, 2:]
    return (
        functional.grid_sample(features, 2 * points - 1, align_corners=False).permute(0, 2, 3, 1).flatten(2)
    )


def plain_attention(
    value: Tensor, levels: Tensor, starts: Tensor, location: Tensor, weights: Tensor
) -> Tensor:
    """The same attention by PyTorch alone, with PyTorch's own gradient, for comparison."""
    count, _, heads, channels = value.shape
    queries, points = location.shape[1], location.shape[4]
    samples = []
    for number, ((height, width), start) in enumerate(zip(levels.tolist(), starts.tolist(), strict=True)):
        keys = value[:, start : start + height * width].permute(0, 2, 3, 1)
        maps = keys.reshape(count * heads, channels, height, width)
        grid = (2 * location[:, :, :, number] - 1).transpose(1, 2).reshape(-1, queries, points, 2)
        samples.append(functional.grid_sample(maps, grid, align_corners=False))
    flat = weights.transpose(1, 2).reshape(count * heads, 1, queries, -1)
    return (torch.cat(samples, -1) * flat).sum(-1).reshape(count, -1, queries).transpose(1, 2)


# ------------------------------------------------------------------------------------------------ learning


def detection_loss(boxes: Tensor, scores: Tensor, scene: Scene) -> Tensor:
    """Each query must predict the shape whose centre is in its cell, all others that there is none."""
    picture, shape = (scene.kinds >= 0).nonzero(as_tuple=True)
    targets = scene.boxes[picture, shape]
    cell = cell_of(targets)
    wanted = torch.full(scores.shape[:2], len(KINDS))
    wanted[picture, cell] = scene.kinds[picture, shape]
    weight = torch.tensor([1.0] * len(KINDS) + [0.2])
    kinds = functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), weight)
    found = boxes[picture, cell]
    return kinds + 4 * (found - targets).abs().mean() + (1 - overlap(found, targets)).mean()


def cell_of(boxes: Tensor) -> Tensor:
    """Number of the query in charge of boxes (..., 4)."""
    column, row = (boxes[..., :2] * GRID).long().unbind(-1)
    return row * GRID + column


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of boxes (..., 4)."""
    low = torch.maximum(one[..., :2] - one[..., 2:] / 2, other[..., :2] - other[..., 2:] / 2)
    high = torch.minimum(one[..., :2] + one[..., 2:] / 2, other[..., :2] + other[..., 2:] / 2)
    common = (high - low).clamp(min=0).prod(-1)
    return common / (one[..., 2:].prod(-1) + other[..., 2:].prod(-1) - common).clamp(min=1e-9)


def warm_up(backbone: Backbone, generator: torch.Generator) -> None:
    """Trains the backbone, entirely locally, to name what is under each coarse cell."""
    head = nn.Conv2d(WIDTH, len(KINDS) + 1, 1)
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], RATE)
    for _ in range(WARM_UP_STEPS):
        scene = draw(BATCH, generator)
        cells = functional.avg_pool2d(scene.masks.float(), SIDE // GRID)  # share of each cell that is covered
        covered, first = cells.max(1)
        kinds = scene.kinds[:, :, None, None].expand_as(cells).gather(1, first[:, None])[:, 0]
        loss = functional.cross_entropy(
            head(backbone(scene.images)[1]), kinds.where(covered > 0.5, len(KINDS))
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def fine_tune(detector: Detector, client: Client, generator: torch.Generator) -> None:
    """Runs Adam on fresh pictures at every step; the backbone learns at a tenth of the rate."""
    attend, mode = remote_attention(client), remote(client, min_bytes=0)  # everything, however small
    head = [value for name, value in detector.named_parameters() if not name.startswith("backbone")]
    groups: list[dict[str, Any]] = [
        {"params": head},
        {"params": [*detector.backbone.parameters()], "lr": RATE / 10},
    ]
    optimizer = torch.optim.Adam(groups, RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [RATE, RATE / 10], STEPS)
    started = time.perf_counter()
    for step in range(1, STEPS + 1):
        scene = draw(BATCH, generator)
        boxes, scores = detector(scene.images, attend)
        loss = detection_loss(boxes, scores, scene)
        optimizer.zero_grad()
        with mode:
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step == 1 or step % 40 == 0:
            print(f"  step {step:3d}: loss {loss.item():.3f}", flush=True)
    print(f"{STEPS} steps in {time.perf_counter() - started:.0f} s; beside the attention:\n{mode.summary()}")


def remote_attention(client: Client) -> Attention:
    """Deformable attention with its gradient from the service."""

    def attend(value: Tensor, levels: Tensor, starts: Tensor, location: Tensor, weights: Tensor) -> Tensor:
        return multi_scale_deformable_attention(
            value, levels, starts, location, weights, client=client, label="deformable_detector"
        )

    return attend


# ------------------------------------------------------------------------------------------------ measures


def worst_difference(detector: Detector, client: Client, scene: Scene) -> float:
    """One step's gradients, remote and by PyTorch alone; largest difference relative to the largest value."""

    def gradients(attend: Attention) -> list[Tensor]:
        detector.zero_grad()
        boxes, scores = detector(scene.images, attend)
        detection_loss(boxes, scores, scene).backward()  # type: ignore[no-untyped-call]
        return [value.grad.clone() for value in detector.parameters() if value.grad is not None]

    local = gradients(plain_attention)
    with remote(client, min_bytes=0):
        ours = gradients(remote_attention(client))
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-9))
        for one, other in zip(ours, local, strict=True)
    )


@torch.no_grad()
def measure(detector: Detector, scene: Scene) -> tuple[float, float]:
    """Share of shapes found, and the mean overlap of boxes with the shapes, by the queries in charge.

    A shape is found if its kind is right and its box overlaps by at least one half.
    """
    boxes, scores = detector(scene.images, plain_attention)
    picture, shape = (scene.kinds >= 0).nonzero(as_tuple=True)
    targets, cell = scene.boxes[picture, shape], cell_of(scene.boxes[picture, shape])
    fits = overlap(boxes[picture, cell], targets)
    named = scores[picture, cell].argmax(-1) == scene.kinds[picture, shape]
    return float(((fits >= 0.5) & named).float().mean()), float(fits.mean())


def main() -> int:
    """Command line; the exit status tells whether it learned, and whether the gradients were right."""
    parser = argparse.ArgumentParser(description="Fine-tune a deformable-attention detector remotely.")
    parser.add_argument("--target", default="localhost:50051", help="address of the server")
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    unseen = draw(256, torch.Generator().manual_seed(2))
    with Client(options.target, timeout_s=60) as client:
        devices = client.server_info().devices
        print(f"gradients from {', '.join(f'{device.name} ({device.backend})' for device in devices)}")
        backbone = Backbone()
        warm_up(backbone, generator)
        detector = Detector(backbone)
        difference = worst_difference(detector, client, draw(BATCH, generator))
        print(f"gradients of one step: {difference:.1e} from PyTorch's own, relative to the largest")
        before = measure(detector, unseen)
        fine_tune(detector, client, generator)
    after = measure(detector, unseen)
    print(f"shapes found: {before[0]:.3f} before, {after[0]:.3f} after")
    print(f"overlap of boxes: {before[1]:.3f} before, {after[1]:.3f} after")
    return 0 if difference <= WANTED_AGREEMENT and after[0] >= WANTED_FOUND else 1


if __name__ == "__main__":
    sys.exit(main())
