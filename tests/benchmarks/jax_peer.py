"""JAX on the CPU, compiled by XLA: each operator as a user writes it, its derivative in one jit.

XLA has none of these operators. GroupNorm's backward is its formula; the others are the derivative (vjp) of a
forward pass by gathers or einsum, which is part of the timed call: XLA decides what of it is needed. Sampling
positions are computed in float32 whatever type the data has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.benchmarks.operands import Call, Operands, made
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM, LAYER_NORM, MSDA

from npugrad.meta import CallMeta

Arrays = Mapping[str, jax.Array]
Grads = Mapping[str, jax.Array]


class JaxCall:
    def prepare(self, case: Mapping[str, Any]) -> Call:
        return self.on(case, *made(case))

    def on(self, case: Mapping[str, Any], call: CallMeta, operands: Operands) -> Call:
        arrays = {
            name: jnp.asarray(array)
            for name, array in operands.items()
            if array is not None and jnp.issubdtype(array.dtype, jnp.floating)
        }
        function = jax.jit(_MAKE[case["operator"]](operands, call.attrs))

        def compiled() -> Mapping[str, Any]:
            return {name: np.asarray(grad) for name, grad in jax.block_until_ready(function(arrays)).items()}

        return compiled


def _group_norm(_: Operands, attrs: Mapping[str, Any]) -> Callable[[Arrays], Grads]:
    n, c, hxw, group = (attrs[name] for name in ("n", "c", "hxw", "group"))

    def backward(a: Arrays) -> Grads:
        shape = (n, group, c // group, hxw)
        x, dy = (a[name].reshape(shape).astype(jnp.float32) for name in ("input", "grad_out"))
        mean, rstd = (a[name].reshape(n, group, 1, 1).astype(jnp.float32) for name in ("mean", "rstd"))
        normal = (x - mean) * rstd
        wide = dy * a["gamma"].reshape(1, group, -1, 1).astype(jnp.float32)
        of_all = wide.mean((2, 3), keepdims=True)
        of_normal = (wide * normal).mean((2, 3), keepdims=True)
        dx = rstd * (wide - of_all - normal * of_normal)
        return {
            "grad_input": dx.reshape(a["input"].shape).astype(a["input"].dtype),
            "grad_gamma": (dy * normal).sum((0, 3)).reshape(c).astype(a["gamma"].dtype),
            "grad_beta": dy.sum((0, 3)).reshape(c).astype(a["gamma"].dtype),
        }

    return backward


def _sampled(image: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Bilinear samples, zeros outside.

    Args:
        image: (H, W, C).
        x: Columns, any shape.
        y: Rows, of the same shape.

    Returns:
        The shape of `x`, then C.
    """
    height, width, _ = image.shape
    left, top = jnp.floor(x), jnp.floor(y)
    found = jnp.zeros((*x.shape, image.shape[-1]), image.dtype)
    for column, across in ((left, left + 1 - x), (left + 1, x - left)):
        for row, down in ((top, top + 1 - y), (top + 1, y - top)):
            inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
            share = jnp.where(inside, across * down, 0).astype(image.dtype)
            rows, columns = (jnp.where(inside, each, 0).astype(jnp.int32) for each in (row, column))
            found = found + share[..., None] * image[rows, columns]
    return found


def _grid_sampler(_: Operands, attrs: Mapping[str, Any]) -> Callable[[Arrays], Grads]:
    assert (attrs["interpolation_mode"], attrs["padding_mode"], attrs["align_corners"]) == (0, 0, False)

    def forward(image: jax.Array, grid: jax.Array) -> jax.Array:
        height, width = image.shape[2:]
        wide = grid.astype(jnp.float32)
        x, y = ((wide[..., 0] + 1) * width - 1) / 2, ((wide[..., 1] + 1) * height - 1) / 2
        return jnp.moveaxis(jax.vmap(_sampled)(jnp.moveaxis(image, 1, -1), x, y), -1, 1)

    def backward(a: Arrays) -> Grads:
        _, vjp = jax.vjp(forward, a["input"], a["grid"])
        return dict(zip(("input_grad", "grid_grad"), vjp(a["grad_output"]), strict=True))

    return backward


def _deformable_attention(operands: Operands, attrs: Mapping[str, Any]) -> Callable[[Arrays], Grads]:
    shapes, starts = (np.asarray(operands[name]).tolist() for name in ("spatial_shape", "level_start_index"))

    def forward(value: jax.Array, location: jax.Array, weight: jax.Array) -> jax.Array:
        """(bs, keys, heads, C), (bs, queries, heads, levels, points, 2 or without 2)."""
        total: Any = 0
        for level, ((height, width), first) in enumerate(zip(shapes, starts, strict=True)):
            image = value[:, first : first + height * width]
            image = jnp.moveaxis(image.reshape(-1, height, width, *value.shape[2:]), 3, 1)
            wide = jnp.moveaxis(location[:, :, :, level].astype(jnp.float32), 2, 1)
            x, y = wide[..., 0] * width - 0.5, wide[..., 1] * height - 0.5
            samples = jax.vmap(jax.vmap(_sampled))(image, x, y)
            total = total + jnp.einsum("bhqpc,bqhp->bqhc", samples, weight[:, :, :, level])
        return jnp.asarray(total)

    def backward(a: Arrays) -> Grads:
        out, vjp = jax.vjp(forward, a["value"], a["location"], a["attn_weight"])
        grads = vjp(a["grad_output"].reshape(out.shape))
        return dict(zip(("grad_value", "grad_location", "grad_attn_weight"), grads, strict=True))

    return backward


def _floyd_attention(_: Operands, attrs: Mapping[str, Any]) -> Callable[[Arrays], Grads]:
    names = ("query", "key1", "value1", "key2", "value2")

    def forward(q: jax.Array, k1: jax.Array, v1: jax.Array, k2: jax.Array, v2: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhnmd,bhnkd->bhnmk", q, k1) + jnp.einsum("bhnmd,bhkmd->bhnmk", q, k2)
        share = jax.nn.softmax(scores * attrs["scale_value"], -1)
        return jnp.einsum("bhnmk,bhnkd->bhnmd", share, v1) + jnp.einsum("bhnmk,bhkmd->bhnmd", share, v2)

    def backward(a: Arrays) -> Grads:
        _, vjp = jax.vjp(forward, *(a[name] for name in names))
        return dict(zip(("dq", "dk1", "dv1", "dk2", "dv2"), vjp(a["dy"]), strict=True))

    return backward


def _layer_norm(_: Operands, attrs: Mapping[str, Any]) -> Callable[[Arrays], Grads]:
    shape = attrs["normalized_shape"]

    def backward(a: Arrays) -> Grads:
        x, dy = (a[name].astype(jnp.float32) for name in ("input", "grad_out"))
        mean, rstd = (a[name].astype(jnp.float32) for name in ("mean", "rstd"))
        rows, axes = tuple(range(x.ndim - len(shape))), tuple(range(x.ndim - len(shape), x.ndim))
        normal = (x - mean) * rstd
        wide = dy * a["weight"].astype(jnp.float32)
        of_all, of_normal = (one.mean(axes, keepdims=True) for one in (wide, wide * normal))
        return {
            "grad_input": (rstd * (wide - of_all - normal * of_normal)).astype(a["input"].dtype),
            "grad_weight": (dy * normal).sum(rows).astype(a["weight"].dtype),
            "grad_bias": dy.sum(rows).astype(a["weight"].dtype),
        }

    return backward


_MAKE: dict[str, Callable[[Operands, Mapping[str, Any]], Callable[[Arrays], Grads]]] = {
    GROUP_NORM.name: _group_norm,
    GRID_SAMPLER.name: _grid_sampler,
    MSDA.name: _deformable_attention,
    FLOYD.name: _floyd_attention,
    LAYER_NORM.name: _layer_norm,
}
