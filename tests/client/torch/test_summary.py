"""What went where: the table of a `remote`, and where the time of what was sent went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from tests.client.torch.models import Transformer, gradients  # noqa: E402

from npugrad.timeline import CLIENT_STAGES, SERVER_STAGES, Interval, Timeline  # noqa: E402
from npugrad_client._summary import TRANSPORT, Ledger  # noqa: E402
from npugrad_client.torch import remote  # noqa: E402

if TYPE_CHECKING:
    from npugrad_client import Client

pytestmark = pytest.mark.torch

TIMELINE = Timeline(
    "floyd", 0.5, (Interval("pack", "client", 0.0, 0.1), Interval("run", "server", 0.2, 0.5, 1))
)


def test_the_seconds_of_each_stage_are_added_up() -> None:
    ledger = Ledger()
    for _ in range(2):
        ledger.add("floyd", is_sent=True, why="", nbytes=2**20, seconds=0.6, timeline=TIMELINE)
    ledger.add("floyd", is_sent=False, why="small", nbytes=1, seconds=0.25)
    sent, local = ledger.summary().rows
    assert sent.stages == pytest.approx({"pack": 0.2, "run": 0.6, TRANSPORT: 0.2})
    assert local.stages == {}
    assert {*sent.stages} <= {*CLIENT_STAGES, *SERVER_STAGES, TRANSPORT}
    assert len({sent, local}) == 2  # rows can be hashed


def test_a_second_table_tells_them_in_milliseconds_a_call() -> None:
    ledger = Ledger()
    ledger.add("norm", is_sent=False, why="small", nbytes=2**20, seconds=0.25)
    for _ in range(2):
        ledger.add("floyd", is_sent=True, why="", nbytes=2**20, seconds=0.6, timeline=TIMELINE)
    assert str(ledger.summary()).splitlines() == [
        "operator  where  why    calls   MiB  seconds",
        "floyd     sent   -          2  2.00    1.200",
        "norm      local  small      1  1.00    0.250",
        "",
        "Where the time of what was sent went, in ms a call; stages below 1 % are left out",
        "operator  why  ms a call   pack    run  transport",
        "floyd     -        600.0  100.0  300.0      100.0",
    ]


def test_a_summary_is_a_copy_that_later_calls_leave_alone() -> None:
    ledger = Ledger()
    ledger.add("floyd", is_sent=True, why="", nbytes=1, seconds=0.6, timeline=TIMELINE)
    before = ledger.summary()
    ledger.add("floyd", is_sent=True, why="", nbytes=1, seconds=0.6, timeline=TIMELINE)
    assert before.rows[0].stages == pytest.approx({"pack": 0.1, "run": 0.3, TRANSPORT: 0.1})


def test_the_calls_of_a_model_tell_their_stages(client: Client) -> None:
    with remote(client, min_bytes=0) as mode:
        gradients(Transformer(), torch.randn(2, 3, 9, 7))
    for row in mode.summary().rows:
        assert {"pack", "run", "unpack"} < {*row.stages}
        assert 0 < row.stages["run"] < row.seconds
