"""The RPCs that a transport sends: a call of an operator, or a query to one of the small services.

All of it that does not wait is here, for both transports.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

from npugrad_client._channels import grpc_timeout
from npugrad_client._older import VERSION_REQUEST, asked_operator
from npugrad_client._retry import RetrySchedule
from npugrad_client._unary import encode_unary, read_unary

if TYPE_CHECKING:
    from npugrad_client._attempt import Attempt
    from npugrad_client._call import Answer, Prepared
    from npugrad_client._channels import Settings, Stubs
    from npugrad_client._clock import CallClock
    from npugrad_client._picker import Picker
    from npugrad_client._retry import RetryBudget


class Query:
    """A query to one of the small services.

    Attributes:
        what: `validate`, `server_info` or `list_operators`.
        operator: The operator that it is about; empty for none.
    """

    streamed: Prepared | None = None
    clock: CallClock | None = None

    def __init__(self, service: str, request: Any) -> None:
        """The query that a message makes."""
        self.what, self._request = service, request
        self.operator = asked_operator(service, request)

    def method(self, stubs: Stubs) -> Any:
        """The RPC on a channel."""
        return stubs.services[self.what]

    def encode(self) -> Any:
        """What is sent."""
        return self._request

    def read(self, reply: Any, attempt: Attempt) -> Any:
        """The answer from what came back."""
        return reply


class Call:
    """A call of an operator.

    Attributes:
        what: Name of the operator.
        operator: The same.
        streamed: The call, where it is to be streamed; None for one that travels as one message.
        clock: What is measured of it.
    """

    def __init__(self, prepared: Prepared, settings: Settings, clock: CallClock) -> None:
        """The call, streamed or not by its size."""
        self.clock = clock
        if settings.retry.hedge_after_s is not None:
            prepared = prepared.apart()
        self._prepared = prepared
        self.what = self.operator = prepared.record.name
        is_streamed = prepared.nbytes >= settings.stream_from_bytes
        self.streamed = prepared if is_streamed else None
        if clock.trace is not None:
            method = "Execute" if is_streamed else prepared.record.rpc
            clock.trace.prepared(prepared.registry.backward.full_name, method, prepared.nbytes)

    def method(self, stubs: Stubs) -> Any:
        """The RPC on a channel."""
        return stubs.unary(self._prepared.record)

    def encode(self) -> bytes:
        """What is sent."""
        return encode_unary(self._prepared)

    def read(self, reply: bytes, attempt: Attempt) -> Answer:
        """The results from what came back; raises `NpugradError` where that is no answer to the call."""
        return read_unary(self._prepared, reply, attempt, self.clock)


Rpc: TypeAlias = Call | Query
VERSION = Query("server_info", VERSION_REQUEST)
"""What version a server has."""


def begin(
    settings: Settings, budget: RetryBudget, picker: Picker, what: str, timeout_s: float | None
) -> RetrySchedule:
    """The tries of an RPC; errors as of `grpc_timeout`."""
    limit = None if timeout_s is None else grpc_timeout(timeout_s, what)
    return RetrySchedule(settings.retry, budget, picker, limit, time.monotonic())
