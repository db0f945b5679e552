"""What a client measures of a call."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from tests.client.fake_service import Context, abort_with, fake_service, group_norm

from npugrad.errors import ServerBusy
from npugrad.timeline import serialize_marks
from npugrad_client import Client, RetryPolicy
from npugrad_client._attempt import Attempt
from npugrad_client._clock import CallClock


def test_a_reply_that_was_refused_is_unpacked_until_its_try_fails_and_no_longer() -> None:
    clock = CallClock("group_norm_backward")
    clock.begun_s = clock.packed_s = 1.0
    clock.attempts += [
        Attempt(
            "group_norm_backward", "a:1", started_s=1.0, received_s=2.0, ended_s=3.0, error="NpugradError"
        ),
        Attempt("group_norm_backward", "a:1", started_s=4.0, received_s=5.0, number=2),
    ]
    clock.ended_s = 6.0
    unpacked = [(i.start_s, i.end_s) for i in clock.timeline().stages if i.stage == "unpack"]
    assert unpacked == [(1.0, 2.0), (4.0, 5.0)]


def test_what_a_try_that_lost_does_after_the_call_is_no_part_of_it() -> None:
    clock = CallClock("group_norm_backward")
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


def test_a_call_of_several_tries_keeps_its_timeline() -> None:
    tries = iter((True, False))

    def busy_once(context: Context) -> None:
        if next(tries):
            abort_with(context, ServerBusy("busy", operator="group_norm_backward"))

    retry = RetryPolicy(initial_backoff_s=0.001)
    with (
        fake_service(before=busy_once) as service,
        Client(service.address, timeout_s=60, retry=retry) as client,
    ):
        info = client.group_norm_backward(**group_norm()).info
    assert info.tries == 2
    assert info.timeline is not None
    assert [each.error for each in info.timeline.tries] == ["ServerBusy", ""]
