"""Refuses illegal calls before any work is done, as the service would; shared by the adapters.

The adapters of PyTorch and JAX compute a forward pass first and call the service later, when it is too late
to report a wrong shape. The checks need only each tensor's type and shape, which are known early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad.errors import WrongType
from npugrad.meta import TensorMeta
from npugrad.ops import get_operator
from npugrad.products import Product
from npugrad.validation import error_from_verdict, make_call, validate_anywhere
from npugrad_client._client import Client

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFORMABLE_ATTENTION = "multi_scale_deformable_attention_grad"
FLOYD_ATTENTION = "fused_floyd_attention_grad"
LANES = 8
"""How often the documents of Floyd attention require the statistics of a row to be repeated."""


def require_client(name: str, client: object) -> None:
    """Rejects anything but a client, while the caller's line is on top of the traceback.

    Raises:
        WrongType: It is something else, such as an address or an `AsyncClient`, which backward cannot await.
    """
    if not isinstance(client, Client):
        raise WrongType(f"{name}: client: found {type(client).__name__}; expected a Client")


def require_legal(
    operator: str,
    metas: Mapping[str, TensorMeta | None],
    attrs: Mapping[str, Any],
    product: Product | str = Product.ATLAS_A2,
) -> None:
    """Refuses calls that a product does not accept with any release of CANN.

    The default, Atlas A2, allows the most: what it refuses, no product accepts.

    Raises:
        OperatorError: The documents refuse the call.
        MalformedRequest: An attribute is missing, has the wrong type or an unknown value, such as a mode.
    """
    record = get_operator(operator)
    verdict = validate_anywhere(record, make_call(record, metas, attrs, product=product))
    if verdict.violations:
        raise error_from_verdict(record, verdict)


def require_legal_deformable_attention(metas: Mapping[str, TensorMeta | None]) -> None:
    """Refuses five operands of a forward pass if the service would refuse its gradient; errors as above."""
    value, location = metas["value"], metas["location"]
    grad_output = None
    if value is not None and location is not None:
        shape = (*location.shape[:2], value.shape[-2] * value.shape[-1]) if value.rank == 4 else ()
        grad_output = TensorMeta(value.dtype, shape)
    require_legal(DEFORMABLE_ATTENTION, {**metas, "grad_output": grad_output}, {})


def default_floyd_scale(query: Any) -> float:
    """1 / sqrt(D) of query, (B, H, N, M, D); 1 if it is None or has no D, as such a call is refused."""
    depth = query.shape[-1] if query is not None and query.shape else 0
    return float(depth**-0.5) if depth else 1.0


def require_legal_floyd_attention(metas: Mapping[str, TensorMeta | None], scale: float) -> None:
    """Does the same for the five tensors of Floyd attention and its mask."""
    query = metas["query"]
    rows = None if query is None else TensorMeta("float32", (*query.shape[:4], LANES))
    saved = {"dy": query, "softmax_max": rows, "softmax_sum": rows, "attention_in": query}
    require_legal(FLOYD_ATTENTION, {**metas, **saved}, {"scale_value": scale})
