"""`remote`: while it is entered, backward operators that the service knows run there."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch._C import _autograd
from torch.utils._python_dispatch import TorchDispatchMode

import npugrad_client
from npugrad.call import CallOptions
from npugrad.ops import get_operator
from npugrad_client._legality import require_client, require_legal
from npugrad_client.errors import (
    InvalidOperand,
    NpugradError,
    NullOperand,
    OperatorError,
    TilingError,
    UnsupportedOperator,
)
from npugrad_client.torch._calls import Options, metas
from npugrad_client.torch._summary import FAILED, Ledger, Summary
from npugrad_client.torch._translation import TAKEN_APART, TAKEN_APART_BY, TRANSLATIONS, AutogradCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from torch import Tensor

    from npugrad.products import Product
    from npugrad.timeline import Timeline
    from npugrad_client import Client, ExecutionInfo, ServerInfo

    _Sent = tuple[tuple[Tensor | None, ...], Timeline | None]

MIN_BYTES = 512 * 1024
"""Default of `min_bytes`: below it the fixed cost of a call is more than half of its travel (measured).

Example:
    >>> with remote(client, min_bytes=4 * MIN_BYTES):           # doctest: +SKIP
    ...     loss.backward()
"""
_REFUSED = (NullOperand, InvalidOperand, TilingError, UnsupportedOperator)
_NOT_THE_CALLERS = tuple(package.__path__[0] + os.sep for package in (npugrad_client, torch))
"""Folders whose lines tell nobody which call of `backward` a warning is about."""
_SMALL = "smaller than min_bytes"
_LACKING = "the server lacks it"
_CREATE_GRAPH = "create_graph=True takes it apart"


class RemoteWarning(UserWarning):
    """Something that could have been sent was not; said once for each kind by each `remote`.

    Example:
        >>> warnings.simplefilter("error", RemoteWarning)              # doctest: +SKIP
        >>> with remote(client):                                       # doctest: +SKIP
        ...     loss.backward()  # raises where it would have warned
    """


class Remote(ContextDecorator):
    """The context manager that `remote` makes; see there.

    Thread safety: one object may be entered by any number of threads, and again inside itself; each thread
    must enter it for its own backward passes. Counts are shared.

    Example:
        >>> mode = remote(client)                                      # doctest: +SKIP
        >>> @mode                                                      # doctest: +SKIP
        ... def step(x):
        ...     model(x).sum().backward()
        >>> step(x)                                                    # doctest: +SKIP
        >>> mode.summary().sent                                        # doctest: +SKIP
    """

    def __init__(
        self,
        client: Client,
        *,
        min_bytes: int,
        on_refused: Literal["local", "raise"],
        on_error: Literal["raise", "local"],
        options: Options,
    ) -> None:
        require_client("remote", client)
        if min_bytes < 0:
            raise ValueError(f"remote: min_bytes: found {min_bytes}; expected 0 or more")
        _require("on_refused", on_refused, ("local", "raise"))
        _require("on_error", on_error, ("raise", "local"))
        self._client = client
        self._min_bytes = min_bytes
        self._on_refused = on_refused
        self._on_error = on_error
        self._options = options
        self._ledger = Ledger()
        self._server: ServerInfo | None = None
        self._entered = _Entered()

    def __enter__(self) -> Remote:
        """Starts to look at the backward operators of this thread."""
        mode = _Mode(self)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._entered.modes.append(mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops it."""
        self._entered.modes.pop().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def summary(self) -> Summary:
        """What went where so far, all threads together; print it for a table."""
        return self._ledger.summary()

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs one operator, here or there."""
        translate = TRANSLATIONS.get(func)
        if translate is None or _deciding.is_local:
            if func not in TAKEN_APART_BY or _deciding.is_local:
                return func(*args, **kwargs)
            self._notice_taken_apart(func)
            with _deciding:  # an outer `remote` must not tell of it as well
                return func(*args, **kwargs)
        request = translate(*args, **kwargs)
        why, nbytes = self._why_local(request), request.nbytes
        if not why:
            started = time.perf_counter()
            sent, why = self._send(request)
            if sent is not None:
                results, timeline = sent
                why = "as float32" if request.is_mixed else ""
                self._count(request, nbytes, started, is_sent=True, why=why, timeline=timeline)
                return results
        started = time.perf_counter()
        with _deciding:  # an outer `remote` must not send what this one keeps
            local = func(*args, **kwargs)
        self._count(request, nbytes, started, is_sent=False, why=why)
        return local

    def _count(self, request: AutogradCall, nbytes: int, started: float, **found: Any) -> None:
        seconds = time.perf_counter() - started
        self._ledger.add(request.operator, nbytes=nbytes, seconds=seconds, **found)

    def _why_local(self, request: AutogradCall) -> str:
        """Why a call must stay here; empty when it is to be sent."""
        if not request.is_plain:
            return "no plain CPU tensors"
        if request.nbytes < self._min_bytes:
            return _SMALL
        return ""

    def _send(self, request: AutogradCall) -> tuple[_Sent | None, str]:
        """Results in autograd's order and types, and where the time went; or None and why there are none."""
        try:
            server, operands = self._ask_server(), request.operands()
            if request.operator not in server.operators:  # which matters for a legal call only
                known = metas(request.operator, operands)
                require_legal(request.operator, known, request.attrs, server.product)
                return None, self._lacking(request, f"found a server of version {server.version}")
            found, info = self._run_legal(request, operands, server.product)
        except NpugradError as error:
            # A number is the documents' word; without one, a server of another kind may be at that address.
            if isinstance(error, _REFUSED) and error.code is not None:
                return None, self._refused(request, error, _kind(error))
            if isinstance(error, UnsupportedOperator) and error.operator == request.operator:
                return None, self._lacking(request, str(error))  # another server of the same client
            if self._on_error == "raise":
                raise
            kind = type(error).__name__
            self._warn(
                f"{request.operator}: {kind}", f"{request.operator} runs here, as the service failed: {error}"
            )
            return None, FAILED + kind
        tensors = ((found[name], dtype) for name, dtype in request.results.items())
        results = tuple(None if tensor is None else tensor.to(dtype) for tensor, dtype in tensors)
        return (results, info.timeline), ""

    def _run_legal(
        self, request: AutogradCall, operands: Mapping[str, Tensor | None], product: Product
    ) -> tuple[dict[str, Any], ExecutionInfo]:
        """Results by output name, and what produced them.

        What the product does not take, the client refuses before it is sent.
        """
        given = dict(self._options)
        timeout_s = cast("float | None", given.pop("timeout_s", None))
        record, options = get_operator(request.operator), CallOptions(**cast("Any", given))
        inputs = {param.name: operands.get(param.name) for param in record.inputs}
        return self._client._run(record, inputs, request.attrs, None, options, timeout_s, product)

    def _ask_server(self) -> ServerInfo:
        if self._server is None:  # two threads may both ask; they get the same answer
            self._server = self._client.server_info(timeout_s=self._options.get("timeout_s"))
        return self._server

    def _lacking(self, request: AutogradCall, found: str) -> str:
        """Warns once that a server has no such operator, and gives that back in short."""
        name = request.operator
        self._warn(f"{name}: {_LACKING}", f"{name} runs here, as {_LACKING}: {found}")
        return _LACKING

    def _refused(self, request: AutogradCall, error: OperatorError, why: str) -> str:
        """Raises by policy, else warns once for the kind and gives it back."""
        if self._on_refused == "raise":
            raise error
        self._warn(
            f"{request.operator}: {why}",
            f"{request.operator} runs here, as the service does not take it: {error}",
        )
        return why

    def _warn(self, kind: str, text: str) -> None:
        self._ledger.once(kind, lambda: _warn_caller(text))

    def _notice_taken_apart(self, func: Any) -> None:
        """Counts a node that autograd computes with elementary operators, which are not the service's."""
        node = cast("Any", torch._C._current_autograd_node())  # None outside of a backward pass
        if node is None:
            return
        operator = TAKEN_APART.get(node.name())
        why = TAKEN_APART_BY[func] if not torch.is_grad_enabled() else _CREATE_GRAPH
        if operator is None or not why or _is_recomputing():
            return
        evaluation = (torch._C._current_graph_task_id(), node._sequence_nr())
        if evaluation == self._entered.last_taken_apart:
            return
        self._entered.last_taken_apart = evaluation
        self._ledger.add(operator, is_sent=False, why=why, nbytes=0, seconds=0.0)
        self._warn(f"{operator}: {why}", f"{operator} runs here, as {why}")


def remote(
    client: Client,
    *,
    min_bytes: int = MIN_BYTES,
    on_refused: Literal["local", "raise"] = "local",
    on_error: Literal["raise", "local"] = "raise",
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Remote:
    """Sends the backward operators of an unmodified model to the service while it is entered.

    Sent are the backward of `grid_sample` (bilinear and nearest), of `group_norm` and of `layer_norm`, on CPU
    tensors in float32, float16 and bfloat16, of volumes in float64 as well. Where types are mixed (bfloat16
    data with float32 weights, which the documents refuse but for `layer_norm`) the operands travel as float32
    and the results are cast back. Everything else runs here, as without it. Enter it around ``backward()``;
    around the forward pass it does no harm, and costs some microseconds for every operator.

    Under ``create_graph=True`` autograd itself takes the backward of `group_norm` apart into elementary
    operators, which run here, with a warning; the others are still sent. So it does under the
    transforms of `torch.func`, and where mean or rstd of `native_group_norm` have gradients.

    An operator that the server lacks, as one of an earlier release may, runs here with one warning, whatever
    the policies.

    Inside another `remote` the inner one decides alone. Any number of threads may enter the same object, each
    for its own backward passes. It works with hooks, checkpoints of both kinds, and autocast.

    Args:
        client: Who calls the service.
        min_bytes: Calls with less in operands and results together stay here. 0 sends all.
        on_refused: What the documents do not allow (float64 images, bicubic, ...): ``"local"`` runs it
            here with one warning for each kind, ``"raise"`` raises the documented error out of backward.
        on_error: When the service fails: ``"raise"`` raises the typed error out of backward, ``"local"``
            runs the call here, with a warning for each class of error, and counts it.
        timeout_s: Deadline of each call in seconds; None for the client's default.
        deterministic: Ask for results that do not depend on the order of summation.
        priority: Calls of higher priority leave the queue first; -100 to 100.
        label: Name of the caller or experiment.
        verify: Have the server recompute each call and refuse a result that differs.

    Returns:
        A context manager, and a decorator; its `summary()` tells what went where.

    Raises:
        TypeError: The client is no `Client`.
        ValueError: A policy that there is not, or a negative `min_bytes`.

    Example:
        >>> with Client("localhost:50051") as client, remote(client) as mode:  # doctest: +SKIP
        ...     loss.backward()
        >>> print(mode.summary())                                              # doctest: +SKIP
    """
    options = Options(
        timeout_s=timeout_s, deterministic=deterministic, priority=priority, label=label, verify=verify
    )
    return Remote(client, min_bytes=min_bytes, on_refused=on_refused, on_error=on_error, options=options)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One entry of one thread; it has no state of its own, so autograd may carry it to its threads."""

    def __init__(self, owner: Remote) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._owner._run(func, args, kwargs or {})


class _Entered(threading.local):
    """The entries of a thread, and the last node that was seen taken apart in it."""

    def __init__(self) -> None:
        self.modes: list[_Mode] = []
        self.last_taken_apart: tuple[int, int] | None = None


class _Deciding(threading.local):
    """Whether an inner `remote` of this thread has decided that the operator stays here."""

    depth = 0

    @property
    def is_local(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_deciding = _Deciding()


def _warn_caller(text: str) -> None:
    """Warns with the caller's line: that of `backward()`, below which are frames of PyTorch and of ours."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLERS):
        frame = frame.f_back
    known = frame.f_globals
    registry = known.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, RemoteWarning, frame.f_code.co_filename, frame.f_lineno, known.get("__name__"), registry
    )


def _kind(error: OperatorError) -> str:
    """What two refusals have in common that need only one warning: the constraint, not the numbers."""
    first = error.violations[0] if error.violations else None
    if first is None:
        return f"{error.code}"
    return f"{', '.join(first.operands)}: expected {first.expected}"


def _is_recomputing() -> bool:
    """Whether a checkpoint runs a forward pass again inside a node, which only it does with such hooks."""
    return _autograd._top_saved_tensors_default_hooks(False) is not None


def _require(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"remote: {name}: found {value!r}; expected {' or '.join(map(repr, known))}")
