"""Where the time of a call went: a delay shows in the stage that has it, and in no other."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs
from tests.calls import sample
from tests.client.both import BOTH, Looped, Make
from tests.e2e.delays.sitecustomize import DELAY_S, SERVER, VARIABLE, hold_up
from tests.e2e.harness import STREAMED, UNARY, eventually, workers_of
from tests.fix_server import ServerProcess, StartServer, run_server

from npugrad.errors import DeadlineExceeded
from npugrad.timeline import CLIENT_STAGES, SERVER_STAGES, Timeline
from npugrad_client import Client, RetryPolicy

Enough = Callable[[Sequence[Timeline]], bool]

CLIENT = {
    "pack": "npugrad_client._plans:Plans.prepare",
    "send": "npugrad_client._frames:open_call",
    "read": "npugrad_client._frames:Reply.feed",
    "unpack": "npugrad_client._client:finish",
}
"""As `SERVER`, for the client."""
BESIDE = {"send": "receive", "receive": "send", "send_back": "read", "read": "send_back"}
"""Stages that wait for each other, client and server."""
_MOST_CALLS = 30
_SEEN_S = DELAY_S - 1e-6
"""Of a delay: times are differences of others, and lose a digit."""
_NEW = itertools.count(257)
_SIZES = {"n": 4, "c": 64, "hxw": 256, "group": 8}  # 256 KiB: from there on, results travel in chunks


@dataclass
class Held:
    """A server, and the file that says which of its stages is held up."""

    server: ServerProcess
    file: Path


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    folder = tmp_path_factory.mktemp("held")
    file = folder / "stage"
    file.write_text("")
    delays, root = Path(__file__).with_name("delays"), Path(__file__).parents[2]
    env = {VARIABLE: str(file), "PYTHONPATH": f"{delays}:{root}"}
    flags = ("--metrics-listen", "127.0.0.1:0")
    with run_server(folder / "log", *flags, devices="test:1?compute=1", env=env) as running:
        yield Held(running, file)


def arguments(**sizes: Any) -> dict[str, Any]:
    made = sample(**sizes)
    return {**made.arrays, **made.call.attrs}


def calls(stage: str) -> Iterator[dict[str, Any]]:
    """Arguments of calls, of one signature but where validation is looked at, which is done once for each."""
    for _ in range(_MOST_CALLS):
        hxw = {"validate": next(_NEW), "large": 2**14}.get(stage, _SIZES["hxw"])
        yield {**arguments(**{**_SIZES, "hxw": hxw}), "verify": stage == "verify"}


def timelines(make: Make, address: str, way: int, stage: str, enough: Enough) -> list[Timeline]:
    """Timelines of calls, of which the first has no plan, until there are enough."""
    found: list[Timeline] = []
    with make(address, stream_from_bytes=way) as client:
        for call in calls(stage):
            found.append(timeline_of(client.group_norm_backward(**call)))
            if enough(found):
                break
    return found


def timeline_of(result: Any) -> Timeline:
    timeline = result.info.timeline
    assert isinstance(timeline, Timeline)
    return timeline


@pytest.mark.parametrize(
    ("stage", "way", "make"),
    [
        *AllPairs(
            [[*CLIENT, *SERVER], [STREAMED, UNARY], [Client, Looped]],
            # A call that travels as one message has no such stage.
            filter_func=lambda row: UNARY not in row or row[0] not in ("send", "read", "send_back"),
        )
    ],
)
def test_a_delay_shows_in_its_stage_and_in_no_other(held: Held, make: Make, way: int, stage: str) -> None:
    place = CLIENT.get(stage, "")
    if make is Looped:
        place = place.replace("_client:finish", "_async_client:finish")
    mended = hold_up(place, stage, lambda: True) if place else lambda: None
    held.file.write_text(stage)
    others = {*CLIENT_STAGES, *SERVER_STAGES} - {stage, BESIDE.get(stage)}

    def slow(found: Sequence[Timeline]) -> set[str]:
        """What was never quick: a machine under load holds up whatever it likes, now and then."""
        stages = {each for each in others if min(call.seconds(each) for call in found) >= DELAY_S}
        return stages if min(call.transport_s for call in found) < DELAY_S else {*stages, "transport"}

    try:
        found = timelines(
            make, held.server.address, way, stage, lambda found: len(found) >= 3 and not slow(found)
        )
    finally:
        mended()
        held.file.write_text("")
    assert min(timeline.seconds(stage) for timeline in found) >= _SEEN_S
    assert not slow(found)


@BOTH
def test_stages_cover_a_large_call(held: Held, make: Make) -> None:
    def are_covered(found: Sequence[Timeline]) -> bool:
        return max(each.covered_s / each.wall_s for each in found) >= 0.95

    assert are_covered(timelines(make, held.server.address, STREAMED, "large", are_covered))


def timelines_of(client: Client, **options: Any) -> Iterator[Timeline]:
    return (timeline_of(client.group_norm_backward(**{**call, **options})) for call in calls(""))


def test_each_try_is_told(held: Held) -> None:
    with socket.socket() as lost:
        lost.bind(("127.0.0.1", 0))  # where nobody listens
        gone = f"127.0.0.1:{lost.getsockname()[1]}"
        with Client([gone, held.server.address]) as client:
            told = next(each for each in timelines_of(client) if len(each.tries) > 1)
    first, second = told.tries
    assert (first.number, first.target, first.error) == (1, gone, "ConnectError")
    assert (second.number, second.target, second.error) == (2, held.server.address, "")
    assert first.end_s <= second.start_s
    assert {i.number for i in told.stages if i.where == "server"} == {2}
    assert gone in str(told)


def test_hedged_tries_are_told(start_server: StartServer) -> None:
    slow, quick = start_server(devices="test:1?ms=60000", check_end=False), start_server(devices="test:1")
    retry = RetryPolicy(hedge_after_s=0.05, max_tries=2)
    with Client([slow.address, quick.address], retry=retry) as client:
        told = next(each for each in timelines_of(client) if len(each.tries) > 1)
    assert told.tries[0].target == slow.address
    assert told.tries[1].start_s < told.tries[0].end_s
    assert {i.number for i in told.stages if i.where == "server"} == {2}


def test_a_start_that_came_to_nothing_is_told(start_server: StartServer) -> None:
    flags = ("--respawn-backoff-s", "0.01", "--metrics-listen", "127.0.0.1:0")
    server = start_server(*flags, devices="test:1")
    [worker] = workers_of(server.process.pid)
    os.kill(worker, signal.SIGSTOP)  # so that it cannot answer before it is killed
    with Client(server.address) as client:
        flying = client.submit.group_norm_backward(**next(calls("")))
        while not server.metric("npugrad_running_calls"):
            assert not flying.done()
        os.kill(worker, signal.SIGKILL)
        told = timeline_of(flying.result())
    assert [i.stage for i in told.stages if i.stage in ("queued", "lost", "run")] == [
        "queued",
        "lost",
        "queued",
        "run",
    ]


def test_log_and_metrics_tell_the_stages(held: Held) -> None:
    with Client(held.server.address, stream_from_bytes=STREAMED) as client:
        info = client.group_norm_backward(**next(calls("validate"))).info
    line = held.server.find_log("call", request_id=info.request_id)
    wanted = {"decode", "validate", "receive", "queued", "copy_in", "run", "encode", "send_back"}
    assert set(line["stages"]) == wanted
    _, page = held.server.page("/metrics")
    for stage in wanted:
        assert f'operator="group_norm_backward",stage="{stage}"' in page, stage


def calls_in(server: ServerProcess) -> list[dict[str, Any]]:
    return [line for line in server.log_lines("call") if line["method"] == "GroupNormBackward"]


def test_the_log_tells_where_the_time_of_calls_without_results_went(start_server: StartServer) -> None:
    server = start_server("--metrics-listen", "127.0.0.1:0", devices="test:1?ms=60000", check_end=False)
    with Client(server.address) as client:
        runs = client.submit.group_norm_backward(**next(calls("")))
        while not server.metric("npugrad_running_calls"):
            assert not runs.done()
        with pytest.raises(DeadlineExceeded):
            client.group_norm_backward(**next(calls("")), timeout_s=3)
        # Its status is CANCELLED if the server hears of the end well before the deadline passes by its clock.
        waited = server.find_log("call", method="GroupNormBackward")
        runs.cancel()
        eventually(lambda: len(calls_in(server)) == 2, "both calls are logged", server)
        [gave_up] = [line for line in calls_in(server) if line != waited]
        assert waited["status"] in ("DEADLINE_EXCEEDED", "CANCELLED")
        assert gave_up["status"] == "CANCELLED"
    assert waited["stages"]["queued"] > waited["seconds"] / 2
    assert "lost" not in waited["stages"]
    assert gave_up["stages"]["lost"] > gave_up["seconds"] / 2


def test_stages_that_do_not_parse_are_left_out(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    lies = iter([b"\xff", b"", b"\x0a" * 5000])
    monkeypatch.setattr("npugrad_client._transport.server_stages", lambda metadata: next(lies, b""))
    for timeline in timelines(Client, held.server.address, STREAMED, "", lambda found: len(found) == 4):
        assert {i.where for i in timeline.stages} == {"client"}
        assert timeline.seconds("send") > 0
