"""When a stream passed the stages of a call, measured by device events.

The host does not wait between the stages, so only the stream knows. If CANN lacks the functions, the host
waits at every mark and reads its own clock: the figures mean the same, but the calls are slower.
"""

from __future__ import annotations

import time
from enum import Enum, auto
from typing import TYPE_CHECKING

from npugrad_server.acl.runtime import AclError

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_server.acl.runtime import Runtime


class EventMark(Enum):
    """A point of a call that its stream passes, in this order."""

    BEGUN = auto()
    """Nothing has run yet."""
    SENT = auto()
    """All operands are on the device."""
    READY = auto()
    """The operator comes next: whatever the host did during the copies is over."""
    RAN = auto()
    """The operator has run."""
    FETCHED = auto()
    """All results are in pinned memory."""


class StreamClock:
    """The marks of one stream, for that stream's thread; each call sets them again."""

    def __init__(self, runtime: Runtime) -> None:
        """Makes the events.

        Raises:
            AclError: CANN could not make one.
        """
        self._runtime = runtime
        self._events = {mark: runtime.make_event() for mark in EventMark} if runtime.has_events else {}
        self._host_s = dict.fromkeys(EventMark, 0.0)

    def set(self, mark: EventMark, stream: int, wait: Callable[[], None]) -> None:
        """Records when the stream gets here.

        Args:
            mark: Which point this is.
            stream: Raw stream.
            wait: Waits until all that is queued has run; called only where there are no events.

        Raises:
            AclError: The event could not be queued, or the wait failed.
        """
        if self._events:
            self._runtime.record(self._events[mark], stream)
        else:
            wait()
        self._host_s[mark] = time.perf_counter()

    def seconds(self, first: EventMark, last: EventMark) -> float:
        """Time between two marks, once the stream was waited for.

        If CANN does not tell although the call succeeded, the host's times serve instead: when the marks were
        queued.

        Raises:
            AclError: The device failed.
        """
        if self._events:
            try:
                return self._runtime.elapsed_s(self._events[first], self._events[last])
            except AclError as error:
                if error.fault.action.ends_worker:
                    raise
        return self._host_s[last] - self._host_s[first]

    def close(self) -> None:
        """Destroys the events; the stream must have been waited for.

        Raises:
            AclError: CANN refused.
        """
        while self._events:
            self._runtime.destroy_event(self._events.popitem()[1])
