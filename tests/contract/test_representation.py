"""How objects of the contract show themselves: three lines at most, and tables that are escaped."""

from __future__ import annotations

import dataclasses

import pytest

from npugrad.call import ExecutionInfo, VerifiedOutput, VerifiedOutputs
from npugrad.errors import InvalidOperand, NpugradError, ServerBusy
from npugrad.products import Product
from npugrad.representation import WIDTH, Html, html_table, in_lines, shortened, some
from npugrad.timeline import CLIENT_STAGES, SERVER_STAGES, Interval, Timeline, Try

EVIL = "<script>alert('&')</script>"


def assert_fits(text: str) -> None:
    """Three lines of a terminal, whatever it shows."""
    lines = text.splitlines()
    assert len(lines) <= 3, text
    assert max(map(len, lines)) <= WIDTH, text


FULL = ExecutionInfo(
    backend="cpu-reference",
    device="cpu-reference:15",
    product=Product.ATLAS_A2,
    simulated=True,
    workspace_bytes=2**40,
    attempts=3,
    queued_s=1234.5,
    copy_in_s=1234.5,
    run_s=1234.5,
    copy_out_s=1234.5,
    request_id="f" * 128,
    verification="right by another rule of coordinates, " * 20,
    verified=VerifiedOutputs(
        VerifiedOutput(name, 1.49e-6, 1.94e-7, 0.0312) for name in ("dq", "dk1", "dv1", "dk2", "dv2")
    ),
    predicted_wait_s=1.0,
    predicted_run_s=1.0,
    tries=9,
)
STAGES = (*CLIENT_STAGES, *SERVER_STAGES)
TIMELINE = Timeline(
    "multi_scale_deformable_attention_grad",
    200.0,
    tuple(Interval(name, "client", number * 10.0, number * 10.0 + 9) for number, name in enumerate(STAGES)),
    (Try(1, EVIL, 0.0, 1.0, "ConnectError"), Try(2, "b:1", 1.0, 200.0, "")),
)


def test_deviations_of_verified_outputs_fit() -> None:
    assert_fits(repr(FULL.verified))
    assert repr(FULL.verified).startswith(
        "(VerifiedOutput('dq', 1.5e-06, 1.9e-07, 0.031), VerifiedOutput('dk1', "
    )
    assert FULL.verified == tuple(FULL.verified)
    assert isinstance(dataclasses.asdict(FULL)["verified"], tuple)


def test_the_info_of_a_call_fits_three_lines() -> None:
    assert_fits(repr(FULL))
    usual = ExecutionInfo("cpu", "cpu:0", Product.ATLAS_A2, queued_s=1e-4, run_s=0.0055)
    assert repr(usual) == (
        "ExecutionInfo(cpu:0 (cpu) for atlas-a2, ms: queued 0.1, copy in 0.0, run 5.5, copy out 0.0)"
    )
    for text in (
        "cpu-reference:15",
        "simulated",
        "attempts 3",
        "tries 9",
        "5 outputs verified",
        "request fff",
    ):
        assert text in repr(FULL)


def test_a_timeline_fits_three_lines_with_every_stage() -> None:
    assert_fits(repr(TIMELINE))
    assert "pack 9000.0, send 9000.0, " in repr(TIMELINE)
    assert repr(TIMELINE).endswith(f", {len(STAGES) - 9} more in .by_stage)")


def test_notebooks_show_info_and_timeline_as_tables() -> None:
    class Recorded:
        def timeline(self) -> Timeline:
            return TIMELINE

    page = dataclasses.replace(FULL, request_id=EVIL).note(Recorded())._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 3
    assert "<tr><td>device</td><td>cpu-reference:15</td></tr>" in page
    assert "max absolute error" in page
    assert "<td>copy_in</td><td>client</td>" in page
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 2, "the request and the try"
    alone = ExecutionInfo("cpu", "cpu:0", Product.ATLAS_A2)._repr_html_()
    assert alone.count("<table>") == 1
    assert "queued_s" not in alone, "what is zero is left out"


@pytest.mark.parametrize("error", [NpugradError, InvalidOperand, ServerBusy])
def test_errors_fit_three_lines_and_keep_their_message(error: type[NpugradError]) -> None:
    long = error("group_norm_backward: " + "found nothing; " * 100, reason="ACLNN_ERR_INNER_TILING_ERROR")
    assert len(repr(long)) <= 3 * WIDTH
    assert "\n" not in repr(long)
    assert repr(long).startswith(f"{error.__name__}('group_norm_backward: found nothing; ")
    assert "..." in repr(long)
    assert len(str(long)) > 1000
    assert repr(error("short")) == f"{error.__name__}('short', reason={error.default_reason!r})"


def test_parts_are_never_broken() -> None:
    assert in_lines("None", []) == "None()"
    assert in_lines("Name", ["a=1", "b=2"]) == "Name(a=1, b=2)"
    lines = in_lines("Name", ["a" * 90, "b" * 90, "c"]).splitlines()
    assert lines == [f"Name({'a' * 90},", f"    {'b' * 90}, c)"]


def test_what_is_left_out_says_where_it_is() -> None:
    assert some(["a", "b"], 2, ".names") == "a, b"
    assert some(["a", "b", "c", "d"], 2, ".names") == "a, b and 2 more in .names"
    assert (shortened("abcdef", 6), shortened("abcdefg", 6)) == ("abcdef", "abc...")


def test_cells_are_escaped_unless_they_are_html() -> None:
    table = html_table(EVIL, (EVIL,), [(EVIL,), (Html("<b>bold</b>"),)])
    assert "<script>" not in table
    assert "<td><b>bold</b></td>" in table
