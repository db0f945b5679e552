"""The RPCs that a transport sends: a call of an operator, or a query such as `server_info`.

Everything that does not wait is here, for both transports.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

from npugrad.representation import make_printable
from npugrad_client._channels import grpc_timeout
from npugrad_client._older import VERSION_REQUEST, asked_operator
from npugrad_client._retry import RetrySchedule
from npugrad_client._unary import encode_unary, read_unary
from npugrad_client.errors import CallTooLarge

if TYPE_CHECKING:
    from npugrad_client._attempt import Attempt
    from npugrad_client._call import Answer, Prepared
    from npugrad_client._channels import Settings, Stubs
    from npugrad_client._clock import CallClock
    from npugrad_client._picker import Picker
    from npugrad_client._retry import RetryBudget
    from npugrad_client.errors import NpugradError


class Query:
    """A query, which runs no operator.

    Attributes:
        what: `validate`, `server_info` or `list_operators`.
        operator: The operator that it is about; empty for none.
        nbytes: Below every limit for streaming.
    """

    clock: CallClock | None = None
    nbytes: int = -1
    is_too_large: bool = False

    def __init__(self, service: str, request: Any) -> None:
        """Makes a query from its message."""
        self.what, self._request = service, request
        self.operator = asked_operator(service, request)

    def method(self, stubs: Stubs) -> Any:
        """Returns the RPC on a channel."""
        return stubs.services[self.what]

    def encode(self) -> Any:
        """Returns what to send."""
        return self._request

    def read(self, reply: Any, attempt: Attempt) -> Any:
        """Returns the answer from the reply, whose text cannot command a terminal."""
        make_printable(reply)
        return reply


class Call:
    """A call of an operator.

    Attributes:
        what: Name of the operator.
        operator: The same.
        clock: Its measurements.
        nbytes: Bytes of data in the larger direction, which decide whether it is streamed.
        is_too_large: Whether it was too large for one message, so that it is streamed from then on.
    """

    def __init__(self, prepared: Prepared, settings: Settings, clock: CallClock) -> None:
        """Creates the call; its size and its server decide whether it is streamed."""
        self.clock = clock
        if settings.retry.hedge_after_s is not None:
            prepared = prepared.apart()
        self._prepared = self._whole = prepared
        self.what = self.operator = prepared.record.name
        self.nbytes, self.is_too_large = prepared.nbytes, False
        if clock.trace is not None:
            service, method = prepared.registry.backward.full_name, prepared.record.rpc
            clock.trace.prepared(service, method, self.nbytes)

    def streamed(self) -> Prepared:
        """Returns the call prepared for streaming."""
        plan = self._prepared.plan
        return self._prepared if plan is None or plan.reply is None else self._prepared.without_plan()

    def method(self, stubs: Stubs) -> Any:
        """Returns the RPC on a channel."""
        return stubs.unary(self._prepared.record)

    def encode(self) -> bytes:
        """Returns what to send."""
        plan = self._prepared.plan
        if plan is not None and plan.reply is None:  # planned as a stream, for a server with a lower limit
            self._whole = self._prepared.without_plan()
        return encode_unary(self._whole)

    def read(self, reply: bytes, attempt: Attempt) -> Answer:
        """Returns the results from the reply; raises `NpugradError` if it does not answer the call."""
        return read_unary(self._whole, reply, attempt, self.clock)


Rpc: TypeAlias = Call | Query


def note_too_large(rpc: Rpc, error: NpugradError, limits: list[int], server: int) -> None:
    """Remembers that a server, or something before it, does not accept a call as one message.

    From now on, the call is streamed, and so are calls to that server with more than half as much data: only
    some servers state their limit, and each in its own words.

    Args:
        rpc: What was sent.
        error: The error it failed with.
        limits: Number of bytes from which calls are streamed, by server; changed in place.
        server: Index of the server.
    """
    if isinstance(error, CallTooLarge) and error.is_message:
        rpc.is_too_large = True
        limits[server] = min(limits[server], rpc.nbytes // 2 + 1)


VERSION = Query("server_info", VERSION_REQUEST)
"""Asks a server for its version."""


def begin(
    settings: Settings, budget: RetryBudget, picker: Picker, what: str, timeout_s: float | None
) -> RetrySchedule:
    """Returns the schedule of the tries of an RPC; errors as in `grpc_timeout`."""
    limit = None if timeout_s is None else grpc_timeout(timeout_s, what)
    return RetrySchedule(settings.retry, budget, picker, limit, time.monotonic())
