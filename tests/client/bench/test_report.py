"""The page, the charts, the live view and the terminal: whole, right, and from nothing outside."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console
from tests.client.bench.made import GRID, answer, printed, result, scenario, shown

from npugrad_client.bench.charts import Series, bar_chart, line_chart, number, stack_chart, ticks
from npugrad_client.bench.compare import compare
from npugrad_client.bench.engine import LoadProgress
from npugrad_client.bench.live import Recent, live_view
from npugrad_client.bench.record import Record
from npugrad_client.bench.report_html import CLOSED_CAUTION, page
from npugrad_client.bench.result import Result
from npugrad_client.bench.scenario import LoadStage, WeightedWorkload
from npugrad_client.bench.show import show_comparison
from npugrad_client.bench.slo import Slo

VOID = {"meta", "br"}


class Whole(HTMLParser):
    """Sees that every element is closed in order, and keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Whole:
    reader = Whole()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_a_page_is_whole_and_takes_nothing_from_outside() -> None:
    made = result(warm_up_s=2.0, slo=Slo.parse("p99=10ms,errors=1%"))
    text = page(made)
    reader = parsed(text)
    assert not {"script", "link", "img", "iframe"} & reader.found
    assert not re.search(r"https?://|src=|@import|url\(", text)
    assert text.count("<svg") == 6, "latency, rate, percentiles, stages, devices, workloads"
    for word in ("Objectives missed", "p99:", "test:1 (test)", "network, front process, client", GRID.name):
        assert word in reader.text
    assert len(text) < 400_000


def test_a_page_of_what_went_wrong() -> None:
    made = result()
    made.record.intended(GRID.name, 1.0)
    made.record.failed(GRID.name, 1.0, "<b>QUEUE_FULL</b>")
    made.record.intended(GRID.name, 1.0)
    made.record.dropped(GRID.name, 1.0)
    for _ in range(10_000):
        made.record.lateness.add(0.5)
    told = replace(made, is_interrupted=True, died="a worker process of the load test died")
    reader = parsed(page(told))
    for word in (
        "<b>QUEUE_FULL</b>",
        "dropped: 1024 in flight already",
        "Interrupted: this is what was measured until then.",
        "The run died: a worker process of the load test died.",
        "The client was the bottleneck: calls were sent late: ",
        "0.0999 % of the calls had no answer; objectives count these as infinitely slow.",
    ):
        assert word in reader.text


def test_a_page_of_a_closed_loop_intends_no_start_and_warns_of_it() -> None:
    """Its calls start when the one before is answered: nothing was intended, and queueing is hidden."""
    closed, opened = (parsed(page(result(arrival=arrival))).text for arrival in ("closed", "constant"))
    assert "intended" not in closed
    assert "actual start" not in closed
    assert "Latency by start, ms" in closed
    assert CLOSED_CAUTION in closed
    assert "coordinated omission" not in opened
    assert "Latency by intended start, ms" in opened


def intended(text: str) -> list[str]:
    """What the labels of the points say of the intended rate, and when."""
    return re.findall(r"<title>intended, ([^<]+)</title>", text)


@pytest.mark.parametrize("arrival", ["constant", "poisson"])
@pytest.mark.parametrize("rate", [10.0, 7.0, 3.0])
def test_an_even_load_is_drawn_as_an_even_line(rate: float, arrival: str) -> None:
    """Windows of 0.1 s have one call or none: their counts are no rate."""
    made = result(rate=rate, duration_s=12.0, arrival=arrival, window_s=0.1, warm_up_s=2.0)
    found = intended(page(made))
    assert len(found) >= 10
    assert {each.partition(": ")[2] for each in found} == {f"{rate:g}"}


def test_a_ramp_and_stages_are_drawn_as_they_were_meant() -> None:
    stages = (LoadStage(10, 30, 10.0), LoadStage(5, 5, 10.0))
    made = result(rate=100.0, duration_s=20.0, stages=stages, window_s=1.0, warm_up_s=1.0)
    made.record.intended(GRID.name, -0.5)
    found = [tuple(map(float, each.split(": "))) for each in intended(page(made))]
    assert found[0] == (-0.5, 10.0), "the warm-up has the first level"
    assert found[1:11] == [(second + 0.5, 10 + 2 * (second + 0.5)) for second in range(10)]
    assert found[11:] == [(second + 0.5, 5.0) for second in range(10, 20)]


def test_a_call_is_in_the_window_that_begins_with_it() -> None:
    record = Record(0.1)
    for tenth in range(-5, 1000):
        record.intended(GRID.name, tenth * 0.1)
        record.intended(GRID.name, tenth / 10)
    record.intended(GRID.name, -1e-12)
    counts = {number: window.tally.intended for number, window in record.windows.items()}
    assert counts == {**dict.fromkeys(range(-5, 1000), 2), -1: 3}


def test_a_page_of_nothing() -> None:
    empty = Result(result().scenario, Record(0.2), 0.0)
    assert "too little was measured for a picture" in parsed(page(empty)).text


def drawn(text: str) -> list[list[list[float]]]:
    """The points of each line of a chart that is whole."""
    parsed(text)
    lines = re.findall(r'points="([^"]+)"', text)
    return [[[float(number) for number in point.split(",")] for point in line.split()] for line in lines]


def test_lines_layers_and_bars_lie_where_their_values_are() -> None:
    text = line_chart("t", "s", [0.0, 1.0, 2.0], [Series("a", [0.0, 10.0, None], 0)])
    (((x0, y0), (x1, y1)),) = drawn(text)
    assert x0 < x1
    assert y0 > y1, "up is more"
    assert "a, 1: 10" in text
    layers = [Series("a", [1.0, 1.0], 0), Series("b", [1.0, None], 1)]
    below, above = drawn(stack_chart("t", "s", [0.0, 1.0], layers))
    assert above[-1][1] == below[0][1], "the second begins where the first ends"
    text = bar_chart("t", [("a" * 100, 2.0, "2"), ("b", 1.0, "1")])
    widths = [float(w) for w in re.findall(r'<rect class="fill s0"[^>]* width="([\d.]+)"', text)]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)
    assert "…" in text
    assert bar_chart("t", []) == ""


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.003), (-5, 60), (0, 0), (0, 12345)])
def test_ticks_are_round_and_cover(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8


def test_numbers_for_people() -> None:
    shown = {0: "0", 0.5: "0.5", 12.3456: "12.35", 1234567: "1,234,567", 0.00012: "1.20e-04"}
    assert {value: number(value) for value in shown} == shown


def test_the_terminal_says_what_matters() -> None:
    two = (GRID, WeightedWorkload("group_norm_backward"))
    text = shown(result(workloads=two, slo=Slo.parse("p50=1s,p99=1ms")))
    assert "100 a second (open loop, constant), 20.0 s: 2000 answers, 100.0/s" in text
    assert "network, front process, client" in text
    assert "met: p50: 19.9 ms" in text
    assert "MISSED: p99:" in text
    assert "infinitely slow" not in text
    assert "closed loop waits" not in text
    assert CLOSED_CAUTION in shown(result(arrival="closed"))
    down = result(stages=(LoadStage(100, 20, 20.0),))
    assert "100 to 20 a second (open loop, constant)" in shown(down)


def test_the_terminal_tells_the_verdict_first() -> None:
    text = printed(show_comparison, compare(result(0.02), result(0.03, seed=2)), 300)
    assert text.startswith("slower: p50: ")
    assert "p99: " in text
    assert "changes within 5 %, and errors within 0.1 % of the calls, count as no difference." in text


def test_the_live_view_tells_of_the_last_seconds() -> None:
    recent = Recent(scenario(duration_s=60, warm_up_s=2.0, workers=2))
    for tenth in range(-20, 100, 5):
        progress = LoadProgress(intended=50, answered=45, failed=2, dropped=3, in_flight=4)
        for _ in range(5):
            progress.latency.add(0.02)
        recent.add(tenth / 10, progress)
        recent.add(tenth / 10, progress)
    text = printed(Console.print, recent.view(), 120)
    assert "10 of 60 s" in text
    assert "p50 19.9 ms, p99 19.9 ms in the last 5 s" in text
    assert re.search(r"slowest +█.* up to 19.9 ms", text)
    assert re.search(r"in flight +8 *\n", text)
    assert "96 failed, 144 dropped of 2400" in text
    few = Recent(scenario())
    progress = LoadProgress(intended=1, answered=1)
    progress.latency.add(0.02)
    few.add(1.0, progress)
    assert "p50 -, p99 - in the last 5 s" in printed(Console.print, few.view(), 120)


def test_the_live_view_is_there_before_anything_was_said_and_on_a_terminal_only() -> None:
    printed(Console.print, Recent(scenario()).view())
    with live_view(Console(file=io.StringIO()), scenario()) as on_progress:
        assert on_progress is None
    file = io.StringIO()
    with live_view(Console(file=file, force_terminal=True), scenario()) as on_progress:
        assert on_progress is not None
        on_progress(0.5, LoadProgress(intended=1))
    assert "rate" in file.getvalue()


HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>&amp;'</title></svg>\u202e"


def test_names_that_are_markup_stay_text() -> None:
    """Wherever a name can come from: scenario, arrival, workload, label, server, device, address, error."""
    named = WeightedWorkload(GRID.operator, name=HOSTILE)
    made = result(workloads=(named,), slo=Slo.parse("p99=10ms"), name=HOSTILE)
    info = answer(0.01, HOSTILE)
    made.record.sent(1.0, 1.0, HOSTILE)
    made.record.answered(HOSTILE, 1.0, 1.0, 1.1, info, HOSTILE)
    made.record.intended(HOSTILE, 1.0)
    made.record.failed(HOSTILE, 1.0, HOSTILE, HOSTILE)
    device = {"name": HOSTILE, "simulated": True}
    environment = {
        "time": HOSTILE,
        "npugrad": HOSTILE,
        "servers": [{"target": HOSTILE, "version": HOSTILE, "devices": [device]}],
    }
    named_too = {**made.scenario, "arrival": HOSTILE}
    told = Result(named_too, made.record, made.elapsed_s, made.cpus, environment=environment)
    text = page(told)
    reader = parsed(text)
    assert not {"script", "img"} & reader.found
    assert "onerror=alert(1)>" not in text
    assert reader.text.count(HOSTILE) > 10
    assert HOSTILE in shown(told)


def test_reports_of_a_run_without_success() -> None:
    """Everything failed: there are no latencies, and every report says so without a number that is none."""
    record = Record(0.2)
    for index in range(50):
        record.intended(GRID.name, index / 10)
        record.sent(index / 10, index / 10, "a:1")
        record.failed(GRID.name, index / 10, "QUEUE_FULL", "a:1")
    made = Result(result().scenario, record, 5.0)
    values = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert (values["summary"]["answered"], values["summary"]["error_share"]) == (0, 1.0)
    assert values["summary"]["throughput_per_s"] == 0
    assert values["summary"]["servers"]["a:1"]["failed"] == {"QUEUE_FULL": 50}
    rows = list(csv.DictReader(io.StringIO(made.as_csv())))
    assert len(rows) == 25
    assert {row["p99_s"] for row in rows} == {""}
    assert sum(int(row["failed"]) for row in rows) == 50
    assert "QUEUE_FULL" in parsed(page(made)).text
    assert "failed: 50 x QUEUE_FULL" in shown(made)
    assert "p50" not in shown(made), "no latency of nothing"
    assert [o.is_met for o in Slo.parse("p99=1s,errors=100%").judge(made)] == [False, True]


def test_reports_say_who_made_the_operands() -> None:
    made = result(workloads=(WeightedWorkload(GRID.operator, inputs="recipe", digest=True),))
    assert "operands are made by the server, which checks their digests" in parsed(page(made)).text
    assert "operands made by the server, not sent: grid_sampler_2d_backward" in shown(made)
    assert "operands are sent with each call" in parsed(page(result())).text
    assert "made by the server" not in shown(result())


def test_a_report_that_lacks_something_is_told() -> None:
    for key in ("load", "workloads", "arrival", "slo", "seed"):
        values = result(duration_s=1).as_dict()
        del values["scenario"][key]
        with pytest.raises(ValueError, match=f"scenario: {key} is missing"):
            Result.from_dict(values)
