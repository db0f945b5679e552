"""The blocking client: typed calls to a server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from npugrad.errors import WrongType
from npugrad.registry import REGISTRY
from npugrad.usage import reports_usage, require_number
from npugrad_client import _info
from npugrad_client._batch import Batch, OnError
from npugrad_client._call import finish
from npugrad_client._channels import STREAM_FROM_BYTES, settings
from npugrad_client._clock import CallClock, tracing_by
from npugrad_client._futures import Submit, Threads, run_batch
from npugrad_client._generated_ops import Operators
from npugrad_client._plans import Plans
from npugrad_client._retry import RETRY
from npugrad_client._targets import target_repr
from npugrad_client._transport import Transport
from npugrad_client._warnings import note_gradients

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from opentelemetry.trace import TracerProvider

    from npugrad.call import CallOptions, ExecutionInfo
    from npugrad.meta import TensorMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad.validation import Verdict
    from npugrad_client._arrays import Operand
    from npugrad_client._channels import Settings
    from npugrad_client._clock import Sink
    from npugrad_client._info import OperatorInfo, ServerInfo
    from npugrad_client._progress import Progress
    from npugrad_client._retry import RetryPolicy
    from npugrad_client._tls import Tls

R = TypeVar("R")


@reports_usage
class Client(Operators):
    """Client of an npugrad server, or of several that share the load.

    Thread safety: one client may be shared by any number of threads.

    Processes: a forked process may keep using its parent's client, which opens new connections at the first
    call. A fork waits up to 5 s for calls in other threads; these stay with the parent. With
    ``GRPC_ENABLE_FORK_SUPPORT=0`` in the environment, gRPC would hang in the child, so calls there fail with
    an error that says so. For spawned processes, a client can be pickled; the copy opens its own connections.

    Event loops: a call blocks the event loop it is made from; use `AsyncClient` there.

    Example:
        >>> x, grad_out = np.random.default_rng(0).standard_normal((2, 2, 6, 4), "float32")
        >>> groups = x.reshape(2, 3, -1)
        >>> with Client("localhost:50051") as client:
        ...     grads = client.group_norm_backward(
        ...         grad_out=grad_out, input=x, mean=groups.mean(2), rstd=1 / groups.std(2),
        ...         n=2, c=6, hxw=4, group=3, output_mask=(True, True, True))
        >>> grads.grad_input.shape, grads.grad_gamma.shape
        ((2, 6, 4), (6,))
    """

    _registry = REGISTRY

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        stream_from_bytes: int = STREAM_FROM_BYTES,
        retry: RetryPolicy | None = RETRY,
        tls: Tls | bool | None = None,
        threads: int = 16,
        tracing: bool | TracerProvider = False,
    ) -> None:
        """Creates a client; it connects at the first call.

        Args:
            target: ``host:port``, ``unix:path`` or ``dns:///service:port``, or a list with one address per
                server, among which calls are distributed. A ``dns:///`` name distributes calls among all its
                addresses. The port defaults to 50051.
            timeout_s: Default deadline of a call in seconds, retries included; None for no deadline. With or
                without a deadline, a call to an unreachable server fails after ``retry.retry_for_s``.
            stream_from_bytes: Stream calls with at least this much data in either direction; from 3 MiB on,
                all calls are streamed. A call rejected as too large for one message is sent again as a
                stream, and later calls of that size to that server are streamed as well.
            retry: When to retry calls; None for never.
            tls: Certificates to trust and to present; True to trust the system's certificate authorities;
                None for an unencrypted connection.
            threads: Maximum number of `submit` calls in flight.
            tracing: Record calls, tries and stages as OpenTelemetry spans: True for the global tracer
                provider, or a provider. The trace context of each try is sent to the server in W3C format.

        Raises:
            ImportError: `tracing` is set, but OpenTelemetry is not installed (extra ``otel``).
            WrongType: An argument is unknown or has the wrong type.
            WrongValue: There is no target, a target is no address, `tls` names something that is not PEM,
                or a number is out of range.
            OSError: A file named in `tls` cannot be read.
        """
        require_number("threads", threads, "1 or more", lambda number: number >= 1, whole=True)
        self._open(settings(target, timeout_s, stream_from_bytes, retry, tls), timeout_s, threads, tracing)

    def _open(
        self, chosen: Settings, timeout_s: float | None, threads: int, tracing: bool | TracerProvider
    ) -> None:
        self.target = chosen.name
        self._timeout_s = timeout_s
        self._state = (chosen, timeout_s, threads, tracing)
        self._transport = Transport(chosen, self._registry)
        self._plans = Plans(self._registry)
        self._sinks: list[Sink] = []
        self._tracing = tracing_by(tracing)
        self._threads = Threads(self._transport, threads)

    def __getstate__(self) -> tuple[Settings, float | None, int, bool | TracerProvider]:
        """Pickles the settings a copy is opened with, the private key included."""
        if not isinstance(self._state[-1], bool):
            raise WrongType(
                "tracing: a TracerProvider cannot be pickled; use tracing=True, the global provider of "
                "each process"
            )
        return self._state

    def __setstate__(self, state: tuple[Settings, float | None, int, bool | TracerProvider]) -> None:
        """Opens a client with the pickled settings."""
        self._open(*state)

    def __enter__(self) -> Client:
        """Returns the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the client."""
        self.close()

    def __repr__(self) -> str:
        """Such as ``Client('localhost:50051')``."""
        return f"Client({target_repr(self.target)})"

    def close(self) -> None:
        """Closes the connection and cancels calls in flight.

        Example:
            >>> client = Client("localhost:50051")
            >>> try:
            ...     info = client.server_info()
            ... finally:
            ...     client.close()
        """
        self._threads.close()
        self._transport.close()

    def validate(
        self,
        operator: str,
        *,
        inputs: Mapping[str, Operand | TensorMeta | None],
        attrs: Mapping[str, Any],
        outputs: Mapping[str, TensorMeta | None] | None = None,
        product: Product | str | None = None,
        timeout_s: float | None = None,
    ) -> Verdict:
        """Asks the server which documented constraints a call would violate, without sending data.

        Args:
            operator: Name such as ``"group_norm_backward"``.
            inputs: Metas or operands, as a call takes them, by name; missing ones are null. Of operands, only
                the metas are sent; what a call would refuse for their values is refused here.
            attrs: Attributes by name.
            outputs: Declared outputs by name, None for null; missing ones are inferred.
            product: Product to validate for; None for the server's.
            timeout_s: Deadline in seconds; None for the client's default.

        Returns:
            The status, all violations and the inferred outputs, as from `npugrad.validate`, which does the
            same locally, for metas.

        Raises:
            UnsupportedOperator: Unknown operator.
            MalformedRequest: An attribute is missing, has the wrong type or is out of range.
            UnsafeLevels: The status would be 0, but a level extends beyond the value tensor; only found if
                the levels are given as arrays.
            UnsafeIndices: The same for an index that lies outside the tensor that it is for.
            WrongType: The operator has no parameter of this name, or an operand is neither an array nor a
                `TensorMeta`.
            WrongValue: Unknown product.
            TransportError: The server could not be reached or sent no usable answer.

        Example:
            >>> verdict = client.validate(
            ...     "group_norm_backward", inputs={"input": TensorMeta("float32", (2, 6, 4))},
            ...     attrs=dict(n=2, c=6, hxw=4, group=3, output_mask=(True, True, True)))
            >>> [violation.id for violation in verdict.violations]
            ['grad_out.not_null', 'mean.not_null', 'rstd.not_null']
        """
        asked = _info.Validation(operator, inputs, attrs, outputs, product, registry=self._registry)
        return asked.verdict(self._transport.ask("validate", asked.request, self._deadline(timeout_s)))

    def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Returns the server's versions, limits, product, devices and current load.

        With several servers, one of them answers.

        Args:
            timeout_s: Deadline in seconds; None for the client's default.

        Raises:
            TransportError: The server could not be reached or sent no usable answer.

        Example:
            >>> info = client.server_info(timeout_s=5)
            >>> [(device.name, device.state) for device in info.devices]
            [('cpu:0', 'ready')]
        """
        return _info.decode_server_info(
            self._transport.ask("server_info", _info.SERVER_INFO_REQUEST, self._deadline(timeout_s))
        )

    def list_operators(
        self, product: Product | str | None = None, timeout_s: float | None = None
    ) -> tuple[OperatorInfo, ...]:
        """Lists the server's operators with their parameters and constraints.

        Args:
            product: Product to describe them for; None for the server's.
            timeout_s: Deadline in seconds; None for the client's default.

        Raises:
            WrongValue: Unknown product.
            TransportError: The server could not be reached or sent no usable answer.

        Example:
            >>> operators = client.list_operators()
            >>> [operator.name for operator in operators if operator.supported]
            [..., 'group_norm_backward', ...]
        """
        request = _info.encode_list(product)
        return _info.decode_operators(
            self._transport.ask("list_operators", request, self._deadline(timeout_s))
        )

    @overload
    def run_many(
        self,
        method: Callable[..., R],
        calls: Iterable[Mapping[str, Any]],
        *,
        concurrency: int = 8,
        on_error: Literal["raise"] = "raise",
        progress: bool | str = False,
        copy: bool = False,
    ) -> list[R]: ...

    @overload
    def run_many(
        self,
        method: Callable[..., R],
        calls: Iterable[Mapping[str, Any]],
        *,
        concurrency: int = 8,
        on_error: Literal["return"],
        progress: bool | str = False,
        copy: bool = False,
    ) -> list[R | Exception]: ...

    def run_many(
        self,
        method: Callable[..., R],
        calls: Iterable[Mapping[str, Any]],
        *,
        concurrency: int = 8,
        on_error: OnError = "raise",
        progress: bool | str = False,
        copy: bool = False,
    ) -> list[Any]:
        """Makes many calls, several at a time, and returns the results in the order of the calls.

        Args:
            method: A method of this client, such as ``client.group_norm_backward``.
            calls: Keyword arguments of each call. They are consumed as calls start, so a generator needs
                memory for the operands of `concurrency` calls only.
            concurrency: Maximum number of calls in flight.
            on_error: "raise": raise the first error and cancel calls in flight. "return": return each error
                in place of its result.
            progress: True to show a progress bar, or its title.
            copy: Copy the operands of each call before the next one is taken from `calls`. Without it they
                must not change before the call has its result, so a generator needs a new buffer for each
                call: of one that is filled again, results may be those of later values, without an error.

        Returns:
            Results, or with ``on_error="return"`` errors, in the order of the calls.

        Raises:
            WrongValue: `concurrency` is below 1, or `on_error` is neither "raise" nor "return".
            NpugradError: A call failed and `on_error` is "raise". Any other exception of a call is raised in
                either case.

        Example:
            >>> calls = [{**call, "label": f"sample {i}"} for i in range(4)]
            >>> results = client.run_many(client.group_norm_backward, calls, concurrency=2)
            >>> [grads.grad_input.shape for grads in results]
            [(2, 6, 4), (2, 6, 4), (2, 6, 4), (2, 6, 4)]
        """
        batch = Batch(calls, concurrency, on_error, progress, copy=copy)
        threads = Threads(self._transport, concurrency)
        try:
            return run_batch(batch, method, threads, concurrency)
        finally:
            threads.close()

    def profile(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Context manager that records where the time of each call goes, as a Chrome trace file.

        Open the file in https://ui.perfetto.dev or chrome://tracing. It holds every finished call, failed
        ones included: its tries, its stages, and the stages of the server, centred in the time the client
        waited. A background thread writes it, at most a second after each call, so it can be opened even
        after a crash. Several may be active at once, from any thread, each with its own file. Calls of forked
        processes are not recorded.

        Args:
            path: Output file; overwritten if it exists.

        Raises:
            OSError: The file cannot be opened; or, at the end of the block and unless it raised something
                else, could not be written completely. Calls never fail because of this.

        Example:
            >>> with client.profile("calls.json"):
            ...     grads = client.group_norm_backward(**call)
        """
        from npugrad_client._profile import profiling  # here, because few programs profile

        return profiling(path, self._sinks)

    @property
    def submit(self) -> Submit:
        """The same methods, each returning a `concurrent.futures.Future` immediately.

        Operands must not change before the future is done, unless ``copy=True`` has them copied at once.

        Example:
            >>> futures = [client.submit.group_norm_backward(**call) for _ in range(3)]
            >>> [future.result().grad_input.shape for future in futures]
            [(2, 6, 4), (2, 6, 4), (2, 6, 4)]
        """
        return Submit(self, self._threads)

    def _deadline(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _run(  # noqa: PLR0917 -- what the typed methods, all generated, have
        self,
        record: OpRecord,
        inputs: Mapping[str, Any],
        attrs: Mapping[str, Any],
        out: Mapping[str, Any] | None,
        options: CallOptions,
        timeout_s: float | None,
        product: Product | None = None,
        *,
        progress: bool | str | Callable[[Progress], None] = False,
    ) -> tuple[dict[str, Any], ExecutionInfo]:
        """Sends one call; returns results by output name and what produced them.

        If a product is given, calls it does not accept are rejected here with the documented error.
        """
        note_gradients(record.name, inputs)
        with CallClock(record.name, self._sinks, self._tracing) as clock:
            prepared = self._plans.prepare(record, inputs, attrs, out, options, product)
            clock.packed_s, clock.prepared = time.monotonic(), prepared
            answer = self._transport.run(prepared, self._deadline(timeout_s), clock, progress)
            clock.info = answer.info
            return finish(prepared, answer, inputs, out), answer.info
