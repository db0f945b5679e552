"""Results on a terminal."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.table import Table

from npugrad_client.bench.bottleneck import ADVICE
from npugrad_client.bench.compare import ERROR_MARGIN
from npugrad_client.bench.flaws import flaws
from npugrad_client.bench.report_html import CLOSED_CAUTION, STAGE_NAMES
from npugrad_client.bench.result import few_answers
from npugrad_client.bench.sketch import known_s
from npugrad_client.bench.units import format_rate, format_seconds, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from npugrad_client.bench.capacity import Capacity, CapacityTrial
    from npugrad_client.bench.compare import RunComparison
    from npugrad_client.bench.record import Part
    from npugrad_client.bench.result import Result


def show_result(console: Console, result: Result) -> None:
    """Prints a run and how it met its objectives."""
    values = result.summary()
    console.print(
        f"{_load(result)}, {result.duration_s:.1f} s: {result.answered} answers, "
        f"{format_rate(result.throughput_per_s)}",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("latency", "ms", "stage, mean", "ms"):
        table.add_column(name, justify="right" if name == "ms" else "left")
    latency = [
        (name, "-" if seconds is None else f"{seconds * 1e3:.3f}")
        for name, seconds in values["latency_s"].items()
    ]
    stages = [(STAGE_NAMES[name], f"{s * 1e3:.3f}") for name, s in values["stages_mean_s"].items()]
    for left, right in zip_longest(latency, stages, fillvalue=("", "")):
        table.add_row(*left, *right)
    if result.answered:
        console.print(table)
        if note := few_answers(result):
            console.print(note, soft_wrap=True)
    for name, part in sorted(result.record.workloads.items()):
        if len(result.record.workloads) > 1:
            console.print(f"{name}: {part.tally.answered} answers{_times(part)}", soft_wrap=True)
    for name, part in sorted(result.record.servers.items()):
        text = f"{name}: {part.tally.answered} answers to {part.tally.intended} calls{_times(part)}"
        console.print(text, soft_wrap=True)
    made = [each["name"] for each in result.scenario["workloads"] if each["inputs"] == "recipe"]
    if made:
        console.print(f"operands made by the server, not sent: {', '.join(made)}", soft_wrap=True)
    _show_notes(console, result)


def _times(part: Part) -> str:
    if not part.tally.answered:
        return ""
    known = ((p, known_s(part.latency, p)) for p in (50.0, 99.0))
    return "".join(f", p{p:g} {format_seconds(seconds)}" for p, seconds in known if seconds is not None)


def _load(result: Result) -> str:
    scenario = result.scenario
    what = ", ".join(each["name"] for each in scenario["workloads"])
    levels = [level for stage in scenario["load"] for level in stage[:2]]
    # One ramp from its start to its end, possibly downwards; for several stages, the range.
    first, last = levels if len(levels) == 2 else (min(levels), max(levels))
    level = f"{last:g}" if first == last else f"{first:g} to {last:g}"
    if result.is_closed:
        return f"{what}: {level} in flight (closed loop)"
    return f"{what}: {level} a second (open loop, {scenario['arrival']})"


def _show_notes(console: Console, result: Result) -> None:
    for reason, count in result.record.total.failed.most_common():
        console.print(f"failed: {count} x {reason}")
    if result.answered and (result.failed or result.dropped):
        console.print(
            f"Latencies are those of answered calls; objectives count the {format_share(result.error_share)} "
            "of calls without an answer as infinitely slow.",
            soft_wrap=True,
        )
    if result.dropped:
        console.print(f"dropped: {result.dropped}, with {result.scenario['max_in_flight']} in flight already")
    calls, warm_up_s = result.scenario["max_calls"], result.scenario["warm_up_s"]
    if calls and result.warmed_up == calls:
        console.print(
            f"--calls: all {calls} were sent in the warm-up; use more, or a --warm-up "
            f"shorter than {warm_up_s:g} s",
            soft_wrap=True,
        )
    if result.is_closed:
        console.print(CLOSED_CAUTION, soft_wrap=True)
    for flaw in flaws(result):
        console.print(flaw.message, soft_wrap=True)
    for outcome in result.outcomes:
        console.print(f"{outcome.label}: {outcome}", soft_wrap=True)


def refusal(reasons: Sequence[str]) -> str:
    """The text instead of figures if the client was the bottleneck."""
    return (
        "No figures: the client was the bottleneck, so they would not be the server's.\n"
        + "".join(f"  {reason}\n" for reason in reasons)
        + f"{ADVICE} --allow-client-bound reports and judges anyway."
    )


def show_trial(console: Console, trial: CapacityTrial) -> None:
    """Prints one run of a search."""
    said = "met" if trial.is_met else f"missed: {'; '.join(trial.complaints)}"
    if trial.unjudged:
        said = f"not judged: {trial.unjudged}"
    if trial.client_bound:
        said = f"not counted, the client was the bottleneck: {'; '.join(trial.client_bound)}"
    console.print(f"{trial.rate:8.4g}/s  {trial.throughput_per_s:8.4g}/s answered  {said}", soft_wrap=True)


def show_capacity(console: Console, capacity: Capacity) -> None:
    """Prints what a search found."""
    console.print(str(capacity), soft_wrap=True)


def show_comparison(console: Console, comparison: RunComparison) -> None:
    """Prints a comparison, flaws and the verdict first."""
    for said in comparison.flaws:
        console.print(said, soft_wrap=True)
    console.print(str(comparison), soft_wrap=True)
    for difference in comparison.differences:
        note = "" if difference.decides else "; shown only, does not decide"
        console.print(f"  {difference}{note}", soft_wrap=True)
    console.print(
        f"{format_share(comparison.confidence)} joint confidence; "
        f"changes within {format_share(comparison.margin)}, and errors within {format_share(ERROR_MARGIN)} "
        "of the calls, count as no difference.",
        soft_wrap=True,
    )
