"""A cache of plans by signature: bounded in bytes, and no caller can evict the plans of all others."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

PlanT = TypeVar("PlanT")

_SHARES = 4
"""The plans of one label may take at most one in this many parts of the cache."""


class _Entry(NamedTuple):
    plan: Any
    nbytes: int
    label: str


@dataclass
class _Shelf:
    """The keys of one label, the least recently used first."""

    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    nbytes: int = 0


class PlanCache(Generic[PlanT]):
    """The most recently used plans.

    A plan belongs to the label of the call for which it was made, but serves calls of any label. If a label
    exceeds its share, its own least recently used plan is evicted; if all together exceed the limit, that of
    all.

    Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        """Starts empty.

        Args:
            max_bytes: Maximum total size of the plans, as passed to `put`.
        """
        self._max_bytes, self._share_bytes = max_bytes, max_bytes // _SHARES
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._shelves: dict[str, _Shelf] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        """Number of plans."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Total size of the plans."""
        return self._nbytes

    def get(self, key: bytes) -> PlanT | None:
        """Returns the plan of a signature and marks it as used; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._shelves[entry.label].keys.move_to_end(key)
        found: PlanT = entry.plan
        return found

    def put(self, key: bytes, plan: PlanT, label: str, nbytes: int) -> None:
        """Keeps a plan; replaces the one of the same signature if there is one.

        Args:
            key: The signature.
            plan: The plan.
            label: Label of the call for which it was made.
            nbytes: Approximate size of key and plan.
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
