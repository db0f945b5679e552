"""How fast one direction of a stream has to be: an idle timeout, a least rate and a limit for the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npugrad_server.config import ServerSettings

GIVES_WAY_AFTER_S = 5.0
"""Seconds after which a stream that moves nothing gives way to others; before, it may have just begun."""


@dataclass(frozen=True)
class PaceLimits:
    """What is asked of a client.

    Attributes:
        idle_s: Longest wait for a single frame.
        min_bytes_per_s: Least rate on average; a stream may be behind it by `idle_s`.
        limit_s: Longest wait for all frames together.
    """

    idle_s: float
    min_bytes_per_s: float = 0.0
    limit_s: float = math.inf

    @classmethod
    def of_uploads(cls, settings: ServerSettings) -> PaceLimits:
        """What a server asks of its clients' uploads."""
        return cls(settings.upload_idle_timeout_s, settings.upload_min_bytes_per_s, settings.upload_limit_s)

    @classmethod
    def of_replies(cls, settings: ServerSettings) -> PaceLimits:
        """What a server asks of clients that take its replies."""
        return cls(settings.reply_idle_timeout_s, settings.reply_min_bytes_per_s, settings.reply_limit_s)


class Pace:
    """How fast a client was so far. Only the time counts in which it was waited for.

    Attributes:
        limits: What is asked of it.
        waited_s: Seconds that were waited.
        moved_bytes: Bytes of contents that it sent or took.
    """

    def __init__(self, limits: PaceLimits) -> None:
        """Nothing has moved, and nobody has waited."""
        self.limits = limits
        self.waited_s = 0.0
        self.moved_bytes = 0

    def left_s(self) -> float:
        """How long the next frame may be waited for."""
        limits = self.limits
        left_s = limits.idle_s
        if limits.min_bytes_per_s:
            left_s += min(0.0, self.moved_bytes / limits.min_bytes_per_s - self.waited_s)
        return max(0.0, min(left_s, limits.limit_s - self.waited_s))

    def is_slow(self, waiting_s: float) -> bool:
        """Whether it was below the least rate so far, with no allowance but for its first seconds.

        Args:
            waiting_s: How long a frame has been waited for now.
        """
        waited_s = self.waited_s + waiting_s
        return waited_s > GIVES_WAY_AFTER_S and self.moved_bytes < self.limits.min_bytes_per_s * waited_s

    def late_text(self, waiting_s: float, found: str, expected: str) -> str:
        """What to say of a frame that was waited for too long.

        Args:
            waiting_s: How long.
            found: What there was instead of it.
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
