"""The pace required of one direction of a stream: an idle timeout, a minimum rate and a total limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npugrad_server.config import ServerSettings

GIVES_WAY_AFTER_S = 5.0
"""Seconds after which an idle stream gives way to others; before, it may have just begun."""
KEEPS_AT_MOST_S = 10.0
"""Seconds for which an upload may keep memory that others wait for, if its tenant is over its share."""


@dataclass(frozen=True)
class PaceLimits:
    """The pace required of a client.

    Attributes:
        idle_s: Longest wait for a single frame.
        min_bytes_per_s: Minimum average rate; a stream may lag behind it by `idle_s`.
        limit_s: Longest wait for all frames together.
    """

    idle_s: float
    min_bytes_per_s: float = 0.0
    limit_s: float = math.inf

    @classmethod
    def of_uploads(cls, settings: ServerSettings) -> PaceLimits:
        """The limits of clients' uploads."""
        return cls(settings.upload_idle_timeout_s, settings.upload_min_bytes_per_s, settings.upload_limit_s)

    @classmethod
    def of_replies(cls, settings: ServerSettings) -> PaceLimits:
        """The limits of clients that take replies."""
        return cls(settings.reply_idle_timeout_s, settings.reply_min_bytes_per_s, settings.reply_limit_s)


class Pace:
    """A client's pace so far. Only time spent waiting for it counts.

    Attributes:
        limits: The required pace.
        waited_s: Seconds spent waiting for it.
        moved_bytes: Bytes of contents that it sent or took.
    """

    def __init__(self, limits: PaceLimits) -> None:
        """Starts at zero."""
        self.limits = limits
        self.waited_s = 0.0
        self.moved_bytes = 0

    def left_s(self) -> float:
        """Longest wait for the next frame, in seconds."""
        limits = self.limits
        left_s = limits.idle_s
        if limits.min_bytes_per_s:
            left_s += min(0.0, self.moved_bytes / limits.min_bytes_per_s - self.waited_s)
        return max(0.0, min(left_s, limits.limit_s - self.waited_s))

    def is_slow(self, waiting_s: float) -> bool:
        """Whether it is below the minimum rate so far, with no allowance except for its first seconds.

        Args:
            waiting_s: Seconds of the current wait.
        """
        waited_s = self.waited_s + waiting_s
        return waited_s > GIVES_WAY_AFTER_S and self.moved_bytes < self.limits.min_bytes_per_s * waited_s

    def takes_s(self, missing_bytes: int, waiting_s: float) -> float:
        """Seconds that the missing bytes take at its rate so far.

        Args:
            missing_bytes: Bytes still to come.
            waiting_s: Seconds of the current wait.
        """
        return missing_bytes * (self.waited_s + waiting_s) / max(1, self.moved_bytes)

    def late_text(self, waiting_s: float, found: str, expected: str) -> str:
        """The error text for a frame that took too long.

        Args:
            waiting_s: Seconds of the wait.
            found: What was there instead.
            expected: What should have come.
        """
        limits, waited_s = self.limits, self.waited_s + waiting_s
        if waited_s >= limits.limit_s:
            return f"found {self._so_far(waited_s)}; expected all of it within {limits.limit_s:g} s"
        if waiting_s >= limits.idle_s:
            return f"found {found} for {limits.idle_s:g} s; expected {expected} before that"
        return (
            f"found {self._so_far(waited_s)}; expected at least {limits.min_bytes_per_s:g} bytes/s after the "
            f"first {limits.idle_s:g} s"
        )

    def _so_far(self, waited_s: float) -> str:
        return f"{self.moved_bytes} bytes in {waited_s:.3g} s"
