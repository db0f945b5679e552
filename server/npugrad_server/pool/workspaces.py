"""How much workspace operators asked for, so that it can be set aside before they ask again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

CAPACITY = 4096
"""Kinds of calls that are remembered; each takes some hundred bytes."""


class LearnedWorkspaces:
    """Remembers the newest figure of each kind of call; those not met for longest are forgotten."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Knows nothing yet.

        Args:
            capacity: Kinds of calls to remember.
        """
        self._capacity = capacity
        self._known: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, key: Hashable, nbytes: int) -> None:
        """Notes what an operator asked for."""
        self._known[key] = nbytes
        self._known.move_to_end(key)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def expect(self, key: Hashable) -> int:
        """Bytes that a call will ask for; 0 when nobody knows."""
        if key not in self._known:
            return 0
        self._known.move_to_end(key)
        return self._known[key]
