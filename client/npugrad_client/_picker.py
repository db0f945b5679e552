"""Chooses one of several servers for a try. No clock, thread or socket."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad.errors import Cancelled, ConnectError, DeadlineExceeded, ServerBusy, ServerDraining

if TYPE_CHECKING:
    from collections.abc import Collection

    from npugrad.errors import NpugradError

_FIRST_REST_S = 0.5
"""How long a lost server gets no calls at first; doubled each time it is found lost again."""
_LONGEST_REST_S = 10.0
_MOST_DOUBLINGS = 60
"""Limit on doublings of a rest, which reaches its maximum long before; floats overflow at 1024."""
_BUSY_REST_S = 0.05
"""How long a full server is chosen last, unless it says how long."""
_NEWS_EVERY_S = 30.0
_NO_DEVICE = "NO_DEVICE"


@dataclass
class _Server:
    """What is known about a server.

    Attributes:
        flying: Tries in flight.
        losses: How often in a row it was found lost.
        lost_at: When it was last found lost.
        answered_at: When it last answered, even with an error.
        rests_until: Until when it gets calls only if there is no other server.
    """

    flying: int = 0
    losses: int = 0
    lost_at: float = float("-inf")
    answered_at: float = float("-inf")
    rests_until: float = float("-inf")

    def is_ready(self, now: float) -> bool:
        """Whether it may get a call: it is not resting, and after a loss it gets a single call first."""
        return now >= self.rests_until and (self.losses == 0 or self.flying == 0)

    def is_lost_by(self, error: NpugradError | None, started: float) -> bool:
        """Whether a try started then that ended with this error shows that the server is lost."""
        if isinstance(error, DeadlineExceeded) and not error.request_id:
            return self.answered_at < started  # silent all the time; else only this call took long
        is_gone = isinstance(error, (ConnectError, ServerDraining))
        return is_gone or (error is not None and error.reason == _NO_DEVICE)


class Picker:
    """Chooses servers: the one with the fewest calls in flight, in turn where several have.

    A server that is unreachable or draining, has no device, or answered nothing while a call waited past its
    deadline or hedge, is avoided for a while, longer each time, and then tried with a single call. A full
    server is avoided for as long as it asks. If all are avoided, the one avoided longest is tried, so there
    is always a choice.

    Thread safety: every method may be called from several threads at once.
    """

    def __init__(self, count: int) -> None:
        """Creates a picker for this many servers, all assumed to be healthy."""
        self._servers = [_Server() for _ in range(count)]
        self._turn = 0
        self._told_at = float("-inf")
        self._lock = threading.Lock()

    def pick(self, now: float, avoid: Collection[int] = ()) -> int:
        """Picks the server for a try, if possible none of those to avoid; `ended` must follow."""
        with self._lock:
            server = 0
            if len(self._servers) > 1:
                server = min(range(len(self._servers)), key=lambda index: self._rank(index, now, avoid))
            self._servers[server].flying += 1
            self._turn = (server + 1) % len(self._servers)
            return server

    def _rank(self, index: int, now: float, avoid: Collection[int]) -> tuple[bool, bool, float, int, int]:
        server = self._servers[index]
        is_ready = server.is_ready(now)
        turn = (index - self._turn) % len(self._servers)
        rest = 0.0 if is_ready else max(0.0, server.rests_until - now)
        return not is_ready, index in avoid, rest, server.flying, turn

    def has_other(self, now: float, tried: Collection[int]) -> bool:
        """Whether there is an untried server that takes calls now."""
        with self._lock:
            return any(s.is_ready(now) for index, s in enumerate(self._servers) if index not in tried)

    def was_reached(self, index: int) -> bool:
        """Whether the server has ever answered, even with an error."""
        with self._lock:
            return self._servers[index].answered_at > float("-inf")

    def was_any_reached(self) -> bool:
        """Whether any server has ever answered."""
        return any(map(self.was_reached, range(len(self._servers))))

    def is_news(self, now: float) -> bool:
        """Whether to warn of lost servers now: once in 30 s, for all calls together."""
        with self._lock:
            if now < self._told_at + _NEWS_EVERY_S:
                return False
            self._told_at = now
            return True

    def ended(
        self,
        index: int,
        started: float,
        now: float,
        error: NpugradError | None,
        *,
        is_abandoned: bool = False,
    ) -> None:
        """Records the end of a try.

        Args:
            index: The server.
            started: When the try was sent.
            now: When it ended.
            error: Its error; None if it succeeded.
            is_abandoned: It was abandoned, which says nothing about the server.
        """
        with self._lock:
            server = self._servers[index]
            server.flying -= 1
            if is_abandoned or isinstance(error, Cancelled):
                return
            if server.is_lost_by(error, started):
                if started >= server.lost_at:  # else it is the same loss, seen by an earlier try
                    server.losses += 1
                    server.lost_at = now
                    doublings = min(server.losses - 1, _MOST_DOUBLINGS)
                    rest = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0**doublings)
                    server.rests_until = now + rest * (1 - 0.5 * random.random())  # jitter
                return
            if isinstance(error, DeadlineExceeded) and not error.request_id:
                return
            server.answered_at = now
            if isinstance(error, ServerBusy):
                least_s = (
                    0.0 if error.reason == "WOULD_MISS_DEADLINE" else _BUSY_REST_S
                )  # perhaps only that call is late
                server.rests_until = now + min(_LONGEST_REST_S, error.retry_after_s or least_s)
            elif started >= server.lost_at:
                server.losses = 0
                server.rests_until = now
