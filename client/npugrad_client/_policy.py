"""Decides whether a backward call runs locally or on the service; warns and counts.

One engine for everything in `npugrad_client.torch` and `npugrad_client.jax` that may run a call locally. It
is independent of the framework: it gets a `BackwardCall` and a function that computes the call locally.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, TypeVar, cast

from npugrad.call import CallOptions
from npugrad.meta import TensorMeta
from npugrad.ops import get_operator
from npugrad.representation import in_lines
from npugrad.usage import reports_usage, require_number
from npugrad_client import _arrays
from npugrad_client._channels import require_timeout
from npugrad_client._costs import FASTER_HERE, MEASURED_HERE, Costs, describe, kind_of
from npugrad_client._legality import require_legal
from npugrad_client._summary import FAILED, Ledger, Summary
from npugrad_client._warnings import warn_caller
from npugrad_client.errors import (
    InvalidOperand,
    NpugradError,
    NullOperand,
    OperatorError,
    TilingError,
    UnsupportedOperator,
    UsageError,
    WrongType,
    WrongValue,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npugrad.products import Product
    from npugrad.timeline import Timeline
    from npugrad_client import Client, ExecutionInfo, ServerInfo
    from npugrad_client._backward_call import BackwardCall, TracedCall

    _Sent = tuple[tuple[Any, ...], Timeline | None]

R = TypeVar("R")

MIN_BYTES = 512 * 1024
"""Default of `min_bytes`: below it, over half of a call's time is fixed overhead (measured).

Example:
    >>> mode = remote(client, min_bytes=4 * MIN_BYTES)
"""
_REFUSED = (NullOperand, InvalidOperand, TilingError, UnsupportedOperator)
_REFUSALS = ("warn", "local", "raise")
_ERRORS = ("raise", "local")
_POLICIES = ("always", "faster")
_SMALL = "smaller than min_bytes"
_ODD = "not dense CPU tensors"
_LACKING = "the server lacks it"


class RemoteWarning(UserWarning):
    """A call ran locally that could have been sent; issued once per kind and `remote` or `Policies`.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", RemoteWarning)  # raise it instead
    """


class Options(TypedDict, total=False):
    """Options of every call besides operands and attributes.

    Attributes:
        timeout_s: Deadline of the whole call in seconds; None for the client's default.
        deterministic: Request bitwise reproducible results.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call with its reference and fail if the result differs.
    """

    timeout_s: float | None
    deterministic: bool
    priority: int
    label: str
    verify: bool


@reports_usage
class Policies:
    """What to do with calls that are small, rejected or fail; also counts what ran where.

    Pass one to the functions of `npugrad_client.torch` and `npugrad_client.jax`; any number of calls may
    share it. Without one, these functions send every call and raise documented errors.

    Local computation supports all floating dtypes and all consistent sizes.

    Thread safety: any number of threads may share one. Counts are shared.

    Args:
        on_refused: For calls that the documents do not allow (float64, 5 channels, ...): ``"warn"`` runs them
            locally with one warning of each kind, ``"local"`` runs them locally without a warning,
            ``"raise"`` raises the documented error.
        on_error: When the service fails: ``"raise"`` raises its error, ``"local"`` runs the call locally,
            with a warning for each class of error, and counts it.
        min_bytes: Calls with fewer bytes of operands and results run locally. 0 sends all.
        policy: ``"always"`` sends every call it can; ``"faster"`` sends calls that are faster on the service,
            measured on the first calls of each kind. ``"faster"`` is not available in JAX.

    Raises:
        WrongValue: Unknown policy, or negative `min_bytes`.

    Example:
        >>> policies = Policies(on_refused="warn", on_error="local")
        >>> policies.summary().sent
        0
    """

    def __init__(
        self,
        *,
        on_refused: Literal["warn", "local", "raise"] = "warn",
        on_error: Literal["raise", "local"] = "raise",
        min_bytes: int = 0,
        policy: Literal["always", "faster"] = "always",
    ) -> None:
        require_policies("Policies", on_refused, on_error, min_bytes, policy)
        self.on_refused = on_refused
        self.on_error = on_error
        self.min_bytes = min_bytes
        self.policy = policy
        self._costs = Costs()
        self._ledger = Ledger()
        self._servers: weakref.WeakKeyDictionary[Client, ServerInfo] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        """The policies, and how many calls were sent."""
        return show_policies("Policies", self)

    def summary(self) -> Summary:
        """Returns counts of what ran where, over all threads; print it for a table."""
        return self._ledger.summary(self._costs.rows())


def show_policies(name: str, policies: Policies, *first: str) -> str:
    """The `repr` of an object that has policies: what comes first, each policy, and counts of calls."""
    settings = (f"{n}={getattr(policies, n)!r}" for n in ("min_bytes", "on_refused", "on_error", "policy"))
    summary = policies.summary()
    return in_lines(name, [*first, *settings, f"{summary.sent} sent", f"{summary.local} local"])


def require_policies(
    owner: str, on_refused: str, on_error: str, min_bytes: int, policy: str = "always"
) -> None:
    """Rejects unknown policies.

    Raises:
        WrongType: `min_bytes` is no number.
        WrongValue: Unknown policy, or negative `min_bytes`.
    """
    require_number(f"{owner}: min_bytes", min_bytes, "0 or more", lambda nbytes: nbytes >= 0)
    for name, value, known in (
        ("on_refused", on_refused, _REFUSALS),
        ("on_error", on_error, _ERRORS),
        ("policy", policy, _POLICIES),
    ):
        if value not in known:
            raise WrongValue(f"{owner}: {name}: found {value!r}; expected {' or '.join(map(repr, known))}")


STRICT = Policies(on_refused="raise")
"""Policies of functions that were given none: send every call, and raise every error."""


class PolicyEngine:
    """Decides where each call runs, runs it, and counts.

    Thread safety: any number of threads may use one.
    """

    def __init__(self, client: Client, options: Options, policies: Policies) -> None:
        """Creates an engine for calls by this client, with these options.

        Raises:
            UsageError: `policies` is something else, or an option is not allowed.
        """
        if not isinstance(policies, Policies):
            raise WrongType(f"policies: found {type(policies).__name__}; expected Policies or None")
        given = {name: value for name, value in options.items() if name != "timeout_s"}
        if problem := CallOptions(**cast("Any", given)).problem():
            raise WrongValue(": ".join(problem))
        require_timeout(options.get("timeout_s"))
        self._client = client
        self._options = options
        self._policies = policies
        self._ledger = policies._ledger
        self._costs = policies._costs
        self.on_refused = policies.on_refused

    def run(self, request: BackwardCall, local: Callable[[], R]) -> R | tuple[Any, ...]:
        """Returns the results of a call in the caller's order and dtypes, from the service or from `local`.

        Raises:
            OperatorError: The documents do not allow the call and the policy is to raise.
            NpugradError: The service failed and the policy is to raise.
        """
        why, nbytes = self._why_local(request)
        begun = started = time.perf_counter()
        if not why:
            sent, why = self._send(request)
            if sent is not None:
                results, timeline = sent
                why = "as float32" if request.is_mixed else ""
                self._count(request, nbytes, started, is_sent=True, why=why, timeline=timeline)
                self._learn(request, nbytes, begun, is_sent=True)
                return results
            started = time.perf_counter()
        kept = local()
        self._count(request, nbytes, started, is_sent=False, why=why)
        if why in (FASTER_HERE, MEASURED_HERE) or why.startswith(FAILED):
            # A call that is sent and fails takes the time of both ways.
            self._learn(request, nbytes, begun, is_sent=why.startswith(FAILED))
        return kept

    def foresees(self, request: BackwardCall) -> bool:
        """Whether a call would be sent, as far as is known without its data; warns once of a refusal."""
        if request.odd is not None or request.nbytes < self._policies.min_bytes:
            return False
        name = request.operator
        try:
            server = self._ask_server()
            require_legal(name, _metas(name, request.operands()), request.attrs, server.product)
        except NpugradError as error:
            if isinstance(error, OperatorError) and self._policies.on_refused != "local":
                text = f"{name} is not used because the service refuses it: {error}"
                self.tell(f"{name} foreseen: {_kind(error)}", text)
            return False
        return name in server.operators

    def keep(self, operator: str, why: str) -> None:
        """Counts a call that the framework computes in another way, and warns once."""
        self._ledger.add(operator, is_sent=False, why=why, nbytes=0, seconds=0.0)
        self.tell(f"{operator}: {why}", f"{operator} runs locally because {why}")

    def _learn(self, request: BackwardCall, nbytes: int, begun: float, *, is_sent: bool) -> None:
        seconds, inputs = time.perf_counter() - begun, request.inputs
        kind = kind_of(request.operator, inputs, request.attrs)
        self._costs.add(kind, describe(inputs), is_sent=is_sent, seconds=seconds, nbytes=nbytes)

    def keeps(self, request: TracedCall) -> bool:
        """Whether a call must run here, as far as is known before its values; if so, counts it and warns.

        Raises:
            OperatorError: The documents do not allow the call and the policy is to raise.
        """
        why, nbytes = self._why_local(request)
        try:
            if not why:
                request.require_legal()
        except OperatorError as error:
            kind = _kind(error)
            why = self._refused(request, error, kind, kind)
        if why:
            self._ledger.add(request.operator, is_sent=False, why=why, nbytes=nbytes, seconds=0.0)
        return bool(why)

    def _count(self, request: BackwardCall, nbytes: int, started: float, **found: Any) -> None:
        seconds = time.perf_counter() - started
        self._ledger.add(request.operator, nbytes=nbytes, seconds=seconds, **found)

    def _why_local(self, request: BackwardCall) -> tuple[str, int]:
        """Returns why a call must run here (empty if it should be sent), and its bytes."""
        odd = request.odd
        if odd is not None:
            found = f"{request.operator}: {odd}; expected a dense array in CPU memory"
            return self._refused(request, WrongType(found), f"{_ODD}: {odd}", _ODD), 0
        nbytes = request.nbytes
        if nbytes < self._policies.min_bytes:
            return _SMALL, nbytes
        if self._policies.policy == "always":
            return "", nbytes
        return self._costs.why_local(kind_of(request.operator, request.inputs, request.attrs)), nbytes

    def _send(self, request: BackwardCall) -> tuple[_Sent | None, str]:
        """Returns results in the caller's order and types, with the timeline; or None, and why."""
        try:
            server = None if self._policies is STRICT else self._ask_server()
            operands = request.operands()
            if server is not None and request.operator not in server.operators:  # only matters if legal
                known = _metas(request.operator, operands)
                require_legal(request.operator, known, request.attrs, server.product)
                return None, self._lacking(request, f"its version is {server.version}")
            found, info = self._run_legal(request, operands, None if server is None else server.product)
        except UsageError:
            raise
        except NpugradError as error:
            return None, self._failed(request, error)
        return (request.give_back(found), info.timeline), ""

    def _failed(self, request: BackwardCall, error: NpugradError) -> str:
        """Raises by policy; else warns once and returns why the call runs locally."""
        # A code means that the documents refuse it; without one, another kind of server may be there.
        if isinstance(error, _REFUSED) and error.code is not None:
            kind = _kind(error)
            return self._refused(request, error, kind, kind)
        is_lacking = isinstance(error, UnsupportedOperator) and error.operator == request.operator
        if is_lacking and self._policies is not STRICT:
            return self._lacking(request, str(error))  # another server of the same client
        if self._policies.on_error == "raise":
            raise error
        kind, name = type(error).__name__, request.operator
        self.tell(f"{name}: {kind}", f"{name} runs locally because the service failed: {error}")
        return FAILED + kind

    def _run_legal(
        self, request: BackwardCall, operands: Mapping[str, Any], product: Product | None
    ) -> tuple[dict[str, Any], ExecutionInfo]:
        """Returns results by output name, and what produced them.

        The client refuses what the product does not accept, before sending it.
        """
        given = dict(self._options)
        timeout_s = cast("float | None", given.pop("timeout_s", None))
        record, options = get_operator(request.operator), CallOptions(**cast("Any", given))
        inputs = {param.name: _arrays.detached(operands.get(param.name)) for param in record.inputs}
        return self._client._run(record, inputs, request.attrs, None, options, timeout_s, product)

    def _ask_server(self) -> ServerInfo:
        known = self._policies._servers
        server = known.get(self._client)
        if server is None:  # two threads may both ask; they get the same answer
            server = known[self._client] = self._client.server_info(self._options.get("timeout_s"))
        return server

    def _lacking(self, request: BackwardCall, found: str) -> str:
        """Warns once that a server lacks the operator; returns the reason in short."""
        name = request.operator
        self.tell(f"{name}: {_LACKING}", f"{name} runs locally because {_LACKING}: {found}")
        return _LACKING

    def _refused(self, request: BackwardCall, error: Exception, kind: str, why: str) -> str:
        """Raises, warns once per kind or stays silent, by policy; returns the reason."""
        if self._policies.on_refused == "raise":
            raise error
        if self._policies.on_refused == "warn":
            name = request.operator
            self.tell(f"{name}: {kind}", f"{name} runs locally because the service refuses it: {error}")
        return why

    def tell(self, kind: str, text: str) -> None:
        """Warns once per kind."""
        self._ledger.once(kind, lambda: warn_caller(text, RemoteWarning))


class Deciding(threading.local):
    """Whether the engine that is asked first has decided, in this thread, to run a call here."""

    depth = 0
    is_all_local: ClassVar[bool] = False
    """Whether all calls of the process run locally."""

    @property
    def is_local(self) -> bool:
        return self.depth > 0 or self.is_all_local

    @classmethod
    @contextmanager
    def keeping_all(cls) -> Iterator[None]:
        """Context manager in which all calls of all threads run locally and are not counted."""
        cls.is_all_local = True
        try:
            yield
        finally:
            cls.is_all_local = False

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def _metas(operator: str, operands: Mapping[str, Any]) -> dict[str, TensorMeta | None]:
    """Dtype and shape of each operand, without touching its data."""
    arrays = {
        name: None if operand is None else _arrays.to_numpy(operand, operator, name)
        for name, operand in operands.items()
    }
    return {n: None if array is None else TensorMeta(array.dtype, array.shape) for n, array in arrays.items()}


def _kind(error: OperatorError) -> str:
    """Returns what refusals that share one warning have in common: the constraint, not the numbers."""
    first = error.violations[0] if error.violations else None
    if first is None:
        return f"{error.code}"
    return f"{', '.join(first.operands)}: expected {first.expected}"
