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

from npugrad import __version__ as __version__
from npugrad.call import ExecutionInfo, VerifiedOutput
from npugrad.errors import Violation
from npugrad.meta import TensorMeta
from npugrad.operator import Verdict
from npugrad.recipe import Recipe
from npugrad_client._async_client import AsyncClient
from npugrad_client._client import Client
from npugrad_client._generated_ops import (
    FusedFloydAttentionGradResult,
    GridSampler2DBackwardResult,
    GridSampler3DBackwardResult,
    GroupNormBackwardResult,
    LayerNormBackwardResult,
    MultiScaleDeformableAttentionGradResult,
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
    UnsafeLevels,
    UnsupportedOperator,
    UsageError,
    WorkerLost,
    WrongType,
    WrongValue,
)

__all__ = [
    "AsyncClient",
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
    "ExecutionInfo",
    "FusedFloydAttentionGradResult",
    "GridSampler2DBackwardResult",
    "GridSampler3DBackwardResult",
    "GroupNormBackwardResult",
    "InvalidOperand",
    "InvalidRecipe",
    "LayerNormBackwardResult",
    "MalformedRequest",
    "MalformedTensor",
    "MultiScaleDeformableAttentionGradResult",
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
    "TenantRefused",
    "TensorMeta",
    "TilingError",
    "Tls",
    "TlsError",
    "TransportError",
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
