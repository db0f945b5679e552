"""Retries: the policy, the budget, and the schedule of one call. No clock, thread or socket.

Operators are pure functions, so a retry never changes a result. Calls are retried after errors that the error
table marks as retryable. A transport asks a `RetrySchedule` for its next step and tells it how each try
ended; both transports follow the same schedules.
"""

from __future__ import annotations

import logging
import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad.errors import (
    CallTooLarge,
    ConnectError,
    DeadlineExceeded,
    NpugradError,
    ServerDraining,
    TransportError,
)
from npugrad.representation import short_repr
from npugrad.usage import reports_usage, require_number

if TYPE_CHECKING:
    from npugrad_client._picker import Picker

_LOG = logging.getLogger("npugrad_client")
_QUIET_S = 1.0
"""Seconds a call waits for an unreachable server before a warning is logged, as for a mistyped address."""
_LEAST_WAIT_S = 0.02
"""Minimum pause between tries at an unreachable server, whatever the policy says, so as not to flood it."""
_TELLING_S = 0.1
"""A last try with less time than this, cut off by the call's deadline, tells nothing about its server."""
_MOST_DOUBLINGS = 60
"""Limit on doublings of a wait, which reaches its maximum long before; floats overflow at 1024."""


@reports_usage
@dataclass(frozen=True)
class RetryPolicy:
    """Policy for retries: when, how often, and for how long.

    Only retryable errors (`error.retryable`) are retried. The call goes to another server at once if there is
    one it has not tried; otherwise it waits for ``initial_backoff_s``, doubled for each try up to
    ``max_backoff_s``, times a random factor between 0 and 1. There are two kinds of retries:

    - The server is unreachable (`ConnectError`) or draining (`ServerDraining`), as during a restart. Retries
      go on for ``retry_for_s``, whatever their number. After a second, the logger ``npugrad_client`` warns.
    - Every other failure, such as a full queue or no ready device. ``max_tries`` limits these, and each waits
      at least as long as the server asks. A call expected to miss its deadline (WOULD_MISS_DEADLINE) is only
      retried on another server; without one it fails at once. Apparent misconfiguration
      (`ConnectError.is_misconfigured`, such as a name that does not resolve) counts here until the server has
      been reached once.

    Example:
        >>> patient = RetryPolicy(retry_for_s=300.0)
        >>> fast_tail = RetryPolicy(hedge_after_s=0.25)
        >>> Client(["host1:50051", "host2:50051"], retry=fast_tail)
        Client('host1:50051, host2:50051')

    Attributes:
        max_tries: Maximum number of tries of a call, hedges included; tries that found the server unreachable
            or draining, or the message too large, do not count. 1 for no retries.
        retry_for_s: Seconds to keep trying while servers are unreachable or draining, from the first such
            failure; 0 tries each server once. A try in flight is not cut short.
        initial_backoff_s: Maximum wait in seconds before the second try.
        max_backoff_s: Maximum wait in seconds between tries, unless the server asks for longer.
        max_retry_after_s: If the server asks for a longer wait than this many seconds, raise its error
            instead.
        reach_for_s: Seconds from the start of a call to keep trying while no server was ever reached, as with
            a mistyped address; None for as long as ``retry_for_s``.
        try_timeout_s: Deadline of each try in seconds, within that of the call; None for none. A try that
            exceeds it is retried.
        hedge_after_s: Seconds without an answer after which the call is sent again in parallel, to another
            server if there is one, and so on up to `max_tries`; the first answer wins and the other tries are
            cancelled. None for never.
        budget: Size of the retry budget shared by all calls of a client. A retry or hedge costs 1; a retry
            because a server was unreachable or draining costs nothing.
        budget_refill: What each answered call adds back, up to `budget`. In the long run, retries add at most
            this fraction to the load of an overloaded server.
    """

    __repr__ = short_repr

    max_tries: int = 4
    retry_for_s: float = 30.0
    reach_for_s: float | None = None
    initial_backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    max_retry_after_s: float = 30.0
    try_timeout_s: float | None = None
    hedge_after_s: float | None = None
    budget: float = 100.0
    budget_refill: float = 0.1

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        require_number("max_tries", self.max_tries, "1 or more", lambda tries: tries >= 1, whole=True)
        for name in ("budget", "budget_refill"):
            require_number(name, getattr(self, name), "0 or more", _is_positive_or_0)
        for name in ("retry_for_s", "initial_backoff_s", "max_backoff_s", "max_retry_after_s"):
            require_number(name, getattr(self, name), "seconds, 0 or more", _is_positive_or_0)
        for name in ("hedge_after_s", "reach_for_s"):
            if (limit_s := getattr(self, name)) is not None:
                require_number(name, limit_s, "seconds, 0 or more, or None", _is_positive_or_0)
        if self.try_timeout_s is not None:
            expected = "seconds above 0, or None"
            require_number("try_timeout_s", self.try_timeout_s, expected, lambda limit_s: limit_s > 0)


def _is_positive_or_0(number: float) -> bool:
    return number >= 0


RETRY = RetryPolicy()
"""The default policy."""
INTERACTIVE = RetryPolicy(reach_for_s=5.0)
"""For commands: somebody waits for them, who may have mistyped the address."""
ONCE = RetryPolicy(max_tries=1)
"""What `retry=None` means: a call is sent once."""


class RetryBudget:
    """Retry budget: a token bucket that retries drain and answers refill.

    Thread safety: every method may be called from several threads at once.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        """Creates a full bucket."""
        self._most, self._refill = policy.budget, policy.budget_refill
        self._left = policy.budget
        self._lock = threading.Lock()

    @property
    def left(self) -> float:
        """Retries currently available."""
        return self._left

    def take(self) -> bool:
        """Takes one retry; returns False if none is left."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True

    def refill(self) -> None:
        """Adds what an answered call gives back."""
        with self._lock:
            self._left = min(self._most, self._left + self._refill)


@dataclass(frozen=True)
class Launch:
    """A step of a schedule: send the call.

    Attributes:
        number: Number of the try, from 1.
        server: Index of the server.
        timeout_s: Deadline of the try in seconds; None for none.
    """

    number: int
    server: int
    timeout_s: float | None


@dataclass(frozen=True)
class Wait:
    """A step of a schedule: wait for a try to end, or until a time.

    Attributes:
        until: Time on the caller's clock in seconds; None for no end.
    """

    until: float | None


class RetrySchedule:
    """Schedule of the tries of one call. Times are seconds on the caller's monotonic clock."""

    def __init__(
        self,
        policy: RetryPolicy,
        budget: RetryBudget,
        picker: Picker,
        timeout_s: float | None,
        now: float,
    ) -> None:
        """Creates a schedule whose first step is to send the call."""
        self._policy, self._budget, self._picker = policy, budget, picker
        self._deadline = None if timeout_s is None else now + timeout_s
        self._flying: dict[int, tuple[int, float]] = {}
        self._tried: set[int] = set()
        self._next_at: float | None = now
        self._error: NpugradError | None = None
        self._free_tries, self._lost_since = 0, now
        self._began, self._was_reached = now, False
        self.tries = 0

    def next(self, now: float) -> Launch | Wait:
        """Returns the next step.

        Raises:
            NpugradError: There is none; this is the last try's error. Tries in flight no longer matter.
        """
        if self._next_at is not None and now >= self._next_at:
            is_late = self.tries > 0 and self._is_over(now)
            if not is_late and (not self._flying or self._budget.take()):
                return self._launch(now)
            self._next_at = None  # no try after the deadline, and no hedge without budget
        if self._error is not None and self._next_at is None and not self._flying:
            raise self._error
        return Wait(self._next_at)

    def _launch(self, now: float) -> Launch:
        server = self._picker.pick(now, self._tried)
        self.tries += 1
        self._tried.add(server)
        self._flying[self.tries] = (server, now)
        hedge_after_s = self._policy.hedge_after_s
        may_hedge = hedge_after_s is not None and self._counted_tries < self._policy.max_tries
        self._next_at = now + hedge_after_s if hedge_after_s is not None and may_hedge else None
        return Launch(self.tries, server, self._try_timeout(now))

    def _try_timeout(self, now: float) -> float | None:
        limit = self._policy.try_timeout_s
        if self._deadline is None:
            return limit
        left_s = self._deadline - now
        return left_s if limit is None else min(limit, left_s)

    def answered(self, number: int, now: float) -> None:
        """Records that a try was answered, which ends the call."""
        server, started = self._flying.pop(number)
        self._picker.ended(server, started, now, None)
        self._budget.refill()
        for other, since in self._flying.values():
            if since < started:  # it did not answer in time, and its hedge was faster
                self._picker.ended(other, since, now, DeadlineExceeded("found no answer before the hedge's"))
            else:
                self._picker.ended(other, since, now, None, is_abandoned=True)
        self._flying.clear()

    def failed(self, number: int, error: NpugradError, now: float) -> bool:
        """Records that a try failed; returns whether this ends the call, even with tries in flight."""
        server, started = self._flying.pop(number)
        is_lost = self._is_lost_by(error, server)
        is_message = isinstance(error, CallTooLarge) and error.is_message
        self._was_reached |= not isinstance(error, ConnectError) or error.was_connected
        self._picker.ended(server, started, now, error)
        if is_lost and not isinstance(self._error, (ConnectError, ServerDraining)):
            self._lost_since = now
        self._free_tries += is_lost or is_message
        had_s = (now if self._deadline is None else min(now, self._deadline)) - started
        is_cut_off = isinstance(error, DeadlineExceeded) and self._is_over(now) and had_s < _TELLING_S
        if not (is_cut_off and isinstance(self._error, (ConnectError, ServerDraining))):
            self._error = error
        self._error.tries = self.tries
        if is_message:  # it is streamed now, at once; a call is refused like this only once
            if not self._flying:
                self._next_at = now
            return False
        if not self._may_retry(error, now):
            self.abandon(now)
            return True
        if not self._flying:
            delay = self._wait_for_lost(now) if is_lost else self._wait_for_other(error, now)
            self._next_at = None if delay is None else now + delay
        return False  # if another try is in flight, wait for it; a hedge may still follow it

    def abandon(self, now: float) -> None:
        """Ends the call for another reason, without waiting for tries in flight."""
        for server, started in self._flying.values():
            self._picker.ended(server, started, now, None, is_abandoned=True)
        self._flying.clear()
        self._next_at = None

    @property
    def _counted_tries(self) -> int:
        return self.tries - self._free_tries

    def _is_lost_by(self, error: NpugradError, server: int) -> bool:
        """Whether a try ended because its server is gone or shutting down."""
        if isinstance(error, ConnectError) and error.is_misconfigured:
            return self._picker.was_reached(server)
        return isinstance(error, (ConnectError, ServerDraining))

    def _may_retry(self, error: NpugradError, now: float) -> bool:
        if isinstance(error, DeadlineExceeded):  # of a try; the call itself may have time left
            return self._policy.try_timeout_s is not None and not self._is_over(now)
        return error.retryable

    def _is_over(self, then: float) -> bool:
        return self._deadline is not None and then >= self._deadline

    def _wait_for_lost(self, now: float) -> float | None:
        """Seconds until the next try, which costs nothing; None for no further try."""
        if self._policy.max_tries == 1:
            return None
        if self._picker.has_other(now, self._tried):
            return None if self._is_over(now) else 0.0
        end, reach_for_s = self._lost_since + self._policy.retry_for_s, self._policy.reach_for_s
        if reach_for_s is not None and not (self._was_reached or self._picker.was_any_reached()):
            end = min(end, self._began + reach_for_s)
        left_s = (end if self._deadline is None else min(end, self._deadline)) - now
        delay = max(min(self._backoff(), left_s / 2), _LEAST_WAIT_S)
        if delay >= left_s:
            return None
        if now - self._lost_since >= _QUIET_S and self._picker.is_news(now):
            _LOG.warning("%s; trying again for up to %.0f s", self._error, left_s)
        return delay

    def _wait_for_other(self, error: NpugradError, now: float) -> float | None:
        """Seconds until the next try, which counts and uses the budget; None for no further try."""
        policy = self._policy
        retry_after_s = (error.retry_after_s if isinstance(error, TransportError) else None) or 0.0
        if self._counted_tries >= policy.max_tries:
            return None
        if self._picker.has_other(now, self._tried):
            delay = 0.0
        elif error.reason == "WOULD_MISS_DEADLINE" or retry_after_s > policy.max_retry_after_s:
            return None  # waiting here only makes it worse
        else:
            delay = retry_after_s + self._backoff()
        return delay if not self._is_over(now + delay) and self._budget.take() else None

    def _backoff(self) -> float:
        policy, doublings = self._policy, min(self.tries - 1, _MOST_DOUBLINGS)
        return min(policy.max_backoff_s, policy.initial_backoff_s * 2.0**doublings) * random.random()
