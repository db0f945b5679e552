"""JAX functions whose gradients are computed by the service.

The forward pass runs in JAX and may be compiled. The gradient is a host callback: it needs devices whose
arrays the host can access, and cannot be differentiated again.

Example:
    >>> def loss(x, scale, bias):
    ...     return (group_norm(x, scale, bias, groups=8, client=client) ** 2).mean()
    >>> x, scale, bias = jnp.ones((2, 64, 8, 8)), jnp.ones(64), jnp.zeros(64)
    >>> jax.jit(jax.grad(loss))(x, scale, bias).shape
    (2, 64, 8, 8)

This package imports jax; `npugrad_client` itself never does.
"""

from __future__ import annotations

from npugrad_client._policy import Policies, RemoteWarning
from npugrad_client._summary import Summary, SummaryRow
from npugrad_client.jax._deformable import multi_scale_deformable_attention
from npugrad_client.jax._floyd import fused_floyd_attention
from npugrad_client.jax._grid_sample import grid_sample
from npugrad_client.jax._group_norm import group_norm
from npugrad_client.jax._layer_norm import layer_norm
from npugrad_client.jax._remote_gradient import remote_gradient

__all__ = [
    "Policies",
    "RemoteWarning",
    "Summary",
    "SummaryRow",
    "fused_floyd_attention",
    "grid_sample",
    "group_norm",
    "layer_norm",
    "multi_scale_deformable_attention",
    "remote_gradient",
]
