"""What the functions of this package share: shapes and types for the validator, options of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from npugrad.ops import get_operator
from npugrad.spec import TensorMeta
from npugrad.validation import error_from_verdict, make_call, validate_call
from npugrad_client import Client, _arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from npugrad.spec import Verdict


class Options(TypedDict, total=False):
    """What every call of the service takes beside operands and attributes.

    Attributes:
        timeout_s: Deadline of the whole call in seconds; None for the client's default.
        deterministic: Ask for results that do not depend on the order of summation.
        priority: Calls of higher priority leave the queue first; -100 to 100.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call and refuse a result that differs.
    """

    timeout_s: float | None
    deterministic: bool
    priority: int
    label: str
    verify: bool


def require_client(name: str, client: Client) -> None:
    """Refuses what is no client while the caller's own line is on top of the traceback.

    Raises:
        TypeError: It is something else, such as an address or an `AsyncClient`, which backward cannot await.
    """
    if not isinstance(client, Client):
        raise TypeError(f"{name}: client: found {type(client).__name__}; expected a Client")


def metas(operator: str, inputs: Mapping[str, Tensor | None]) -> dict[str, TensorMeta | None]:
    """Shape and type of each tensor; of its data nothing is touched.

    Raises:
        TypeError: The service knows nothing like it.
    """
    return {
        name: None if tensor is None else _meta(operator, name, tensor) for name, tensor in inputs.items()
    }


def _meta(operator: str, name: str, tensor: Tensor) -> TensorMeta:
    array = _arrays.to_numpy(tensor, operator, name)
    return TensorMeta(array.dtype, array.shape)


def verdict_of(
    operator: str, inputs: Mapping[str, Tensor | None], attrs: Mapping[str, Any], product: str
) -> Verdict:
    """What the documents say of a call on a product.

    Raises:
        TypeError: The service knows nothing like one of the operands.
    """
    spec = get_operator(operator)
    return validate_call(spec, make_call(spec, metas(operator, inputs), attrs, product=product))


def require_legal(operator: str, inputs: Mapping[str, Tensor | None], attrs: Mapping[str, Any]) -> None:
    """Refuses a call before any work is done for it, as the service would.

    Raises:
        OperatorError: The documents refuse the call on the Atlas A2, which allows the most.
        TypeError: The service knows nothing like one of the operands.
    """
    verdict = verdict_of(operator, inputs, attrs, "atlas-a2")
    if verdict.violations:
        raise error_from_verdict(get_operator(operator), verdict)
