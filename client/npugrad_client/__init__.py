"""Python client of npugrad: runs backward operators on a remote server.

Example:
    >>> from npugrad_client import Client
    >>> with Client("localhost:50051") as client:
    ...     [device.name for device in client.server_info().devices]
    ['cpu:0']

The other examples use three names without defining them: `np` is NumPy, `client` is an open client, and
`call` holds the keyword arguments of a legal call, as in the example of the operator's method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad import __version__ as __version__
from npugrad.lazy import on_demand as _on_demand

if TYPE_CHECKING:
    from npugrad.call import ExecutionInfo, VerifiedOutput
    from npugrad.errors import Violation
    from npugrad.meta import TensorMeta
    from npugrad.recipe import Recipe
    from npugrad.validation import Verdict
    from npugrad_client._async_client import AsyncClient
    from npugrad_client._client import Client
    from npugrad_client._generated_ops import (
        BatchNormBackwardResult,
        EmbeddingDenseBackwardResult,
        FusedFloydAttentionGradResult,
        GeluBackwardV2Result,
        GridSampler2DBackwardResult,
        GridSampler3DBackwardResult,
        GroupNormBackwardResult,
        LayerNormBackwardResult,
        MultiScaleDeformableAttentionGradResult,
        NLLLossBackwardResult,
        SiluBackwardResult,
        SoftmaxBackwardResult,
    )
    from npugrad_client._info import (
        ConstraintInfo,
        DeviceInfo,
        OperatorInfo,
        ParameterInfo,
        ServerInfo,
        ServerLimits,
    )
    from npugrad_client._progress import Progress
    from npugrad_client._retry import RetryPolicy
    from npugrad_client._tls import Tls
    from npugrad_client.errors import (
        CallTooLarge,
        Cancelled,
        CircuitOpen,
        ClientUnusable,
        ConnectError,
        DeadlineExceeded,
        DeviceError,
        DeviceOutOfMemory,
        InvalidOperand,
        InvalidRecipe,
        MalformedRequest,
        MalformedTensor,
        NpugradError,
        NullOperand,
        OperatorError,
        RecipeMismatch,
        RequestError,
        ServerBusy,
        ServerDraining,
        TenantRefused,
        TilingError,
        TlsError,
        TransportError,
        UnsafeIndices,
        UnsafeLevels,
        UnsupportedOperator,
        UsageError,
        WorkerLost,
        WrongType,
        WrongValue,
    )

__all__ = [
    "AsyncClient",
    "BatchNormBackwardResult",
    "CallTooLarge",
    "Cancelled",
    "CircuitOpen",
    "Client",
    "ClientUnusable",
    "ConnectError",
    "ConstraintInfo",
    "DeadlineExceeded",
    "DeviceError",
    "DeviceInfo",
    "DeviceOutOfMemory",
    "EmbeddingDenseBackwardResult",
    "ExecutionInfo",
    "FusedFloydAttentionGradResult",
    "GeluBackwardV2Result",
    "GridSampler2DBackwardResult",
    "GridSampler3DBackwardResult",
    "GroupNormBackwardResult",
    "InvalidOperand",
    "InvalidRecipe",
    "LayerNormBackwardResult",
    "MalformedRequest",
    "MalformedTensor",
    "MultiScaleDeformableAttentionGradResult",
    "NLLLossBackwardResult",
    "NpugradError",
    "NullOperand",
    "OperatorError",
    "OperatorInfo",
    "ParameterInfo",
    "Progress",
    "Recipe",
    "RecipeMismatch",
    "RequestError",
    "RetryPolicy",
    "ServerBusy",
    "ServerDraining",
    "ServerInfo",
    "ServerLimits",
    "SiluBackwardResult",
    "SoftmaxBackwardResult",
    "TenantRefused",
    "TensorMeta",
    "TilingError",
    "Tls",
    "TlsError",
    "TransportError",
    "UnsafeIndices",
    "UnsafeLevels",
    "UnsupportedOperator",
    "UsageError",
    "Verdict",
    "VerifiedOutput",
    "Violation",
    "WorkerLost",
    "WrongType",
    "WrongValue",
]

if not TYPE_CHECKING:
    # The command's help and completion need neither NumPy nor gRPC.
    __getattr__, __dir__ = _on_demand(
        __name__,
        {
            "npugrad.call": ("ExecutionInfo", "VerifiedOutput"),
            "npugrad.errors": ("Violation",),
            "npugrad.meta": ("TensorMeta",),
            "npugrad.recipe": ("Recipe",),
            "npugrad.validation": ("Verdict",),
            "_async_client": ("AsyncClient",),
            "_client": ("Client",),
            "_generated_ops": tuple(name for name in __all__ if name.endswith("Result")),
            "_info": (
                *("ConstraintInfo", "DeviceInfo", "OperatorInfo", "ParameterInfo"),
                *("ServerInfo", "ServerLimits"),
            ),
            "_progress": ("Progress",),
            "_retry": ("RetryPolicy",),
            "_tls": ("Tls",),
        },
        others="errors",
    )
