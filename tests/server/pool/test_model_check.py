"""A small `make prove-model-check`, and that it finds what it looks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.proofs.model_check import checked
from tests.server.pool.pool_world import PoolWorld
from tests.summary import tally_of

from npugrad_server.pool.call_lifecycle import CallLifecycle
from npugrad_server.pool.circuit_breaker import CircuitBreaker
from npugrad_server.pool.fair_queue import FairQueue
from npugrad_server.pool.isolation import Isolation
from npugrad_server.pool.placement import Placement
from npugrad_server.pool.regions import RegionAllocator


@pytest.mark.slow
@pytest.mark.parametrize(
    ("events", "seed", "length"),
    [(4000, 0, 250), pytest.param(30_000, 1_000_000, 1000, marks=pytest.mark.deep)],
)
def test_no_promise_breaks(pytestconfig: pytest.Config, events: int, seed: int, length: int) -> None:
    """In many short histories, each in a world of its own; and in longer ones."""
    found = checked(events, seed, length)
    assert not found.failure, found.failure
    assert found.calls > events / 10
    assert {
        "QUEUE_FULL",
        "QUOTA_EXCEEDED",
        "DEADLINE_EXCEEDED",
        "WORKER_LOST",
        "CIRCUIT_OPEN",
    } <= found.answers.keys()
    assert {"outside", "inside", "hang", "several at once", "crash", "out of memory"} <= found.causes.keys()
    tally_of(pytestconfig, "server pool")("model check: events", found.events)


_forget = CallLifecycle.forget


def _forget_twice(self: Any, call: Any, out: Any) -> None:
    _forget(self, call, out)
    out.append(out[-1])


def _newest_first(self: Any, lets_pass: Any) -> Any:
    return iter(sorted(self, key=lambda call: -call.id))


# What is wrong, and what the check then says.
MISTAKES: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "memory is given back twice": (CallLifecycle, "forget", _forget_twice, "KeyError"),
    "nothing starts": (Placement, "place", lambda *_: None, "waits for nothing"),
    "the newest call is next": (FairQueue, "in_turn", _newest_first, "passes"),
    "operands are not freed": (RegionAllocator, "free", lambda *_: None, "AssertionError"),
    "suspects are not alone": (Isolation, "isolates", lambda *_: False, "a suspect is not isolated"),
    "suspects take all": (Isolation, "leaves_enough", lambda *_: True, "takes the last device"),
    "hardly any evidence": (CircuitBreaker, "_limit", lambda *_: 1, "a circuit opens without evidence"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_and_its_history_is_short(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, sign = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    found = checked(20_000, seed=2, length=100)
    assert sign in found.failure
    assert len(found.failure.splitlines()) <= 30, found.failure


def test_events_that_cannot_happen_do_nothing() -> None:
    world = PoolWorld(3)
    for name in ("uploaded", "answer", "ask", "come_back", "hang_up", "cancel", "close", "stale"):
        assert world.apply((name, 1)) == ""
    world.finish()
