"""Grid sampling of images and volumes: bilinear and nearest, with every padding."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from npugrad.usage import reports_usage
from npugrad_client._legality import require_client
from npugrad_client.jax._callback import Array, Service, like, vjp, wide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugrad_client import Client
    from npugrad_client._policy import Policies

_MODES: dict[Any, Any] = {"bilinear": 0, "nearest": 1}
_PADDINGS: dict[Any, Any] = {"zeros": 0, "border": 1, "reflection": 2}
_FAR = -100.0  # the position of points without one; no image has pixels near it


@reports_usage
def grid_sample(
    input: Array,
    grid: Array,
    *,
    client: Client,
    mode: int | str = "bilinear",
    padding_mode: int | str = "zeros",
    align_corners: bool = False,
    policies: Policies | None = None,
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Array:
    """Samples images or volumes at the points of a grid, with remote gradients for both.

    Args:
        input: (N, C, H, W) or (N, C, D, H, W), spatial sizes above 0. The images or volumes. float32, float16
            or bfloat16; volumes also float64.
        grid: (N, OH, OW, 2) or (N, OD, OH, OW, 3), dtype of input. Sampling points (x, y) or (x, y, z),
            inside from -1 to 1.
        client: Client used in the backward pass.
        mode: ``"bilinear"`` or ``"nearest"``.
        padding_mode: Values outside the image: ``"zeros"``, ``"border"`` or ``"reflection"``.
        align_corners: Whether -1 and 1 are the centres of the corner pixels (True) or their outer edges
            (False).
        policies: What to do with calls that are small, rejected or fail; also counts calls. None sends every
            call and raises documented errors when the function is traced.
        timeout_s: Deadline of the call in seconds; None for the client's default.
        deterministic: Request bitwise reproducible results.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call with its reference and fail if the result differs.

    Returns:
        (N, C, OH, OW) or (N, C, OD, OH, OW), dtype of input.

    Raises:
        NullOperand: 161001. input or grid is None.
        InvalidOperand: 161002. The operands are inconsistent, or one violates a documented rule and the
            policy is to raise. Raised when the function is traced.
        MalformedRequest: Unknown mode or padding mode.
        WrongType: An argument is unknown or missing, or `client` is not a `Client`.

    Example:
        >>> def loss(input, grid):
        ...     return grid_sample(input, grid, client=client, padding_mode="border").sum()
        >>> images, grid = jnp.ones((2, 3, 8, 8)), jnp.full((2, 4, 4, 2), 0.3)
        >>> input_grad, grid_grad = jax.jit(jax.grad(loss, argnums=(0, 1)))(images, grid)
        >>> input_grad.shape, grid_grad.shape
        ((2, 3, 8, 8), (2, 4, 4, 2))
    """
    require_client("grid_sample", client)
    service = Service(client, policies, timeout_s, deterministic, priority, label, verify)
    # The documents accept numbers as well as names, and so does this function.
    how = _How(_MODES.get(mode, mode), _PADDINGS.get(padding_mode, padding_mode), bool(align_corners))
    attrs = {**how._asdict(), "output_mask": (True, True)}
    missing, operator = input is None or grid is None, _operator(input)
    grad_output = like(() if missing else (*input.shape[:2], *grid.shape[1 : input.ndim - 1]), input)
    operands = {"input": input, "grid": grid, "grad_output": grad_output}
    service.require(operator, operands, attrs)
    result: Array = _grid_sample(service, how, input, grid)
    return result


def _operator(input: Array) -> str:
    """The operator for volumes if the rank is 5; else that for images, whose error says what it expects."""
    axes = 3 if input is not None and input.ndim == 5 else 2
    return f"grid_sampler_{axes}d_backward"


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
    results = {"input_grad": input, "grid_grad": grid}

    def here() -> tuple[Array, ...]:
        return vjp(partial(_apply, service, how), saved, grad)

    return service.gradients(_operator(input), operands, attrs, results, here)


_grid_sample: Any = jax.custom_vjp(_apply, nondiff_argnums=(0, 1))
_grid_sample.defvjp(_forward, _backward)


def sample(
    input: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Array:
    """The sampling itself, in float32 or more; (N, C, then the axes of the points), dtype of input."""
    dtype = wide(input, grid)
    images, points = input.astype(dtype), grid.astype(dtype)
    at = [
        _position(points[..., -1 - axis], size, padding_mode, align_corners)
        for axis, size in enumerate(input.shape[2:])
    ]
    if interpolation_mode == _MODES["nearest"]:
        return _read(images, [jnp.rint(each) for each in at]).astype(input.dtype)
    first = [jnp.floor(each) for each in at]
    total: Array = 0
    for corner in itertools.product((0, 1), repeat=len(at)):
        weights = [t if step else 1 - t for t, step in zip(map(jnp.subtract, at, first), corner, strict=True)]
        found = _read(images, [start + step for start, step in zip(first, corner, strict=True)])
        total += found * math.prod(weights)[:, None]
    return total.astype(input.dtype)


def _read(images: Array, at: Sequence[Array]) -> Array:
    """(N, C, *) pixels at whole positions (N, *) on each axis; 0 outside the images."""
    inside: Array = True
    index = []
    for along, size in zip(at, images.shape[2:], strict=True):
        inside &= (along >= 0) & (along < size)
        index.append(jnp.clip(along, 0, size - 1).astype(jnp.int32))

    def pick(image: Array, *where: Array) -> Array:
        pixel = (slice(None), *where)
        return image[pixel]

    pixels = jax.vmap(pick)(images, *index)
    return jnp.where(inside[:, None], pixels, 0)


def _position(value: Array, size: int, padding_mode: int, align_corners: bool) -> Array:
    """Positions in pixels after padding; far outside for points without one."""
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
