"""Uses of the client with PyTorch's tensors that must type-check as they stand; never run."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

from npugrad_client import Client, FusedFloydAttentionGradResult

client = Client("localhost:50051")
floyd: FusedFloydAttentionGradResult[torch.Tensor] = client.fused_floyd_attention_grad(
    query=torch.zeros(1), scale_value=1.0
)
assert_type(floyd.dk2, torch.Tensor)
