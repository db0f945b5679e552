"""The list of a call's representations in CONTRIBUTING.md against what the processes construct for a call."""

from __future__ import annotations

import re
import statistics

import pytest
from tests.benchmarks.frames import Frames, count_frames
from tests.benchmarks.processes import ROOT

MOST = 8
PROCESSES = ("client", "front process", "worker")
PARTS = {"npugrad.call.CallOptions", "npugrad_server.pool.regions.Region"}
"""Parts of a representation, which count with it."""
WAY_BACK = {
    "npugrad.call.ExecutionInfo",
    "npugrad_client._call.Answer",
    "npugrad_client._generated_ops.GroupNormBackwardResult",
    "npugrad_server.backends.base.Timings",
    "npugrad_server.pool.types.Outcome",
    "npugrad_server.worker.protocol.CallDone",
}
"""What becomes of a call; it does not describe it."""
NO_DESCRIPTION = {
    "npugrad_client._attempt.Attempt",
    "npugrad_client._clock.CallClock",
    "npugrad_client._retry.Launch",
    "npugrad_client._retry.RetrySchedule",
    "npugrad_client._rpcs.Call",
    "npugrad_server.pool.commands.CompleteCall",
    "npugrad_server.pool.commands.ReleaseCall",
    "npugrad_server.pool.commands.StartCall",
    "npugrad_server.pool.forecast.Prediction",
    "npugrad_server.rpc.rpc_call.RpcCall",
}
"""About an RPC, a try or a command, or about when something was done."""
EXCEPTIONS = PARTS | WAY_BACK | NO_DESCRIPTION

pytestmark = pytest.mark.slow


def listed() -> list[tuple[str, str]]:
    """Class and process of each row of the table; an empty class for one that is bytes."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.split("## Representations of a call\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    found = []
    for name, made_by, _ in rows:
        made = re.match(r"`([\w.]+)`", name)
        found.append((made[1] if made else "", made_by.split(":")[0]))
    return found


def constructed(frames: Frames) -> dict[tuple[str, str], float]:
    """Our classes and the processes that make objects of them: how many for a call, in the median."""
    places = {place[::2] for each in frames.calls for place in each}
    counts = {
        place: statistics.median(
            sum(n for at, n in call.items() if at[::2] == place) for call in frames.calls
        )
        for place in places
        if place[1].startswith("npugrad") and place[1].endswith("()")
    }
    return {(name[:-2], process): count for (process, name), count in counts.items() if count}


def test_the_table_lists_what_is_made_for_a_call_and_nothing_else() -> None:
    made = constructed(count_frames(calls=25, warm_up_calls=50))
    named = {row for row in listed() if row[0]}
    assert {row: count for row, count in made.items() if row[0] not in EXCEPTIONS} == dict.fromkeys(named, 1)
    assert {name for name, _ in made.keys() - named} == EXCEPTIONS, "an exception that nothing needs"


def test_there_are_at_most_eight() -> None:
    rows = listed()
    assert 0 < len(rows) <= MOST
    assert {process for _, process in rows} == set(PROCESSES)
