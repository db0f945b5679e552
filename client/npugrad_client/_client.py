"""The client: typed calls to one server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad.ops import get_operator
from npugrad.validation import make_call
from npugrad_client import _info
from npugrad_client._call import finish, prepare
from npugrad_client._channels import STREAM_FROM_BYTES
from npugrad_client._generated_ops import Operators
from npugrad_client._transport import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from npugrad.call import CallOptions, ExecutionInfo
    from npugrad.products import Product
    from npugrad.spec import OpSpec, TensorMeta, Verdict
    from npugrad_client._info import OperatorInfo, ServerInfo


class Client(Operators):
    """Calls one npugrad server.

    Thread safety: one client may be shared by any number of threads.

    Processes: a client belongs to the process that opened it. gRPC does not survive a fork, so open clients
    in the processes that use them, and none in a parent that forks (multiprocessing by fork, a DataLoader
    with workers) unless it is closed before, or ``GRPC_ENABLE_FORK_SUPPORT=1`` is set from the start.

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
            timeout_s: Deadline of every call in seconds unless the call says otherwise; None for none. A
                server that cannot be reached is an error at once, with or without a deadline.
            stream_from_bytes: Calls with this much data in either direction are streamed.

        Raises:
            TypeError: The target is no text.
            ValueError: The target is empty.
            RuntimeError: The process was forked while a client was open; see above.
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
            timeout_s: Deadline in seconds; None for the client's default.

        Returns:
            Status, every violation and the inferred outputs, as `npugrad.validate` gives them locally.

        Raises:
            UnsupportedOperator: There is no operator of this name.
            MalformedRequest: An attribute is missing, has the wrong type or is outside int64.
            TypeError: A name that the operator does not have, or an operand that is no `TensorMeta`.
            ValueError: There is no such product.
            TransportError: Nothing usable came back.
        """
        spec = get_operator(operator)
        call = make_call(spec, inputs, attrs, outputs)
        request = _info.encode_validation(spec, call, product)
        return _info.decode_verdict(self._transport.ask("validate", request, self._deadline(timeout_s)))

    def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Versions, limits, product and devices of the server, and how busy it is now.

        Args:
            timeout_s: Deadline in seconds; None for the client's default.

        Raises:
            TransportError: Nothing usable came back.
        """
        return _info.decode_server_info(
            self._transport.ask("server_info", _info.SERVER_INFO_REQUEST, self._deadline(timeout_s))
        )

    def list_operators(
        self, product: Product | str | None = None, timeout_s: float | None = None
    ) -> tuple[OperatorInfo, ...]:
        """The operators as the server describes them, with parameters and constraints.

        Args:
            product: Product to describe; None for the server's own.
            timeout_s: Deadline in seconds; None for the client's default.

        Raises:
            ValueError: There is no such product.
            TransportError: Nothing usable came back.
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
        prepared = prepare(spec, inputs, attrs, out, options)
        answer = self._transport.run(prepared, self._deadline(timeout_s))
        return finish(prepared, answer, inputs, out), answer.info
