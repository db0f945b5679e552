"""Grid sampling of images: bilinear and nearest, with every padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from npugrad_client._legality import require_client, require_legal
from npugrad_client.jax._callback import Array, Service, like, metas

if TYPE_CHECKING:
    from npugrad_client import Client

OPERATOR = "grid_sampler_2d_backward"
_MODES: dict[Any, Any] = {"bilinear": 0, "nearest": 1}
_PADDINGS: dict[Any, Any] = {"zeros": 0, "border": 1, "reflection": 2}
_FAR = -100.0  # the position given to a point that has none; no image has pixels around it


def grid_sample(
    input: Array,
    grid: Array,
    *,
    client: Client,
    mode: int | str = "bilinear",
    padding_mode: int | str = "zeros",
    align_corners: bool = False,
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Array:
    """Samples images at the points of a grid; the service computes the gradients of both.

    Args:
        input: (N, C, H, W) with H and W above 0, float32, float16 or bfloat16. The sampled images.
        grid: (N, OH, OW, 2), dtype of input. Sampling points (x, y), inside the image from -1 to 1.
        client: Who calls the service in the backward pass.
        mode: ``"bilinear"`` or ``"nearest"``.
        padding_mode: What a point outside the image reads: ``"zeros"``, ``"border"`` or ``"reflection"``.
        align_corners: True: -1 and 1 are the centres of the corner pixels; False: their outer edges.
        timeout_s: Deadline of the call in seconds; None for the client's default.
        deterministic: Ask for results that do not depend on the order of summation.
        priority: Calls of higher priority leave the queue first; -100 to 100.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call and refuse a result that differs.

    Returns:
        (N, C, OH, OW), dtype of input.

    Raises:
        NullOperand: 161001. input or grid is None.
        InvalidOperand: 161002. An operand breaks a documented rule; when the function is traced.
        MalformedRequest: There is no such mode or padding.
        TypeError: The client is no `Client`.

    Example:
        >>> def loss(input, grid):                                     # doctest: +SKIP
        ...     return grid_sample(input, grid, client=client, padding_mode="border").sum()
        >>> jax.jit(jax.grad(loss, argnums=(0, 1)))(input, grid)       # doctest: +SKIP
    """
    require_client("grid_sample", client)
    service = Service(client, timeout_s, deterministic, priority, label, verify)
    attrs = {
        "interpolation_mode": mode,
        "padding_mode": padding_mode,
        "align_corners": align_corners,
        "output_mask": (True, True),
    }
    missing = input is None or grid is None
    grad_output = like(() if missing else (*input.shape[:2], *grid.shape[1:3]), input)
    operands = {"input": input, "grid": grid, "grad_output": grad_output}
    require_legal(OPERATOR, metas(OPERATOR, operands), attrs)
    # Numbers are as good as names to the documents, and so they are here.
    how = _How(_MODES.get(mode, mode), _PADDINGS.get(padding_mode, padding_mode), bool(align_corners))
    result: Array = _grid_sample(service, how, input, grid)
    return result


class _How(NamedTuple):
    """Interpolation mode, padding mode and alignment as the documents number them."""

    interpolation_mode: int
    padding_mode: int
    align_corners: bool


def _apply(service: Service, how: _How, input: Array, grid: Array) -> Array:
    return sample(input, grid, how.interpolation_mode, how.padding_mode, how.align_corners)


def _forward(service: Service, how: _How, input: Array, grid: Array) -> tuple[Array, tuple[Array, Array]]:
    return _apply(service, how, input, grid), (input, grid)


def _backward(service: Service, how: _How, saved: tuple[Array, Array], grad: Array) -> Any:
    input, grid = saved
    operands = {"grad_output": grad, "input": input, "grid": grid}
    attrs = {**how._asdict(), "output_mask": (True, True)}
    return service.gradients(OPERATOR, operands, attrs, {"input_grad": input, "grid_grad": grid})


_grid_sample: Any = jax.custom_vjp(_apply, nondiff_argnums=(0, 1))
_grid_sample.defvjp(_forward, _backward)


def sample(
    input: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Array:
    """The sampling itself, in float32; (N, C, OH, OW), dtype of input."""
    height, width = input.shape[2:]
    points = grid.astype(jnp.float32)
    x = _position(points[..., 0], width, padding_mode, align_corners)
    y = _position(points[..., 1], height, padding_mode, align_corners)
    images = input.astype(jnp.float32)
    if interpolation_mode == _MODES["nearest"]:
        return _read(images, jnp.rint(y), jnp.rint(x)).astype(input.dtype)
    left, top = jnp.floor(x), jnp.floor(y)
    tx, ty = (x - left)[:, None], (y - top)[:, None]
    total = _read(images, top, left) * (1 - tx) * (1 - ty)
    total += _read(images, top, left + 1) * tx * (1 - ty)
    total += _read(images, top + 1, left) * (1 - tx) * ty
    total += _read(images, top + 1, left + 1) * tx * ty
    return total.astype(input.dtype)


def _read(images: Array, y: Array, x: Array) -> Array:
    """(N, C, *) pixels at whole positions (N, *); 0 outside of the images."""
    height, width = images.shape[2:]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    row = jnp.clip(y, 0, height - 1).astype(jnp.int32)
    column = jnp.clip(x, 0, width - 1).astype(jnp.int32)
    pixels = jax.vmap(lambda image, i, j: image[:, i, j])(images, row, column)
    return jnp.where(inside[:, None], pixels, 0)


def _position(value: Array, size: int, padding_mode: int, align_corners: bool) -> Array:
    """Positions in pixels after padding; far outside where there is none."""
    position = (value + 1) / 2 * (size - 1) if align_corners else ((value + 1) * size - 1) / 2
    if padding_mode == _PADDINGS["reflection"]:
        position = _reflect(position, size, align_corners)
    if padding_mode != _PADDINGS["zeros"]:
        position = jnp.clip(position, 0, size - 1)
    return jnp.where(jnp.isfinite(position), jnp.clip(position, _FAR, size + 1.0), _FAR)


def _reflect(position: Array, size: int, align_corners: bool) -> Array:
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if span == 0:
        return jnp.zeros_like(position)
    distance = jnp.abs(position - low)
    over = jnp.fmod(distance, span)
    is_even = jnp.fmod(jnp.floor(distance / span), 2) == 0
    return jnp.where(is_even, over + low, span - over + low)
