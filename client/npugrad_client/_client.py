"""The client: typed calls to one server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad import layout
from npugrad.errors import MalformedRequest
from npugrad.ops import get_operator
from npugrad.spec import CallMeta, TensorMeta, Verdict
from npugrad.validation import make_call, validate_call
from npugrad_client import _arrays, _info
from npugrad_client._generated_ops import Operators
from npugrad_client._transport import STREAM_FROM_BYTES, Prepared, Transport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import numpy.typing as npt

    from npugrad.call import CallOptions, ExecutionInfo
    from npugrad.products import Product
    from npugrad.spec import OpSpec
    from npugrad_client._info import OperatorInfo, ServerInfo

_INFER_FROM_BYTES = 2**16
"""Below this much operand data a reply is small as well: no need to infer it to choose how to send."""


class Client(Operators):
    """Calls one npugrad server.

    Thread safety: one client may be shared by any number of threads. After a fork, make a new one.

    Example:
        >>> with Client("localhost:50051") as client:          # doctest: +SKIP
        ...     grads = client.group_norm_backward(
        ...         grad_out=grad_out, input=x, mean=mean, rstd=rstd, gamma=weight,
        ...         n=2, c=32, hxw=4096, group=8, output_mask=(True, True, True))
        ...     grads.grad_input, grads.info.device
    """

    def __init__(
        self, target: str, *, timeout_s: float | None = None, stream_from_bytes: int = STREAM_FROM_BYTES
    ) -> None:
        """Opens a client; the connection is made at the first call.

        Args:
            target: ``host:port``, ``unix:path`` or ``dns:///service:port``.
            timeout_s: Deadline of every call in seconds unless the call says otherwise; None for none.
            stream_from_bytes: Calls with this much data in either direction are streamed.
        """
        self.target = target
        self._timeout_s = timeout_s
        self._transport = Transport(target, stream_from_bytes)

    def __enter__(self) -> Client:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the client."""
        self.close()

    def __repr__(self) -> str:
        """Such as ``Client('localhost:50051')``."""
        return f"Client({self.target!r})"

    def close(self) -> None:
        """Closes the connection; calls in flight are cancelled."""
        self._transport.close()

    def validate(
        self,
        operator: str,
        *,
        inputs: Mapping[str, TensorMeta | None],
        attrs: Mapping[str, Any],
        outputs: Mapping[str, TensorMeta | None] | None = None,
        product: Product | str | None = None,
        timeout_s: float | None = None,
    ) -> Verdict:
        """Asks the server which documented constraints a call breaks; no data travels.

        Args:
            operator: Name such as ``"group_norm_backward"``.
            inputs: Input metas by name; a missing one is null.
            attrs: Attributes by name.
            outputs: Declared outputs by name, None for null; missing ones are inferred.
            product: Product to validate for; None for the server's own.
            timeout_s: Deadline in seconds.

        Returns:
            Status, every violation and the inferred outputs, as `npugrad.validate` gives them locally.

        Raises:
            MalformedRequest: An attribute is missing or has the wrong type.
            TypeError: A name that the operator does not have.
            TransportError: Nothing usable came back.
        """
        spec = get_operator(operator)
        call = make_call(spec, inputs, attrs, outputs)
        request = _info.encode_validation(spec, call, product)
        return _info.decode_verdict(self._transport.ask("validate", request, self._deadline(timeout_s)))

    def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Versions, limits, product and devices of the server."""
        return _info.decode_server_info(
            self._transport.ask("server_info", _info.SERVER_INFO_REQUEST, self._deadline(timeout_s))
        )

    def list_operators(
        self, product: Product | str | None = None, timeout_s: float | None = None
    ) -> tuple[OperatorInfo, ...]:
        """The operators as the server describes them, with parameters and constraints.

        Args:
            product: Product to describe; None for the server's own.
            timeout_s: Deadline in seconds.
        """
        request = _info.encode_list(product)
        return _info.decode_operators(
            self._transport.ask("list_operators", request, self._deadline(timeout_s))
        )

    def _deadline(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _run(
        self,
        spec: OpSpec,
        inputs: Mapping[str, Any],
        attrs: Mapping[str, Any],
        out: Mapping[str, Any] | None,
        options: CallOptions,
        timeout_s: float | None,
    ) -> tuple[dict[str, Any], ExecutionInfo]:
        """Sends one call; results by output name and what produced them."""
        problem = options.problem()
        if problem:
            raise MalformedRequest(
                f"{spec.name}: {problem[0]}: {problem[1]}", operator=spec.name, operand=problem[0]
            )
        arrays = {n: None if v is None else _arrays.to_numpy(v, spec.name, n) for n, v in inputs.items()}
        packed = {n: layout.content(a) for n, a in arrays.items() if a is not None}
        metas = {n: packed[n][0] if n in packed else None for n in inputs}
        declared, targets = _declare(spec, out)
        call = make_call(spec, metas, attrs, declared)
        prepared = Prepared(
            spec,
            call,
            {n: data for n, (_, data) in packed.items()},
            options,
            _expected(spec, call),
            _direct(targets),
        )
        answer = self._transport.run(prepared, self._deadline(timeout_s))
        as_torch = any(_arrays.is_torch(v) for v in inputs.values())
        results = {n: _result(spec, n, a, targets.get(n), as_torch) for n, a in answer.arrays.items()}
        return results, answer.info


def _expected(spec: OpSpec, call: CallMeta) -> Mapping[str, TensorMeta | None]:
    if sum(meta.nbytes for meta in call.inputs.values() if meta is not None) < _INFER_FROM_BYTES:
        return {}
    return validate_call(spec, call).outputs


def _declare(
    spec: OpSpec, out: Mapping[str, Any] | None
) -> tuple[dict[str, TensorMeta | None], dict[str, Any]]:
    """Splits `out` into metas to declare and arrays to fill."""
    declared: dict[str, TensorMeta | None] = {}
    targets: dict[str, Any] = {}
    for name, value in (out or {}).items():
        if value is None or isinstance(value, TensorMeta):
            declared[name] = value
            continue
        array = _arrays.to_numpy(value, spec.name, name)
        if not array.flags.writeable:
            raise TypeError(f"{spec.name}: {name}: found a read-only array in out; expected a writable one")
        declared[name] = TensorMeta(array.dtype, array.shape)
        targets[name] = value
    return declared, targets


def _direct(targets: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    arrays = {name: _arrays.to_numpy(value, "", name) for name, value in targets.items()}
    return {name: array for name, array in arrays.items() if array.flags.c_contiguous}


def _result(spec: OpSpec, name: str, array: npt.NDArray[Any] | None, target: Any, as_torch: bool) -> Any:
    if array is None:
        return None
    if target is not None:
        _arrays.fill(target, array, spec.name, name)
        return target
    return _arrays.to_torch(array) if as_torch else array
