"""What callers may take of the front process's memory, outside the arenas.

Before a handler reads a message, and after it has, gRPC takes of each open call what fits its window, and
nothing tells how much that is. By itself, it would choose windows of 4 MiB and more, up to 1 GiB on a
connection whose client delays its answers to pings. So they are of a fixed size, and those of as many calls
as may be open are set aside. The price: an upload that needs more in transit, for its distance and rate, is
slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npugrad_server.config import FRONT_MESSAGES, LEAST_MESSAGE_BYTES, MESSAGES_PER_CALL
from npugrad_server.machine import memory_bytes

if TYPE_CHECKING:
    from npugrad_server.config import ServerSettings

_MOST_BYTES = 4 * 2**30
"""Upper limit of the default, however much memory the host has."""
_WINDOWS_PART = 4
"""One part in so many of the memory is for what calls send before it is read, or after."""
_QUERIES_PART = 16
"""One part in so many is for messages about the server, of health and of reflection; as much for what they
send unread."""
_OVERHEAD_PART = 32
"""One part in so many is for what gRPC and malloc need besides."""
_LEAST_WINDOW_BYTES, _MOST_WINDOW_BYTES = 2**16, 2**24
"""HTTP/2 gives clients the first before they know of another; the second is 1 Gb/s for 130 ms."""
_QUERY_S = 10.0
"""Seconds for a message of theirs to arrive, which is small."""


@dataclass(frozen=True)
class FrontLimits:
    """Limits of the front process.

    Attributes:
        memory_bytes: Bytes of messages and replies together.
        message_bytes: Bytes of the largest message.
        calls: RPCs at once.
        upload_timeout_s: Seconds for a message to arrive.
        reply_timeout_s: Seconds for a reply to be taken.
        window_bytes: Bytes that gRPC takes of an open call without anybody reading them.
        call_messages: Number of largest messages whose memory one tenant may always have.
        total_bytes: `memory_bytes` and what is set aside: what the process may grow by.
    """

    memory_bytes: int = 2**63
    message_bytes: int = LEAST_MESSAGE_BYTES
    calls: int = 2**31
    upload_timeout_s: float = 60.0
    reply_timeout_s: float = 60.0
    window_bytes: int = 0
    call_messages: int = MESSAGES_PER_CALL
    total_bytes: int = 2**63

    @classmethod
    def of(cls, settings: ServerSettings) -> FrontLimits:
        """The limits of a server; the default for memory is a fraction of the host's."""
        largest = int(settings.max_message_bytes)
        sensible = max(min(memory_bytes() // 8, _MOST_BYTES), FRONT_MESSAGES * largest)
        total = int(settings.front_memory_bytes or sensible)
        share, calls = total // _WINDOWS_PART, settings.max_calls
        fair = min(share // calls, (share + total // _QUERIES_PART) // (calls + _query_calls(calls)))
        window = min(max(fair, _LEAST_WINDOW_BYTES), _MOST_WINDOW_BYTES)
        limits = cls(
            message_bytes=largest,
            calls=min(calls, share // window),
            upload_timeout_s=settings.upload_idle_timeout_s,
            reply_timeout_s=settings.unary_reply_timeout_s,
            window_bytes=window,
            total_bytes=total,
        )
        queries = limits.of_queries()
        windows = window * (limits.calls + queries.calls)
        aside = windows + queries.memory_bytes + total // _OVERHEAD_PART
        return replace(limits, memory_bytes=total - aside)

    def of_queries(self) -> FrontLimits:
        """The limits of calls about the server, health and reflection, whose messages are small."""
        return replace(
            self,
            memory_bytes=max(self.total_bytes // _QUERIES_PART, self.message_bytes + 2**20),
            calls=_query_calls(self.calls),
            upload_timeout_s=min(self.upload_timeout_s, _QUERY_S),
            call_messages=1,
        )

    @property
    def call_bytes(self) -> int:
        """Memory that the largest unary call takes."""
        return self.call_messages * self.message_bytes

    def incoming_bytes(self, *, is_streamed: bool) -> int:
        """Bytes that a message in transit counts as; a stream's are frames, and its header is small."""
        return min(self.message_bytes, LEAST_MESSAGE_BYTES) if is_streamed else self.message_bytes


def _query_calls(calls: int) -> int:
    """Places of calls about the server, by those of the others."""
    return max(1, calls * _WINDOWS_PART // _QUERIES_PART)
