"""When a call is tried again: a policy, a budget, and the plan of one call. No clock, thread or socket.

The operators are pure functions, so that trying twice never changes a result. What is retried is what the
error table calls retryable. A `Plan` is asked for its next step and told how tries ended; both transports
follow the same plans.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad.errors import ConnectError, DeadlineExceeded, NpugradError, ServerDraining, TransportError

if TYPE_CHECKING:
    from npugrad_client._picker import Picker


@dataclass(frozen=True)
class RetryPolicy:
    """When a call is tried again, and how often.

    Only errors that the error table calls retryable are (`error.retryable`): the server is lost, drains,
    is full now or has no device. A call that meets one goes to another server at once, if there is one
    that it has not tried; else it waits, ``initial_backoff_s`` doubled for each try, at most
    ``max_backoff_s``, times a random factor of 0 to 1, and at least as long as the server asks for.

    Example:
        >>> patient = RetryPolicy(max_tries=8, max_backoff_s=10.0)
        >>> fast_tail = RetryPolicy(hedge_after_s=0.25)
        >>> Client(["host1:50051", "host2:50051"], retry=fast_tail)          # doctest: +SKIP

    Attributes:
        max_tries: Tries of a call in all, hedges included; 1 never tries again.
        initial_backoff_s: Longest wait in seconds before the second try.
        max_backoff_s: Longest wait in seconds that the client chooses by itself.
        max_retry_after_s: A server that asks for a longer wait than this many seconds is not waited for: its
            error is raised.
        try_timeout_s: Deadline of each try in seconds, within that of the call; None for none. A try that
            passes it is tried again.
        hedge_after_s: Seconds without an answer after which a call is sent a second time, to another server
            if there is one, and again after as long until `max_tries` are spent; the first answer counts and
            the other calls are cancelled. None for never.
        budget: Retries and hedges that may be spent at once, by all calls of a client. Sending a call to
            another server because its own was lost costs nothing, everything else one.
        budget_refill: What each answered call gives back, up to `budget`. So in the long run, the load of
            an overloaded server grows by no more than this part.
    """

    max_tries: int = 4
    initial_backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    max_retry_after_s: float = 30.0
    try_timeout_s: float | None = None
    hedge_after_s: float | None = None
    budget: float = 100.0
    budget_refill: float = 0.1

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        for name, least in (("max_tries", 1), ("budget", 0), ("budget_refill", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: found {getattr(self, name)}; expected {least} or more")
        for name in ("initial_backoff_s", "max_backoff_s", "max_retry_after_s", "hedge_after_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}: found {value}; expected seconds, 0 or more")
        if self.try_timeout_s is not None and not self.try_timeout_s > 0:
            raise ValueError(f"try_timeout_s: found {self.try_timeout_s}; expected seconds above 0, or None")


RETRY = RetryPolicy()
"""What a client does unless it is told otherwise."""
ONCE = RetryPolicy(max_tries=1)
"""What `retry=None` means: a call is sent once."""


class RetryBudget:
    """What is left for retries: a bucket that retries drain and answers fill.

    Thread safety: every method may be called from several threads at once.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        """A full bucket."""
        self._most, self._refill = policy.budget, policy.budget_refill
        self._left = policy.budget
        self._lock = threading.Lock()

    @property
    def left(self) -> float:
        """Retries that may be spent now."""
        return self._left

    def take(self) -> bool:
        """Spends one; False when there is none."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True

    def refill(self) -> None:
        """Gives back what an answered call is worth."""
        with self._lock:
            self._left = min(self._most, self._left + self._refill)


@dataclass(frozen=True)
class Launch:
    """A step of a plan: send the call.

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
    """A step of a plan: wait for a try to end, or until a time.

    Attributes:
        until: Time on the caller's clock in seconds; None for no end.
    """

    until: float | None


class Plan:
    """The tries of one call. Times are seconds on the caller's monotonic clock."""

    def __init__(
        self,
        policy: RetryPolicy,
        budget: RetryBudget,
        picker: Picker,
        timeout_s: float | None,
        now: float,
    ) -> None:
        """A plan whose first step is to send the call."""
        self._policy, self._budget, self._picker = policy, budget, picker
        self._deadline = None if timeout_s is None else now + timeout_s
        self._flying: dict[int, tuple[int, float]] = {}
        self._tried: set[int] = set()
        self._next_at: float | None = now
        self._error: NpugradError | None = None
        self.tries = 0

    def next(self, now: float) -> Launch | Wait:
        """The next step.

        Raises:
            NpugradError: There is none: how the last try ended. Tries still in flight are of no use.
        """
        if self._next_at is not None and now >= self._next_at:
            is_late = self.tries > 0 and self._deadline is not None and now >= self._deadline
            if not is_late and (not self._flying or self._budget.take()):
                return self._launch(now)
            self._next_at = None  # nothing more after the deadline, and no hedge without a budget
        if self._error is not None and self._next_at is None and not self._flying:
            raise self._error
        return Wait(self._next_at)

    def _launch(self, now: float) -> Launch:
        server = self._picker.pick(now, self._tried)
        self.tries += 1
        self._tried.add(server)
        self._flying[self.tries] = (server, now)
        hedge_after_s = self._policy.hedge_after_s
        may_hedge = hedge_after_s is not None and self.tries < self._policy.max_tries
        self._next_at = now + hedge_after_s if hedge_after_s is not None and may_hedge else None
        return Launch(self.tries, server, self._try_timeout(now))

    def _try_timeout(self, now: float) -> float | None:
        limits = [self._policy.try_timeout_s, None if self._deadline is None else self._deadline - now]
        return min((limit for limit in limits if limit is not None), default=None)

    def answered(self, number: int, now: float) -> None:
        """A try has brought the answer; the call is over."""
        server, started = self._flying.pop(number)
        self._picker.ended(server, started, now, None)
        self._budget.refill()
        for other, since in self._flying.values():
            if since < started:  # a hedge was sent for want of its answer, and was quicker
                self._picker.ended(other, since, now, DeadlineExceeded("found no answer before the hedge's"))
            else:
                self._picker.ended(other, since, now, None, is_abandoned=True)
        self._flying.clear()

    def failed(self, number: int, error: NpugradError, now: float) -> bool:
        """A try has failed; whether that is the end of the call, with tries in flight or not."""
        server, started = self._flying.pop(number)
        self._picker.ended(server, started, now, error)
        error.tries = self.tries
        self._error = error
        if not self._may_retry(error, now):
            self.abandon(now)
            return True
        if not self._flying:
            delay = self._delay(error, now)
            self._next_at = None if delay is None else now + delay
        return False  # where another try is in flight, and may be followed by a hedge, it is waited for

    def abandon(self, now: float) -> None:
        """The call is over for other reasons; tries in flight are not waited for."""
        for server, started in self._flying.values():
            self._picker.ended(server, started, now, None, is_abandoned=True)
        self._flying.clear()
        self._next_at = None

    def _may_retry(self, error: NpugradError, now: float) -> bool:
        if isinstance(error, DeadlineExceeded):  # of a try, while the call itself has time left
            is_over = self._deadline is not None and now >= self._deadline
            return self._policy.try_timeout_s is not None and not is_over
        return error.retryable

    def _delay(self, error: NpugradError, now: float) -> float | None:
        """Seconds to wait before another try; None for no other."""
        policy = self._policy
        retry_after_s = (error.retry_after_s if isinstance(error, TransportError) else None) or 0.0
        has_other = self._picker.has_other(now, self._tried)
        is_free = has_other and isinstance(error, (ConnectError, ServerDraining))
        if self.tries >= policy.max_tries:
            return None
        if has_other:
            delay = 0.0
        elif retry_after_s > policy.max_retry_after_s:
            return None
        else:
            longest = min(policy.max_backoff_s, policy.initial_backoff_s * 2.0 ** (self.tries - 1))
            delay = retry_after_s + longest * random.random()  # jitter
        if self._deadline is not None and now + delay >= self._deadline:
            return None
        return delay if is_free or self._budget.take() else None
