"""What went where: the table of a `remote`, and where the time of what was sent went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from tests.client.torch.models import Transformer, gradients  # noqa: E402

from npugrad.timeline import CLIENT_STAGES, SERVER_STAGES, Interval, Timeline  # noqa: E402
from npugrad_client._costs import CostRow  # noqa: E402
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


COSTS = (
    CostRow("floyd", "float16[2,4,64,64,64]", 10, 3, 0.5, 0.2, -3.0),
    CostRow("norm", "float32[2,8,1024]", 6, 4, 0.01, 0.02, 0.06),
    CostRow("norm", "float32[2,8,16]", 0, 4, None, 0.001, None),
)


def test_it_ends_with_what_sending_won_and_cost() -> None:
    ledger = Ledger()
    ledger.add("norm", is_sent=False, why="small", nbytes=2**20, seconds=0.25)
    summary = ledger.summary(COSTS)
    assert str(summary).splitlines()[3:] == [
        "What sending won, by operator and kind; below 0 it was slower than here",
        "operator  kind                   sent  ms sent  local  ms local   won s",
        "floyd     float16[2,4,64,64,64]    10    500.0      3     200.0  -3.000",
        "norm      float32[2,8,1024]         6     10.0      4      20.0   0.060",
        "norm      float32[2,8,16]           0        ?      4       1.0       -",
        "Sending cost 2.940 s.",
    ]
    assert summary.won_s == pytest.approx(-2.94)
    assert str(ledger.summary(COSTS[1:])).endswith("\nSending won 0.060 s.")


def test_what_is_not_known_is_said_to_be_so() -> None:
    summary = Ledger().summary([CostRow("norm", "float32[2,8]", 2, 0, 0.5, None, None)])
    assert summary.won_s is None
    *_, row, last = str(summary).splitlines()
    assert row.split() == ["norm", "float32[2,8]", "2", "500.0", "0", "?", "?"]
    assert last.startswith("What 2 sent calls would have taken here is not known: ")
    assert "Sending" not in last


def test_many_kinds_leave_the_table_short() -> None:
    rows = [CostRow("norm", f"float32[{n}]", 1, 1, 1.0, 2.0, 1.0) for n in range(50)]
    text = str(Ledger().summary(rows))
    assert "float32[19]" in text
    assert "float32[20]" not in text
    assert text.endswith("\nand 30 further kinds, which took less\nSending won 50.000 s.")


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
