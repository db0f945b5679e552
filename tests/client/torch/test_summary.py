"""What went where: the table of a `remote`, where the time of what was sent went, and all public names."""

from __future__ import annotations

import dataclasses

import pytest
from tests.client.docstrings import come_true, documented
from tests.client.public_names import shown

torch = pytest.importorskip("torch")

from tests.client.torch.models import Transformer, gradients
from tests.fix_server import ServerProcess

import npugrad_client.torch as adapter
from npugrad.ops import OPERATORS
from npugrad.timeline import CLIENT_STAGES, SERVER_STAGES, Interval, Timeline
from npugrad_client import Client, ConnectError
from npugrad_client._costs import CostRow
from npugrad_client._summary import TRANSPORT, Ledger, Summary
from npugrad_client.torch import Policies, drop_in, remote

pytestmark = pytest.mark.torch

TIMELINE = Timeline(
    "floyd", 0.5, (Interval("pack", "client", 0.0, 0.1), Interval("run", "server", 0.2, 0.5, 1))
)


def ledger_of(sent: int = 1, local: bool = False) -> Ledger:
    """Calls of one operator that were sent, and one of another that was not."""
    ledger = Ledger()
    if local:
        ledger.add("norm", is_sent=False, why="small", nbytes=2**20, seconds=0.25)
    for _ in range(sent):
        ledger.add("floyd", is_sent=True, why="", nbytes=2**20, seconds=0.6, timeline=TIMELINE)
    return ledger


def test_the_seconds_of_each_stage_are_added_up() -> None:
    ledger = ledger_of(2, local=True)
    summary = ledger.summary()
    ledger.add("floyd", is_sent=True, why="", nbytes=1, seconds=0.6, timeline=TIMELINE)
    sent, local = summary.rows
    assert sent.stages == pytest.approx({"pack": 0.2, "run": 0.6, TRANSPORT: 0.2}), "of a copy"
    assert local.stages == {}
    assert {*sent.stages} <= {*CLIENT_STAGES, *SERVER_STAGES, TRANSPORT}
    assert len({sent, local}) == 2  # rows can be hashed


def test_a_second_table_tells_them_in_milliseconds_a_call() -> None:
    assert str(ledger_of(2, local=True).summary()).splitlines() == [
        "operator  where  why    calls   MiB  seconds",
        "floyd     sent   -          2  2.00    1.200",
        "norm      local  small      1  1.00    0.250",
        "",
        "Time of sent calls by stage, in ms a call; stages below 1 % are left out",
        "operator  why  ms a call   pack    run  transport",
        "floyd     -        600.0  100.0  300.0      100.0",
    ]


COSTS = (
    CostRow("floyd", "float16[2,4,64,64,64]", 10, 3, 0.5, 0.2, -3.0),
    CostRow("norm", "float32[2,8,1024]", 6, 4, 0.01, 0.02, 0.06),
    CostRow("norm", "float32[2,8,16]", 0, 4, None, 0.001, None),
)


def test_it_ends_with_what_sending_won_and_cost() -> None:
    ledger = ledger_of(0, local=True)
    summary = ledger.summary(COSTS)
    assert str(summary).splitlines()[3:] == [
        "Time saved by sending, by operator and kind; negative where sending was slower",
        "operator  kind                   sent  ms sent  local  ms local  saved s",
        "floyd     float16[2,4,64,64,64]    10    500.0      3     200.0   -3.000",
        "norm      float32[2,8,1024]         6     10.0      4      20.0    0.060",
        "norm      float32[2,8,16]           0        -      4       1.0        -",
        "Sending cost 2.940 s.",
    ]
    assert summary.won_s == pytest.approx(-2.94)
    assert str(ledger.summary(COSTS[1:])).endswith("\nSending saved 0.060 s.")


def test_what_is_not_known_is_said_to_be_so() -> None:
    summary = Ledger().summary([CostRow("norm", "float32[2,8]", 2, 0, 0.5, None, None)])
    assert summary.won_s is None
    *_, row, last, _ = str(summary).splitlines()
    assert row.split() == ["norm", "float32[2,8]", "2", "500.0", "0", "-", "-"]
    assert last.startswith("How long 2 sent calls would have taken here is unknown; ")
    assert "Sending" not in last


MANY = [CostRow("norm", f"float32[{n}]", 1, 1, 1.0, 2.0, 1.0) for n in range(50)]


def test_many_kinds_leave_the_table_short() -> None:
    text = str(Ledger().summary(MANY))
    assert "float32[19]" in text
    assert "float32[20]" not in text
    assert text.endswith("\nand 30 more kinds, which took less, in summary().costs\nSending saved 50.000 s.")


def test_the_calls_of_a_model_tell_their_stages(client: Client) -> None:
    with remote(client, min_bytes=0) as mode:
        gradients(Transformer(), torch.randn(2, 3, 9, 7))
    for row in mode.summary().rows:
        assert {"pack", "run", "unpack"} < {*row.stages}
        assert 0 < row.stages["run"] < row.seconds


WIDE = CostRow(
    "multi_scale_deformable_attention_grad", "bfloat16[2,22223,16,4,4,2]", 9999, 9, 99.5, 9, -999.0
)


def test_nothing_is_wider_than_80_columns() -> None:
    ledger = Ledger()
    for record in OPERATORS.values():
        stages = (*CLIENT_STAGES, *SERVER_STAGES)
        intervals = (Interval(name, "client", n, n + 0.9) for n, name in enumerate(stages))
        timeline = Timeline(record.name, 20.0, tuple(intervals))
        for why in ("", "as float32"):
            ledger.add(record.name, is_sent=True, why=why, nbytes=2**38, seconds=20.0, timeline=timeline)
        why = "input, grid: expected " + "a shape " * 12
        ledger.add(record.name, is_sent=False, why=why, nbytes=1, seconds=9)
    summary = ledger.summary([WIDE, *COSTS, dataclasses.replace(WIDE, local_s=None, won_s=None)] * 8)
    lines = str(summary).splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    told = [line for line in lines if line.startswith("    input, grid: expected a shape a shape")]
    assert len(told) == len(OPERATORS)
    assert "and 20 more kinds, which took less, in summary().costs" in lines
    text = " ".join(str(summary).split())
    transport = f"transport {(20 - 0.9 * len(stages)) * 1e3:.1f}"
    for name in ("pack 900.0", "copy_in 900.0", transport, "bfloat16[2,22223,16,4,4,2]", "as float32"):
        assert name in text
    assert len(repr(summary).splitlines()) == 1
    assert len(repr(summary)) <= 100


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (None, "No call was sent or run locally yet; calls that raised an error are not counted."),
        ((), "Nothing was sent: no backward pass ran inside. Call backward() inside `with remote(...)`."),
        (
            tuple(f"Some{number:02}Backward0" for number in range(30)),
            "Nothing was sent: this `remote` handled none of the backward operators that ran inside: "
            "Some00Backward0, Some01Backward0, Some02Backward0, Some03Backward0, Some04Backward0, "
            "Some05Backward0, Some06Backward0, Some07Backward0 and 22 more in .seen. "
            "`npugrad ops` lists the operators of the service.",
        ),
    ],
)
def test_an_empty_summary_says_why(seen: tuple[str, ...] | None, text: str) -> None:
    summary = Summary((), seen=seen)
    assert " ".join(str(summary).split()) == text
    assert max(map(len, str(summary).splitlines())) <= 80
    assert summary._repr_html_() == f"<p>{text}</p>"


def test_notebooks_show_the_tables() -> None:
    ledger = Ledger()
    ledger.add("floyd", is_sent=True, why="<b>", nbytes=2**20, seconds=0.6, timeline=TIMELINE)
    page = ledger.summary(COSTS)._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 3
    assert "<td>floyd</td><td>sent</td><td>&lt;b&gt;</td><td>1</td>" in page
    assert "<td>float32[2,8,16]</td>" in page
    assert page.endswith("<p>Sending cost 2.940 s.</p>")
    many = Ledger().summary(MANY)
    assert many._repr_html_().count("<td>norm</td>") == str(many).count("norm  ")


def test_what_ran_instead_is_told(client: Client) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with remote(client, min_bytes=0) as mode:
        assert "no backward pass ran inside" in str(mode.summary())
        torch.nn.functional.linear(x, torch.ones(2, 3), torch.ones(2)).relu().sum().backward()
    told = " ".join(str(mode.summary()).split())
    assert "handled none of the backward operators that ran inside: AddmmBackward0, ReluBackward0" in told
    gradients(Transformer(), torch.randn(2, 3, 9, 7))
    assert "none of the backward operators" in str(mode.summary()), "what runs outside does not count"
    with mode:
        gradients(Transformer(), torch.randn(2, 3, 9, 7))
    assert mode.summary().seen is None


def test_an_outer_remote_does_not_deny_what_the_inner_one_sent(client: Client) -> None:
    with remote(client, min_bytes=0) as outer, remote(client, min_bytes=0) as inner:
        gradients(Transformer(), torch.randn(2, 3, 9, 7))
    assert inner.summary().sent > 0
    assert str(outer.summary()).startswith("Nothing was sent: this `remote` handled none of")


def test_a_call_that_raised_is_no_call_without_data() -> None:
    with Client("127.0.0.1:1", retry=None) as client:
        mode = remote(client, min_bytes=0)
        with mode, pytest.raises(ConnectError):
            gradients(Transformer(), torch.randn(2, 3, 9, 7))
    assert str(mode.summary()).endswith("calls that raised an error are not counted.")


def test_they_show_their_client_and_policies(client: Client) -> None:
    start = "DropIn(min_bytes=0, on_refused='warn', on_error='local'"
    assert repr(drop_in(client, on_error="local")).startswith(start)
    assert repr(Policies()).endswith("policy='always', 0 sent, 0 local)")
    mode = remote(client, min_bytes=0, on_error="local", policy="faster")
    assert repr(mode).startswith(f"Remote({client!r}")
    settings = ("min_bytes=0", "on_refused='warn'", "on_error='local'", "policy='faster'")
    for part in (*settings, "0 sent", "0 local"):
        assert part in repr(mode)
    assert len(repr(mode).splitlines()) <= 3
    assert mode._repr_html_() == mode.summary()._repr_html_()


# -------------------------------------------------------------------------------------- the public names


def test_the_public_list_is_what_the_package_shows() -> None:
    assert shown(adapter) == set(adapter.__all__)


EXAMPLES = documented("npugrad_client.torch")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_come_out_as_written(name: str, server: ServerProcess) -> None:
    come_true(EXAMPLES[name], "npugrad_client.torch", server.address)
