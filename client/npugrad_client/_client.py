"""The client: typed calls to one server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from npugrad.registry import REGISTRY
from npugrad.representation import some
from npugrad_client import _info
from npugrad_client._batch import Batch, OnError
from npugrad_client._call import finish
from npugrad_client._channels import STREAM_FROM_BYTES, settings
from npugrad_client._clock import CallClock, tracing_by
from npugrad_client._futures import Submit, Threads, run_batch
from npugrad_client._generated_ops import Operators
from npugrad_client._plans import Plans
from npugrad_client._profile import profiling
from npugrad_client._retry import RETRY
from npugrad_client._transport import Transport

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from opentelemetry.trace import TracerProvider

    from npugrad.call import CallOptions, ExecutionInfo
    from npugrad.meta import TensorMeta
    from npugrad.operator import OpRecord, Verdict
    from npugrad.products import Product
    from npugrad_client._channels import Settings
    from npugrad_client._clock import Sink
    from npugrad_client._info import OperatorInfo, ServerInfo
    from npugrad_client._progress import Progress
    from npugrad_client._retry import RetryPolicy
    from npugrad_client._tls import Tls

R = TypeVar("R")


class Client(Operators):
    """Calls one npugrad server, or several.

    Thread safety: one client may be shared by any number of threads.

    Processes: one that is forked may use a client of its parent; it opens connections of its own at its first
    call. A fork waits up to 5 s for the calls of other threads, and those stay the parent's. With
    ``GRPC_ENABLE_FORK_SUPPORT=0`` in the environment gRPC would hang there, and a call is an error that says
    so. Where processes are spawned, a client can be pickled; the copy opens connections of its own.

    Event loops: a call blocks the loop that makes it (as a cell of a notebook does); see `AsyncClient`.

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
        """Opens a client; the connection is made at the first call.

        Args:
            target: ``host:port``, ``unix:path`` or ``dns:///service:port``; or a list of them, one of each
                server, which share the calls. Behind ``dns:///`` all addresses share them. A host without a
                port is asked on 50051.
            timeout_s: Deadline of every call in seconds unless the call says otherwise, retries included;
                None for none. A server that cannot be reached is an error after ``retry.retry_for_s``, with
                or without a deadline.
            stream_from_bytes: Calls with this much data in either direction are streamed, and all from 3 MiB
                on. One that is refused as too large for one message is streamed then, and calls of its size
                to that server from then on.
            retry: When calls are tried again; None for never.
            tls: What to trust and who the client is; True to trust the system's authorities; None for a
                connection that is not encrypted.
            threads: Calls of `submit` in flight at once.
            tracing: Whether calls, their tries and stages become spans of OpenTelemetry: True by its global
                tracer provider, or a provider. The servers get the context of each try, as W3C has it.

        Raises:
            ImportError: `tracing` is wanted, and OpenTelemetry is not installed (the extra ``otel``).
            TypeError: A target is no text, or `retry`, `tls` or `tracing` is of another type.
            ValueError: A target is empty or a URL, there is none, `tls` names what is no PEM, or `threads` is
                below 1.
            OSError: A file that `tls` names cannot be read.
        """
        if threads < 1:
            raise ValueError(f"threads: found {threads}; expected 1 or more")
        self._open(settings(target, stream_from_bytes, retry, tls), timeout_s, threads, tracing)

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
        """What another process needs to open a client of its own; with a private key, if there is one."""
        if not isinstance(self._state[-1], bool):
            raise TypeError(
                "tracing: a TracerProvider cannot be pickled; use tracing=True, the global provider of "
                "each process"
            )
        return self._state

    def __setstate__(self, state: tuple[Settings, float | None, int, bool | TracerProvider]) -> None:
        """Opens a client like the one that was pickled."""
        self._open(*state)

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
        return f"Client({some(self.target.split(', '), 3, '.target')!r})"

    def close(self) -> None:
        """Closes the connection; calls in flight are cancelled.

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
        inputs: Mapping[str, TensorMeta | None],
        attrs: Mapping[str, Any],
        outputs: Mapping[str, TensorMeta | None] | None = None,
        product: Product | str | None = None,
        timeout_s: float | None = None,
    ) -> Verdict:
        """Asks the server which documented constraints a call breaks; sends no data.

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
            MalformedRequest: An attribute is missing, has the wrong type or is out of range.
            TypeError: A name that the operator does not have, or an operand that is no `TensorMeta`.
            ValueError: There is no such product.
            TransportError: Nothing usable came back.

        Example:
            >>> verdict = client.validate(
            ...     "group_norm_backward", inputs={"input": TensorMeta("float32", (2, 6, 4))},
            ...     attrs=dict(n=2, c=6, hxw=4, group=3, output_mask=(True, True, True)))
            >>> [violation.id for violation in verdict.violations]
            ['grad_out.not_null', 'mean.not_null', 'rstd.not_null']
        """
        request = _info.encode_validation(operator, inputs, attrs, outputs, product, registry=self._registry)
        return _info.decode_verdict(self._transport.ask("validate", request, self._deadline(timeout_s)))

    def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Versions, limits, product and devices of the server, and how busy it is now.

        Of one of them, where the client has several.

        Args:
            timeout_s: Deadline in seconds; None for the client's default.

        Raises:
            TransportError: Nothing usable came back.

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
        """The operators as the server describes them, with parameters and constraints.

        Args:
            product: Product to describe; None for the server's own.
            timeout_s: Deadline in seconds; None for the client's default.

        Raises:
            ValueError: There is no such product.
            TransportError: Nothing usable came back.

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
    ) -> list[R | Exception]: ...

    def run_many(
        self,
        method: Callable[..., R],
        calls: Iterable[Mapping[str, Any]],
        *,
        concurrency: int = 8,
        on_error: OnError = "raise",
        progress: bool | str = False,
    ) -> list[Any]:
        """Makes many calls, so many at once, and returns their results in the order of the calls.

        Args:
            method: A method of this client, such as ``client.group_norm_backward``.
            calls: Arguments of each call by name. They are taken as calls begin, so that a generator need
                never hold the operands of more than `concurrency` calls.
            concurrency: Calls in flight at once.
            on_error: "raise": the first error is raised, and calls in flight are cancelled. "return": an
                error takes the place of its result.
            progress: Whether to show a progress bar, or its title.

        Returns:
            Results, and with ``on_error="return"`` errors, in the order of the calls.

        Raises:
            ValueError: `concurrency` is below 1, or `on_error` is neither word.
            NpugradError: What a call raised, with ``on_error="raise"``; what it raises otherwise, too.

        Example:
            >>> calls = [{**call, "label": f"sample {i}"} for i in range(4)]
            >>> results = client.run_many(client.group_norm_backward, calls, concurrency=2)
            >>> [grads.grad_input.shape for grads in results]
            [(2, 6, 4), (2, 6, 4), (2, 6, 4), (2, 6, 4)]
        """
        batch = Batch(calls, concurrency, on_error, progress)
        threads = Threads(self._transport, concurrency)
        try:
            return run_batch(batch, method, threads, concurrency)
        finally:
            threads.close()

    def profile(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Writes where the time of each call goes to a file while it is entered: a Chrome trace.

        Open the file in https://ui.perfetto.dev or chrome://tracing. It has every call that ends, well or
        not: its tries and stages, and what each server did for it, which is placed in the middle of the time
        that the client waited. It is written by a thread, a second after a call at the latest, and can be
        opened after a crash as well. Any number may be entered at once, by any thread, each for a file of
        its own; the calls of a process that is forked are not in it.

        Args:
            path: The file; what is there is overwritten.

        Raises:
            OSError: The file cannot be opened; or, at the end and unless something else was raised, not all
                could be written. No call fails for that.

        Example:
            >>> with client.profile("calls.json"):
            ...     grads = client.group_norm_backward(**call)
        """
        return profiling(path, self._sinks)

    @property
    def submit(self) -> Submit:
        """The same methods, returning a `concurrent.futures.Future` at once.

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
        """Sends one call; results by output name and what produced them.

        Where a product is given, what it does not take is refused here, with the documented error.
        """
        with CallClock(record.name, self._sinks, self._tracing) as clock:
            prepared = self._plans.prepare(record, inputs, attrs, out, options, product)
            clock.packed_s, clock.prepared = time.monotonic(), prepared
            answer = self._transport.run(prepared, self._deadline(timeout_s), clock, progress)
            clock.info = answer.info
            return finish(prepared, answer, inputs, out), answer.info
