from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from npugrad.plan_cache import PlanCache

KEYS = st.integers(0, 30).map(lambda number: b"%d" % number)


def filled(max_bytes: int, *rows: tuple[bytes, str, int]) -> PlanCache[str]:
    cache: PlanCache[str] = PlanCache(max_bytes)
    for key, label, nbytes in rows:
        cache.put(key, f"plan {key.decode()}", label, nbytes)
    return cache


def kept(cache: PlanCache[str], *keys: bytes) -> list[bytes]:
    return [key for key in keys if cache.get(key) is not None]


def test_a_plan_is_found_by_its_signature_alone() -> None:
    cache = filled(400, (b"a", "x", 10), (b"b", "y", 10))
    assert cache.get(b"a") == "plan a"
    assert cache.get(b"c") is None
    assert (len(cache), cache.nbytes) == (2, 20)


def test_a_caller_with_too_many_signatures_drives_out_its_own() -> None:
    cache = filled(400, (b"mine", "me", 50))
    for number in range(1000):
        cache.put(b"%d" % number, "plan", "somebody", 25)
    assert cache.get(b"mine") == "plan mine"
    assert (len(cache), cache.nbytes) == (5, 150)
    assert kept(cache, b"995", b"996", b"999") == [b"996", b"999"]


def test_with_many_labels_what_was_longest_not_used_goes() -> None:
    cache = filled(400, *[(b"%d" % number, f"label {number}", 100) for number in range(4)])
    assert cache.get(b"0")
    cache.put(b"4", "plan", "label 4", 100)
    assert kept(cache, b"0", b"1", b"2", b"3", b"4") == [b"0", b"2", b"3", b"4"]


def test_use_counts_within_a_label_too() -> None:
    cache = filled(400, (b"a", "x", 50), (b"b", "x", 50))
    assert cache.get(b"a")
    cache.put(b"c", "plan", "x", 50)
    assert kept(cache, b"a", b"b", b"c") == [b"a", b"c"]


def test_a_plan_that_never_fits_is_not_kept_and_leaves_nothing_behind() -> None:
    cache = filled(400, (b"a", "x", 101))
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_signature_that_is_put_again_belongs_to_its_last_caller() -> None:
    cache = filled(400, (b"a", "x", 60), (b"a", "y", 70), (b"b", "x", 100))
    assert (len(cache), cache.nbytes) == (2, 170)
    cache.put(b"c", "plan", "y", 60)
    assert kept(cache, b"a", b"b", b"c") == [b"b", b"c"]


class Model(RuleBasedStateMachine):
    """Against a list, the plan used last at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: PlanCache[int] = PlanCache(400)
        self.rows: list[tuple[bytes, int, str, int]] = []

    @rule(key=KEYS, plan=st.integers(0, 9), label=st.sampled_from("abcde"), nbytes=st.integers(1, 110))
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
