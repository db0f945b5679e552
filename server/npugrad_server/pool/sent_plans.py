"""Tracks which plans were sent to a worker process, and under which numbers.

Guarantees
    - A number stands for one plan as long as the process lives, and is not reused for another.
    - The process keeps at most `MOST_PLANS` plans, plus those that only running calls still use.
    - It is told to forget a plan once, after the last call that uses it has ended.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad_server.worker.protocol import ForgetPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_server.pool.types import CallPlan

MOST_PLANS = 256
"""Plans that a process keeps; each takes some kilobytes there."""


@dataclass
class _Sent:
    """A plan that was sent to the process.

    Attributes:
        number: Its number.
        running: Calls with this number that have not ended.
        dropped: Whether no later call gets the number.
    """

    number: int
    running: int = 0
    dropped: bool = False


class SentPlans:
    """The plans of one worker process, the most recently used one last. On the pool's event loop."""

    def __init__(self, tell: Callable[[ForgetPlan], None], most: int = MOST_PLANS) -> None:
        """Starts with none.

        Args:
            tell: Sends a message to the process.
            most: Maximum number of plans it keeps.
        """
        self._tell, self._most = tell, most
        self._numbers = itertools.count()
        self._sent: OrderedDict[CallPlan, _Sent] = OrderedDict()
        self._running: dict[int, _Sent] = {}

    def begin(self, call: int, plan: CallPlan) -> tuple[int, bool]:
        """A call is handed to the process.

        Args:
            call: Its number, unique among the calls running there.
            plan: Its plan; calls share a plan only if it is the same object.

        Returns:
            The plan's number, and whether the process has the plan: if not, the call must bring it.
        """
        sent = self._sent.get(plan)
        if sent is not None:
            self._sent.move_to_end(plan)
            self._count(call, sent)
            return sent.number, True
        self._sent[plan] = sent = _Sent(next(self._numbers))
        self._count(call, sent)
        if len(self._sent) > self._most:
            _, oldest = self._sent.popitem(last=False)
            self._drop(oldest)
        return sent.number, False

    def _count(self, call: int, sent: _Sent) -> None:
        sent.running += 1
        self._running[call] = sent

    def _drop(self, sent: _Sent) -> None:
        sent.dropped = True
        if not sent.running:
            self._tell(ForgetPlan(sent.number))

    def end(self, call: int) -> None:
        """The process has answered a call; nothing happens if the call had no plan number."""
        sent = self._running.pop(call, None)
        if sent is not None:
            sent.running -= 1
            if sent.dropped and not sent.running:
                self._tell(ForgetPlan(sent.number))

    def missed(self, call: int) -> bool:
        """The process reports that it lacks the plan number a call came with: no later call gets that number.

        Returns:
            Whether the call had a number and so must be sent whole; it no longer has one.
        """
        sent = self._running.get(call)
        if sent is None:
            return False
        for plan in [plan for plan, known in self._sent.items() if known is sent]:
            del self._sent[plan]  # the process has nothing to forget
        self.end(call)
        return True
