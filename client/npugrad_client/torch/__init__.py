"""PyTorch: runs backward operators of an unmodified model on the service.

`remote` sends the operators the service supports from the backward pass of any model.
`multi_scale_deformable_attention` and `fused_floyd_attention` are functions for your own models, and
`drop_in` replaces the compiled extension that Deformable-DETR and mmcv import.

Example:
    >>> model = torch.nn.GroupNorm(8, 64)
    >>> with Client("localhost:50051") as client, remote(client) as mode:
    ...     model(torch.rand(4, 64, 32, 32)).square().mean().backward()
    >>> print(mode.summary())
    operator             where  why  calls   MiB  seconds
    group_norm_backward  sent   -        1  3.00    ...

This package imports torch; `npugrad_client` itself never does.
"""

from __future__ import annotations

from npugrad_client._costs import CostRow
from npugrad_client._policy import MIN_BYTES, Policies, RemoteWarning
from npugrad_client._summary import Summary, SummaryRow
from npugrad_client.torch._deformable import multi_scale_deformable_attention
from npugrad_client.torch._drop_in import DropIn, drop_in
from npugrad_client.torch._floyd import fused_floyd_attention
from npugrad_client.torch._recognised import register_deformable_attention
from npugrad_client.torch._remote import Remote, remote

__all__ = [
    "MIN_BYTES",
    "CostRow",
    "DropIn",
    "Policies",
    "Remote",
    "RemoteWarning",
    "Summary",
    "SummaryRow",
    "drop_in",
    "fused_floyd_attention",
    "multi_scale_deformable_attention",
    "register_deformable_attention",
    "remote",
]
