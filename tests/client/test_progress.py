"""Progress of calls: what a callable is told, what it may end, and the bar on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.client.both import WAYS, Looped, Make, call_once
from tests.client.fake_service import (
    UNARY,
    Context,
    Gate,
    abort_with,
    chunk_frame,
    decoded,
    fake_service,
    group_norm,
    header_frame,
    read_header,
    response,
)
from tests.client.terminal import Terminal
from tests.fix_server import ServerProcess

from npugrad.errors import ServerBusy
from npugrad_client import Client, NpugradError, Progress, RetryPolicy
from npugrad_client._attempt import Attempt
from npugrad_client._clock import CallClock
from npugrad_client._progress import ProgressReport

MIB = 2**20
STAGES = ("sending", "waiting", "receiving")


def sized(mib: int) -> dict[str, Any]:
    """A call with two operands and one result of so many MiB."""
    return group_norm(hxw=mib * MIB // 4 // 8)


LARGE_MIB = 4
"""Of each operand: both are more than passes while the server does not read, which is 2 MiB."""


class Stop(BaseException):
    """What a callable raises; no error of the client's."""


class Staged:
    """A service whose streamed calls stand still in each stage until it is let go, or 30 s have passed."""

    def __init__(self) -> None:
        self.may_end = {stage: threading.Event() for stage in STAGES}

    def execute(self, frames: Iterator[Any], context: Context) -> Iterator[Any]:
        record, request = read_header(frames)
        self.may_end["sending"].wait(30)
        for _ in frames:
            pass
        self.may_end["waiting"].wait(30)
        message, follow = response(record, decoded(record, request), chunk_from_bytes=1)
        yield header_frame(record, message)
        self.may_end["receiving"].wait(30)
        for operand, data in follow:
            yield chunk_frame(operand, 0, bytes(data))


def submitted(address: Any, call: dict[str, Any], **options: Any) -> Any:
    with Client(address, timeout_s=60, **options) as client:
        return client.submit.group_norm_backward(**call).result(60)


EACH = {
    "plain": partial(call_once, Client),
    "submitted": submitted,
    "asynchronous": partial(call_once, Looped),
}
MAKES = pytest.mark.parametrize("make", EACH.values(), ids=EACH)
LESS = pytest.mark.parametrize("make", [submitted, EACH["asynchronous"]], ids=["submitted", "asynchronous"])
"""For large calls: what is submitted goes the way of a plain call, and more."""


def stages(seen: list[Progress]) -> list[str]:
    return [stage for stage, _ in groupby(progress.stage for progress in seen)]


def assert_only_forward(seen: list[Progress]) -> None:
    for before, after in pairwise(seen):
        assert before.sent_bytes <= after.sent_bytes
        assert before.received_bytes <= after.received_bytes
        assert max(before.bytes_to_send, after.sent_bytes) <= after.bytes_to_send
        assert max(before.bytes_to_receive, after.received_bytes) <= after.bytes_to_receive


# ---------------------------------------------------------------------------------------------- callables


@MAKES
def test_a_streamed_call_is_told_to_its_end_and_a_unary_one_has_stages_and_no_bytes(
    server: ServerProcess, make: Make
) -> None:
    seen: list[Progress] = []
    make(server.address, {**sized(4), "progress": seen.append})
    assert stages(seen) == [*STAGES, "done"]
    assert_only_forward(seen)
    last = seen[-1]
    assert last.sent_bytes == last.bytes_to_send == 8 * MIB
    assert last.received_bytes == last.bytes_to_receive
    assert 4 * MIB <= last.received_bytes < 5 * MIB  # with the small results, if they came in chunks
    assert last.try_number == 1
    unary: list[Progress] = []
    make(server.address, {**group_norm(), "progress": unary.append}, stream_from_bytes=UNARY)
    assert [Progress(progress.stage) for progress in unary] == unary
    assert stages(unary) == [*STAGES, "done"]


@LESS
def test_every_stage_is_told_while_it_lasts(make: Make) -> None:
    service, seen = Staged(), []

    def tell(progress: Progress) -> None:
        seen.append(progress)
        if progress.stage != "done" and (progress.stage != "sending" or progress.sent_bytes):
            service.may_end[progress.stage].set()  # nothing goes on before it is told

    with fake_service(execute=service.execute) as fake:
        make(fake.address, {**sized(LARGE_MIB), "progress": tell})
    assert stages(seen) == [*STAGES, "done"]
    assert_only_forward(seen)
    amid = next(progress for progress in seen if progress.sent_bytes)
    assert amid.stage == "sending"
    assert amid.sent_bytes < amid.bytes_to_send
    begun = next(progress for progress in seen if progress.stage == "receiving")
    assert (begun.received_bytes, begun.bytes_to_receive) == (0, seen[-1].received_bytes)


@MAKES
@WAYS
def test_what_a_callable_raises_cancels_the_call_and_comes_out(make: Make, way: int) -> None:
    gate = Gate()

    def tell(progress: Progress) -> None:
        if progress.stage == "waiting":
            gate.wait_for_call()
            raise Stop

    with fake_service(before=gate.hold) as fake:
        with pytest.raises(Stop):
            make(fake.address, {**group_norm(), "progress": tell}, stream_from_bytes=way)
        gate.wait_until_given_up()
        gate.open()


@MAKES
def test_what_a_callable_raises_at_the_end_comes_out_and_so_does_an_error_that_comes_before(
    server: ServerProcess, make: Make
) -> None:
    seen: list[str] = []

    def tell(progress: Progress) -> None:
        seen.append(progress.stage)
        if progress.stage == "done":
            raise Stop

    with pytest.raises(NpugradError, match="group"):
        make(server.address, {**group_norm(), "group": 0, "progress": tell})
    assert "done" not in seen
    with pytest.raises(Stop):
        make(server.address, {**group_norm(), "progress": tell})


@LESS
def test_a_retry_begins_anew(make: Make) -> None:
    was_told, tries, seen = threading.Event(), [], []

    def tell(progress: Progress) -> None:
        seen.append(progress)
        if progress.sent_bytes:
            was_told.set()

    def refuse_once(context: Context) -> None:
        tries.append(1)
        if len(tries) == 1:
            was_told.wait(30)
            abort_with(context, ServerBusy("full", retry_after_s=0))

    with fake_service(before=refuse_once) as fake:
        answer = make(fake.address, {**sized(LARGE_MIB), "progress": tell})
    assert answer.info.tries == 2
    first, second = ([p for p in seen if p.try_number == number] for number in (1, 2))
    assert seen == first + second
    assert stages(first) == ["sending"]
    assert stages(second) == [*STAGES, "done"]
    assert_only_forward(first)
    assert_only_forward(second)
    assert second[-1].sent_bytes == second[-1].bytes_to_send > 0


@MAKES
@WAYS
def test_of_tries_at_once_the_furthest_is_told(server: ServerProcess, make: Make, way: int) -> None:
    seen: list[Progress] = []
    options = {"stream_from_bytes": way, "retry": RetryPolicy(hedge_after_s=0.0, max_tries=3)}
    make(server.address, {**(group_norm() if way else sized(4)), "progress": seen.append}, **options)
    assert seen[-1].stage == "done"
    assert seen[-1].received_bytes == seen[-1].bytes_to_receive
    for number, told in groupby(seen, lambda progress: progress.try_number):
        assert number in (1, 2, 3)
        assert_only_forward(list(told))


def test_tries_that_overtake_each_other_tell_each_stage_once() -> None:
    first, second = Attempt("", "a:1"), Attempt("", "b:1", number=2)
    clock, told = CallClock("group_norm_backward"), list[Progress]()
    clock.attempts += [first, second]
    report = ProgressReport(told.append, cast("Any", SimpleNamespace(streamed=True, clock=clock)))
    for attempt in (first, second, first, second):
        attempt.sent_s, attempt.download_bytes = 1.0, 2 * MIB
        attempt.received_bytes = max(first.received_bytes, second.received_bytes) + 1
        report.look()
    second.received_s = 2.0
    report.end()
    for number, last in ((1, []), (2, ["done"])):
        seen = [each for each in told if each.try_number == number]
        assert stages(seen) == ["sending", "waiting", "receiving", *last]
        assert_only_forward(seen)


@MAKES
def test_the_try_that_was_answered_is_told_as_done(make: Make) -> None:
    gate, seen = Gate(), list[Progress]()
    with fake_service(before=gate.hold) as held, fake_service() as quick:
        hedged = RetryPolicy(hedge_after_s=0.0, max_tries=2)
        targets = [held.address, quick.address]  # the hedge goes to the server that was not tried
        answer = make(targets, {**group_norm(), "progress": seen.append}, retry=hedged)
        gate.open()
    assert answer.info.tries == 2
    assert (seen[-1].stage, seen[-1].try_number) == ("done", 2)


@MAKES
def test_progress_of_another_type_is_refused_before_anything_is_sent(make: Make) -> None:
    expected = "group_norm_backward: progress: found int; expected a bool, a title or a callable"
    with fake_service() as fake:
        with pytest.raises(TypeError, match=expected):
            make(fake.address, {**group_norm(), "progress": 7})
        assert fake.methods == []


# --------------------------------------------------------------------------------------------------- bars

PROGRAM = """
import sys
from npugrad_client import Client
from tests.client.both import Looped, call_once
from tests.client.fake_service import group_norm
call = {**group_norm(hxw=int(sys.argv[4])), "progress": sys.argv[3] or True}
print(call_once({"plain": Client, "asynchronous": Looped}[sys.argv[2]], sys.argv[1], call).info.device)
"""


@pytest.mark.parametrize(
    ("make", "title", "shown_as"),
    [("plain", "[red]step 3", r"\[red\]step 3"), ("asynchronous", "", "group_norm_backward")],
)
def test_a_bar_is_drawn_on_a_terminal_and_gone_at_the_end(make: str, title: str, shown_as: str) -> None:
    service = Staged()
    with (
        fake_service(execute=service.execute) as fake,
        Terminal(PROGRAM, fake.address, make, title, str(sized(LARGE_MIB)["hxw"])) as terminal,
    ):
        terminal.wait_for(rf"{shown_as} sending +\S+ [1-9]\S* MiB of {2 * LARGE_MIB} MiB")
        service.may_end["sending"].set()
        terminal.wait_for(rf"{shown_as} waiting for the result +\S+ 0:0\d")
        service.may_end["waiting"].set()
        terminal.wait_for(rf"{shown_as} receiving +\S+ 0 B of {LARGE_MIB} MiB")
        service.may_end["receiving"].set()
        status, output, shown = terminal.end()
    assert (status, output) == (0, "test:0\n")
    assert shown.endswith("\r\x1b[2K\x1b[?25h\r")  # the line is erased


@MAKES
def test_nothing_is_shown_where_there_is_no_terminal(
    server: ServerProcess, make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    make(server.address, {**sized(4), "progress": True})
    assert capfd.readouterr() == ("", "")
