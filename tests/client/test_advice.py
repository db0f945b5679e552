"""What `npugrad advise` adds up: a clock that the test turns, so that each figure is exact."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from npugrad_client._advice import _FEWEST_PROBES, _MOST_KINDS, _PROBES, Advice, CallProfile, KindAdvice
from npugrad_client.errors import ConnectError


@dataclass
class Request:
    """A call of one operand."""

    operator: str = "norm"
    size: int = 256
    odd: str | None = None
    is_mixed: bool = False
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        return {"input": np.zeros(self.size, np.float32)}

    @property
    def nbytes(self) -> int:
        assert self.odd is None, "nothing is known of it"
        return 2 * 4 * self.size

    def operands(self) -> dict[str, Any]:
        return self.inputs

    def give_back(self, found: Any) -> tuple[Any, ...]:
        return (found,)


class World:
    """A host and a service of given speeds, and a profile that sees them.

    Attributes:
        now_s: The time.
        here: Seconds of a call here, by operator.
        there: Seconds of a call that is sent.
        refused: Why an operator cannot be sent.
        disturbed_s: Seconds that a call takes instead, by its number among those that are sent.
        sent: Operators that were sent, one for each time.
    """

    def __init__(self, here: dict[str, float], there: dict[str, float]) -> None:
        self.now_s, self.here, self.there = 0.0, here, there
        self.refused: dict[str, str] = {}
        self.disturbed_s = {1: 0.5}
        self.sent: list[str] = []
        self.profile = CallProfile(self._send, lambda: self.now_s)

    def _send(self, request: Any) -> str:
        self.sent.append(request.operator)
        self.now_s += self.disturbed_s.get(len(self.sent), self.there[request.operator])
        return self.refused.get(request.operator, "")

    def step(self, *requests: Request, forward_s: float = 1.0, other_s: float = 2.0) -> None:
        """A forward pass, and a backward pass with some calls and other operators."""
        self.now_s += forward_s
        with self.profile.backward():
            self.now_s += other_s
            for request in requests:
                assert self.profile.call(request, self._local(request)) == request.operator

    def row(self) -> KindAdvice:
        """What is known of the only kind."""
        (found,) = self.profile.advice().rows
        return found

    def _local(self, request: Request) -> Any:
        def local() -> str:
            self.now_s += self.here[request.operator]
            return request.operator

        return local


def test_a_step_is_told_without_the_time_of_the_measurement() -> None:
    world = World({"norm": 0.5, "grid": 3.0}, {"norm": 2.0, "grid": 0.25})
    for _ in range(5):
        world.step(Request(), Request(), Request("grid"))
    advice = world.profile.advice()
    assert advice.passes == 2
    assert advice.is_warm
    assert advice.backward_s == pytest.approx(2 + 0.5 + 0.5 + 3)
    assert advice.step_s == pytest.approx(1 + 6)
    grid, norm = advice.rows
    assert grid == KindAdvice("grid", "float32[256]", 1, 2048, 3.0, 0.25)
    assert norm == KindAdvice("norm", "float32[256]", 2, 2048, 0.5, 2.0)
    assert (grid.send, norm.send) == (True, False)
    assert (grid.won_s, norm.won_s) == (2.75, -3.0)
    assert advice.known_s == pytest.approx(4.0)
    assert advice.all_sent_s == pytest.approx(6 + 3 - 2.75)
    assert advice.advised_s == pytest.approx(6 - 2.75)


def test_a_kind_is_sent_so_often_and_never_again() -> None:
    world = World({"norm": 0.005}, {"norm": 0.0025})
    for _ in range(2):
        world.step(Request(), Request(size=300))
    assert len(world.sent) == _PROBES


def test_in_every_second_pass_calls_are_sent_where_they_stand() -> None:
    world = World({"norm": 0.5}, {"norm": 2.0})
    world.step(Request(), Request())
    world.there["norm"] = 3.0
    for number in range(1, 5):
        before = len(world.sent)
        world.step(Request(), Request())
        assert len(world.sent) - before == (0 if number % 2 else 2)
    advice = world.profile.advice()
    assert advice.rows == (KindAdvice("norm", "float32[256]", 2, 2048, 0.5, 3.0),)
    assert [advice.backward_s, advice.step_s] == [3.0, 4.0]


def test_a_kind_that_is_new_in_a_pass_that_sends_is_no_call_of_it() -> None:
    world = World({"norm": 0.5, "grid": 7.0}, {"norm": 2.0, "grid": 1.0})
    for requests in ([Request()], [Request()], [Request("grid")], [Request("grid")]):
        world.step(*requests)
    assert {row.operator: row.remote_s for row in world.profile.advice().rows} == {"norm": 2.0, "grid": 1.0}


def test_one_pass_alone_is_its_own_warm_up_and_the_call_that_brings_the_plan_does_not_count() -> None:
    world = World({"norm": 0.5}, {"norm": 2.0})
    world.step(Request())
    assert world.row().remote_s == 2.0
    advice = world.profile.advice()
    assert (advice.passes, advice.is_warm, advice.step_s) == (1, False, None)
    assert advice.backward_s == pytest.approx(2.5)


def test_in_one_pass_a_first_call_that_had_to_warm_up_is_not_the_time_of_all() -> None:
    world = World({"norm": 9.0}, {"norm": 2.0})
    slow = [9.0, *[0.5] * 20]

    def local() -> None:
        world.now_s += slow.pop(0)

    with world.profile.backward():
        world.profile.call(Request(), local)
    assert world.row().local_s == 0.5


def test_a_call_that_was_disturbed_here_is_no_reason_to_send() -> None:
    world = World({"norm": 0.5}, {"norm": 2.0})
    for _ in range(4):
        world.step(Request())
    world.here["norm"] = 50.0
    world.step(Request())
    assert (world.row().local_s, world.row().send) == (0.5, False)


def test_a_tie_stays_here() -> None:
    assert not KindAdvice("norm", "", 1, 1, 1.0, 1.0).send
    assert not KindAdvice("norm", "", 1, 1, 1.0, 0.96).send
    assert KindAdvice("norm", "", 1, 1, 1.0, 0.94).send


def test_sizes_of_a_kind_count_by_byte() -> None:
    world = World({"norm": 1.0}, {"norm": 2.0})
    world.step(Request(size=256))
    world.step(Request(size=384))
    row = world.row()
    assert (row.kind, row.bytes, row.remote_s) == ("float32[256]", 2 * 4 * 384, 3.0)


def test_a_long_call_is_sent_as_often_as_must_be_and_one_disturbed_call_does_not_count() -> None:
    world = World({"norm": 1.0}, {"norm": 20.0})
    world.step(Request())
    assert len(world.sent) == _FEWEST_PROBES
    world = World({"norm": 0.5}, {"norm": 1.0})
    world.disturbed_s = {2: 100.0}
    world.step(Request())
    assert world.row().remote_s == 1.0


def test_what_cannot_be_sent_costs_one_try_and_says_why() -> None:
    world = World({"norm": 1.0}, {"norm": 0.0})
    world.refused["norm"] = "refused with 161002, c.limit"
    for _ in range(3):
        world.step(Request())
    advice = world.profile.advice()
    row = world.row()
    assert (row.remote_s, row.why, row.send, row.won_s) == (None, "refused with 161002, c.limit", False, 0.0)
    assert advice.advised_s == advice.all_sent_s == advice.backward_s
    assert len(world.sent) == 1


def test_what_is_odd_is_not_even_tried() -> None:
    world = World({"norm": 1.0}, {"norm": 1.0})
    world.step(Request(odd="input: found a sparse tensor"))
    row = world.row()
    assert (row.kind, row.why, row.bytes) == ("input: found a sparse tensor", "not dense CPU tensors", 0)
    assert world.sent == []


def test_more_kinds_than_anybody_reads_are_not_measured() -> None:
    names = [f"operator{number}" for number in range(_MOST_KINDS + 3)]
    world = World(dict.fromkeys(names, 1.0), dict.fromkeys(names, 1.0))
    world.step(*map(Request, names))
    rows = world.profile.advice().rows
    assert len(rows) == _MOST_KINDS + 3
    assert sum("not measured" in row.why for row in rows) == 3


def test_a_pass_that_fails_does_not_count_and_one_inside_another_is_part_of_it() -> None:
    world = World({"norm": 1.0}, {"norm": 1.0})
    with pytest.raises(ConnectError), world.profile.backward():
        raise ConnectError("gone")
    assert world.profile.passes == 0
    world.step(Request())
    assert world.profile.passes == 1
    with world.profile.backward() as outer, world.profile.backward() as inner:
        pass
    assert (outer, inner, world.profile.passes) == (True, False, 2)


def test_another_thread_is_not_watched() -> None:
    world = World({"norm": 1.0}, {"norm": 1.0})
    world.step(Request())
    seen: list[bool] = []

    def work() -> None:
        with world.profile.backward() as is_watched:
            seen.append(is_watched)
            world.profile.call(Request("norm", size=1), lambda: None)

    with world.profile.backward():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [False]
    assert world.profile.passes == 2
    assert all(row.kind == "float32[256]" for row in world.profile.advice().rows)


def test_calls_outside_of_a_pass_run_and_do_not_count_and_nothing_known_is_advice_too() -> None:
    world = World({"norm": 1.0}, {"norm": 1.0})
    assert world.profile.call(Request(), lambda: "here") == "here"
    assert world.sent == []
    world.step()
    assert world.profile.advice() == Advice(1, False, 2.0, None, ())
