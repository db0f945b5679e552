"""Plans of calls by signature: bounded in bytes, and so that no caller can drive out those of all others."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

PlanT = TypeVar("PlanT")

_SHARES = 4
"""The part of the cache that plans of one label may take at most: one in this many."""


class _Entry(NamedTuple):
    plan: Any
    nbytes: int
    label: str


@dataclass
class _Shelf:
    """The keys that came under one label, the one longest not used first."""

    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    nbytes: int = 0


class PlanCache(Generic[PlanT]):
    """The plans used last.

    A plan belongs to the label of the call that it was made for, and serves calls of any. Where a label has
    more than its share, its own plan that was longest not used goes; where all have too much, that of all.

    Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        """Starts empty.

        Args:
            max_bytes: What the plans may take together, as `put` is told.
        """
        self._max_bytes, self._share_bytes = max_bytes, max_bytes // _SHARES
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._shelves: dict[str, _Shelf] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        """How many plans there are."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """What the plans take together."""
        return self._nbytes

    def get(self, key: bytes) -> PlanT | None:
        """The plan of a signature, which so was used last; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._shelves[entry.label].keys.move_to_end(key)
        found: PlanT = entry.plan
        return found

    def put(self, key: bytes, plan: PlanT, label: str, nbytes: int) -> None:
        """Keeps a plan, in place of that of the same signature if there is one.

        Args:
            key: The signature.
            plan: The plan.
            label: Label of the call that it was made for.
            nbytes: About what key and plan take.
        """
        if key in self._entries:
            self._remove(key)
        shelf = self._shelves.setdefault(label, _Shelf())
        self._entries[key] = _Entry(plan, nbytes, label)
        shelf.keys[key] = None
        shelf.nbytes += nbytes
        self._nbytes += nbytes
        while shelf.nbytes > self._share_bytes:
            self._remove(next(iter(shelf.keys)))
        while self._nbytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        shelf = self._shelves[entry.label]
        del shelf.keys[key]
        shelf.nbytes -= entry.nbytes
        self._nbytes -= entry.nbytes
        if not shelf.keys:
            del self._shelves[entry.label]
