"""A cache of plans against a list: what was used last stays, and a label has a quarter of the room."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from npugrad.plan_cache import PlanCache

KEYS = st.integers(0, 30).map(lambda number: b"%d" % number)


SIZES = st.integers(1, 110) | st.sampled_from((25, 50, 99, 100, 101))
"""Some of them fill a share, or the whole, to the byte."""


def test_a_cache_may_be_full_to_the_byte() -> None:
    cache: PlanCache[int] = PlanCache(400)
    for number in range(4):
        cache.put(b"%d" % number, number, f"label {number}", 100)
    assert cache.get(b"0") == 0
    cache.put(b"4", 4, "label 4", 100)
    assert [number for number in range(5) if cache.get(b"%d" % number) is not None] == [0, 2, 3, 4]


class Model(RuleBasedStateMachine):
    """Against a list, the plan used last at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: PlanCache[int] = PlanCache(400)
        self.rows: list[tuple[bytes, int, str, int]] = []

    @rule(key=KEYS, plan=st.integers(0, 9), label=st.sampled_from("abcde"), nbytes=SIZES)
    def put(self, key: bytes, plan: int, label: str, nbytes: int) -> None:
        self.cache.put(key, plan, label, nbytes)
        self.rows = [row for row in self.rows if row[0] != key] + [(key, plan, label, nbytes)]
        while sum(row[3] for row in self.rows if row[2] == label) > 100:
            self.rows.remove(next(row for row in self.rows if row[2] == label))
        while sum(row[3] for row in self.rows) > 400:
            del self.rows[0]

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        row = next((row for row in self.rows if row[0] == key), None)
        assert self.cache.get(key) == (None if row is None else row[1])
        if row is not None:
            self.rows.remove(row)
            self.rows.append(row)

    @invariant()
    def counts(self) -> None:
        assert len(self.cache) == len(self.rows)
        assert self.cache.nbytes == sum(row[3] for row in self.rows)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=50, deadline=None)
