"""What a client measures of a call, and as a Chrome trace: what is in one lane nests or follows."""

from __future__ import annotations

import copy
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from tests.client.fake_service import fake_service, group_norm

from npugrad.timeline import SERVER_STAGES, serialize_marks
from npugrad_client import Client
from npugrad_client._attempt import Attempt
from npugrad_client._chrome_trace import Trace
from npugrad_client._clock import CallClock

OPERATOR = "group_norm_backward"
TARGETS = ("127.0.0.1:50051", 'unix:"/a\\b"')
TIMES = st.floats(0.0, 0.01)


def made(begun_s: float, ended_s: float, *attempts: Attempt) -> CallClock:
    """A call that was measured so."""
    clock = CallClock(OPERATOR)
    clock.begun_s, clock.packed_s, clock.ended_s = begun_s, begun_s, ended_s
    clock.attempts += attempts
    return clock


@st.composite
def attempts(draw: st.DrawFn, begun_s: float, number: int) -> Attempt:
    """A try that may have got nowhere, overlap others, outlive its call, and of which a server may lie."""
    attempt = Attempt(OPERATOR, draw(st.sampled_from(TARGETS)), number=number)
    attempt.started_s = begun_s + draw(TIMES)
    for name in ("packed_s", "sent_s", "first_s", "received_s", "ended_s"):
        setattr(attempt, name, draw(st.just(0.0) | TIMES.map(lambda after_s: attempt.started_s + after_s)))
    attempt.error = draw(st.sampled_from(("", "ConnectError")))
    ends = draw(st.lists(st.tuples(st.sampled_from(SERVER_STAGES), TIMES), max_size=4))
    attempt.stages = serialize_marks([("", 0.0), *ends])
    return attempt


@st.composite
def clocks(draw: st.DrawFn) -> CallClock:
    begun_s = 1e6 + draw(TIMES) * 10
    clock = made(begun_s, begun_s + draw(TIMES))
    clock.packed_s += draw(TIMES)
    clock.attempts += [draw(attempts(begun_s, number)) for number in range(1, 1 + draw(st.integers(0, 3)))]
    return clock


def events(calls: Iterable[CallClock]) -> list[dict[str, Any]]:
    trace = Trace()
    texts = trace.begin()
    for number, clock in enumerate(calls):
        texts += trace.events(clock, {"request_id": f"{number}", "error": 'a "quoted" one\n'})
    return [json.loads(text) for text in texts]


def lanes(found: Iterable[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The slices of each lane, by their start, the longest first."""
    by_lane = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            by_lane[event["pid"], event["tid"]].append(event)
    return {
        lane: sorted(slices, key=lambda each: (each["ts"], -each["dur"])) for lane, slices in by_lane.items()
    }


@given(st.lists(clocks(), max_size=6))
def test_each_call_is_there_once_and_what_is_in_one_lane_has_a_name_and_nests_or_follows(
    calls: list[CallClock],
) -> None:
    calls.sort(key=lambda clock: clock.ended_s)
    found = events(calls)
    for slices in lanes(found).values():
        open_until: list[int] = []
        for each in slices:
            assert each["dur"] > 0
            while open_until and open_until[-1] <= each["ts"]:
                open_until.pop()
            assert not open_until or each["ts"] + each["dur"] <= open_until[-1]
            open_until.append(each["ts"] + each["dur"])
    drawn = [each["args"]["request_id"] for each in of_client(found) if each["name"] == OPERATOR]
    assert drawn == [str(number) for number in range(len(calls))]
    assert {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"} == set(lanes(found))


def of_client(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == "X" and event["pid"] == 1]


def test_calls_that_follow_share_a_lane_and_calls_at_once_have_one_each() -> None:
    calls = [made(1.0, 2.0), made(2.0, 3.0), made(2.5, 3.5), made(2.0, 4.0), made(4.0, 5.0)]
    assert [each["tid"] for each in of_client(events(calls))] == [1, 1, 2, 3, 3]


def test_tries_at_once_have_lanes_of_their_own_with_their_stages_below_them() -> None:
    first = Attempt(OPERATOR, "a:1", started_s=1.1)
    second = Attempt(OPERATOR, "b:1", started_s=1.5, packed_s=1.6, received_s=1.9, number=2)
    second.stages = serialize_marks([("", 7.0), ("run", 7.1)])
    found = events([made(1.0, 2.0, first, second)])
    assert {(each["name"], each["tid"]) for each in of_client(found)} == {
        (OPERATOR, 1), ("try 1", 1), ("try 2", 2), ("pack", 2), ("unpack", 2)
    }  # fmt: skip
    begins, ends = (event for event in found if event["ph"] in "sf")
    assert (begins["ph"], ends["ph"], begins["id"]) == ("s", "f", ends["id"])
    run = next(event for event in found if event["name"] == "run")
    assert (begins["pid"], begins["tid"], ends["pid"]) == (1, 2, run["pid"])
    assert begins["ts"] == ends["ts"] == run["ts"]
    (server,) = [e["args"]["name"] for e in found if e["name"] == "process_name" and e["pid"] == run["pid"]]
    assert server == "server b:1"


def test_a_reply_that_was_refused_is_unpacked_until_its_try_fails_and_no_longer() -> None:
    clock = CallClock(OPERATOR)
    clock.begun_s = clock.packed_s = 1.0
    clock.attempts += [
        Attempt(OPERATOR, "a:1", started_s=1.0, received_s=2.0, ended_s=3.0, error="NpugradError"),
        Attempt(OPERATOR, "a:1", started_s=4.0, received_s=5.0, number=2),
    ]
    clock.ended_s = 6.0
    unpacked = [(i.start_s, i.end_s) for i in clock.timeline().stages if i.stage == "unpack"]
    assert unpacked == [(1.0, 2.0), (4.0, 5.0)]


def test_what_a_try_that_lost_does_after_the_call_is_no_part_of_it() -> None:
    clock = CallClock(OPERATOR)
    clock.begun_s = clock.packed_s = 1.0
    stages = serialize_marks([("", 0.0), ("queued", 1.0), ("run", 6.0)])
    clock.attempts += [
        Attempt("", "a:1", started_s=1.0, ended_s=5.0, error="Cancelled"),
        Attempt("", "b:1", started_s=1.0, first_s=2.0, received_s=7.0, number=2, stages=stages),
        Attempt("", "c:1", started_s=2.0, received_s=3.0, number=3),
        Attempt("", "d:1", started_s=4.5, number=4),
    ]
    clock.ended_s = 4.0
    timeline = clock.timeline()
    assert [(each.number, each.end_s) for each in timeline.tries] == [(1, 3.0), (2, 3.0), (3, 3.0)]
    assert {i.stage for i in timeline.stages} == {"read", "queued", "run", "unpack"}
    assert all(0 <= i.start_s < i.end_s <= timeline.wall_s for i in timeline.stages)


def test_what_a_call_says_of_itself_can_be_copied_and_sent_whatever_listened_to_it(tmp_path: Path) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    with (
        fake_service() as service,
        Client(service.address, timeout_s=60, tracing=provider) as client,
        client.profile(tmp_path / "calls.json"),
    ):
        info = client.group_norm_backward(**group_norm()).info
        for found in (pickle.loads(pickle.dumps(info)), copy.deepcopy(info)):
            assert found == info
            assert found.timeline == info.timeline
        # JSON has lists in place of tuples
        assert json.loads(json.dumps(asdict(info))) == {**asdict(info), "verified": []}
