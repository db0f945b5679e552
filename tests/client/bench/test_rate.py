"""The rate: that of servers whose rate is known, in virtual time, however the run ends."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.bench.made import scenario, shown, virtual_run

from npugrad_client.bench.compare import compare
from npugrad_client.bench.report_html import page
from npugrad_client.bench.scenario import LoadStage
from npugrad_client.bench.slo import Slo


def closed(callers: int, duration_s: float = 3.0, **other: Any) -> Any:
    return scenario("closed", level=callers, duration_s=duration_s, **other)


@pytest.mark.parametrize(
    ("made", "seconds", "devices", "rate"),
    [
        pytest.param(closed(2), [0.503], 0, 2 / 0.503, id="12 answers, the last two 18 ms after the end"),
        pytest.param(closed(1), [0.7], 0, 1 / 0.7, id="a call under way at the end"),
        pytest.param(closed(3, 1.0), [1.6], 0, 3 / 1.6, id="no answer before the end"),
        pytest.param(closed(1, 5e-4), [0.005], 0, 200, id="much shorter than a call"),
        pytest.param(closed(12), [0.5], 2, 4, id="callers that wait for two devices"),
        pytest.param(closed(12, 2.75), [0.5], 2, 4, id="the same, which ends within a call and a window"),
        pytest.param(closed(2, warm_up_s=1.3), [0.7], 0, 2 / 0.7, id="a warm-up"),
        pytest.param(closed(12, warm_up_s=1.3), [0.5], 2, 4, id="a warm-up, and devices"),
        pytest.param(closed(4, 60, max_calls=13), [1.0], 0, 4, id="calls that do not come out even"),
        pytest.param(closed(3, 60, max_calls=13, workers=2), [1.0], 0, 3, id="of workers that end apart"),
        pytest.param(closed(8, max_calls=1), [0.25], 0, 4, id="a single call"),
        pytest.param(scenario(level=4, duration_s=3), [1.0], 0, 4, id="open: none in flight at first"),
        pytest.param(scenario(level=4, duration_s=3), [1.1, 1.0], 0, 4, id="open, uneven"),
        pytest.param(scenario(level=4, duration_s=3, warm_up_s=1.5), [1.1, 1.0], 0, 4, id="open, warm"),
        pytest.param(scenario(level=3.3, duration_s=2), [0.25], 0, 3.3, id="open, 6.6 calls"),
        pytest.param(scenario(level=50, duration_s=0.021), [0.005], 0, 50, id="open, 1.05 calls"),
        pytest.param(scenario(level=1, duration_s=1.2, warm_up_s=0.5), [0.1], 0, 1, id="open, 1 call of 1.2"),
        pytest.param(scenario(level=8, duration_s=3), [0.5], 2, 4, id="open: a queue that grows"),
        pytest.param(scenario(level=50, duration_s=9, max_calls=5), [1.0], 0, 50, id="open: few calls"),
        pytest.param(
            scenario(level=8, duration_s=60, max_calls=24, workers=3), [0.5], 2, 4, id="open: few, a queue"
        ),
        pytest.param(
            scenario(stages=(LoadStage(2, 2, 2.0), LoadStage(6, 6, 2.0))), [0.4], 0, 4, id="open, stages"
        ),
    ],
)
def test_the_rate_is_that_of_the_server(made: Any, seconds: list[float], devices: int, rate: float) -> None:
    found = virtual_run(made, seconds, devices)
    assert found.throughput_per_s == pytest.approx(rate, rel=0.01)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    callers=st.integers(1, 12),
    devices=st.integers(1, 4),
    seconds=st.floats(0.1, 0.4),
    duration_s=st.floats(0.01, 4.0),
    warm_up_s=st.sampled_from([0.0, 0.9]),
)
def test_the_rate_of_a_closed_loop_is_that_of_its_devices(
    callers: int, devices: int, seconds: float, duration_s: float, warm_up_s: float
) -> None:
    """However calls and windows lie to the end of the run."""
    found = virtual_run(closed(callers, duration_s, warm_up_s=warm_up_s), [seconds], devices)
    assert found.throughput_per_s == pytest.approx(min(callers, devices) / seconds, rel=1e-6)
    in_windows = sum(w.completed for number, w in found.record.windows.items() if number >= 0)
    assert in_windows == pytest.approx(found.throughput_per_s * duration_s, rel=1e-4)


@pytest.mark.parametrize("stop_s", [0.0, 1.234, -0.2])
def test_a_run_that_is_stopped_has_the_rate_until_then(stop_s: float) -> None:
    made = closed(2, 60 if stop_s else 3, warm_up_s=0.6)
    found = virtual_run(made, [0.503], stop_s=stop_s)
    if stop_s < 0:
        assert (found.duration_s, found.throughput_per_s, found.offered_per_s) == (0, 0, 0)
    else:
        assert found.duration_s == pytest.approx(stop_s or 3)
        assert found.throughput_per_s == pytest.approx(2 / 0.503, rel=1e-3)
        assert found.offered_per_s == pytest.approx(found.throughput_per_s)


def test_every_report_and_objective_has_the_same_rate() -> None:
    found = virtual_run(closed(2, 6.0, slo=Slo.parse("throughput=3.9/s")), [0.503])
    per_s = 2 / 0.503
    assert found.outcomes[0].is_met
    assert found.summary()["throughput_per_s"] == pytest.approx(per_s, rel=1e-6)
    assert "24 answers, 3.98/s" in shown(found)
    assert "Objectives met" in page(found)
    assert page(found).count(">3.98</b><span>answers a second<") == 1
    assert page(found).count(">3.98/s<") == 2, "of the device and of the workload"
    rates = [found.part_per_s(part) for part in found.record.devices.values()]
    assert sum(rates) == pytest.approx(per_s, rel=1e-6)
    assert [found.running_share(part) for part in found.record.devices.values()] == pytest.approx([2.0])
    throughput = next(d for d in compare(found, found).differences if d.metric == "throughput")
    assert throughput.a == pytest.approx(per_s, rel=1e-6)
    rows = csv.DictReader(io.StringIO(found.as_csv()))
    assert sum(float(row["completed"]) for row in rows) == pytest.approx(6 * per_s, rel=1e-4)


def test_answers_after_the_end_are_in_no_window_that_began_before_it() -> None:
    """They would make the last part of a chart, and what an open loop is said to have answered, too high."""
    found = virtual_run(scenario(level=20, duration_s=0.95), [0.12])
    windows = found.record.windows
    assert sum(windows[number].completed for number in range(10)) == 17, "those until 0.92 s"
    assert sum(window.completed for window in windows.values()) == found.answered == 19
