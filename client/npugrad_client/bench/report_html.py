"""Report of a run as a self-contained HTML page: no external scripts, fonts or pictures."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from npugrad_client.bench.charts import Series, bar_chart, line_chart, stack_chart
from npugrad_client.bench.flaws import flaws
from npugrad_client.bench.rates import bins
from npugrad_client.bench.record import STAGES
from npugrad_client.bench.result import PERCENTILES, few_answers
from npugrad_client.bench.sketch import count_for, known_s
from npugrad_client.bench.slo import Slo
from npugrad_client.bench.stylesheet import CSS
from npugrad_client.bench.units import format_rate, format_seconds, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npugrad_client.bench.record import Part, Window
    from npugrad_client.bench.result import Result

STAGE_NAMES = {
    "queued": "queued",
    "copy_in": "copy in",
    "run": "run",
    "copy_out": "copy out",
    "elsewhere": "network, front process, client",
}
CLOSED_CAUTION = (
    "A closed loop waits for each answer before it sends again, so it leaves out the calls that callers on a "
    "schedule would have sent meanwhile, and hides their queueing (coordinated omission)."
)
_CURVE = (0, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)


def page(result: Result) -> str:
    """The whole page."""
    name = result.scenario["name"] or "load test"
    sections = [
        _heading(result, name),
        _tiles(result),
        _over_time(result),
        _distribution(result),
        _stages(result),
        _parts("Devices", "device", result.record.devices, result),
        _parts("Servers", "server", result.record.servers, result),
        _parts("Workloads", "workload", result.record.workloads, result),
        _errors(result),
        _facts(result),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} - npugrad bench</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _heading(result: Result, name: str) -> str:
    loop = "closed loop" if result.is_closed else f"open loop, {result.scenario['arrival']} arrivals"
    servers = result.environment.get("servers", ())
    listed = [device for server in servers for device in server["devices"]]
    devices = ", ".join(str(device["name"]) for device in listed) or "unknown devices"
    if len(servers) > 1:
        devices = f"{devices} of {len(servers)} servers"
    simulated = any(device["simulated"] for device in listed)
    lines = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="faint">{escape(loop)}, {result.duration_s:.4g} s measured on {escape(devices)}'
        f"{', simulated' if simulated else ''}; {escape(str(result.environment.get('time', '')))}</p>",
        *(f'<p class="bad">{escape(flaw.message)}</p>' for flaw in flaws(result)),
        _verdict(result),
    ]
    if result.is_closed:
        lines.append(f"<p>{escape(CLOSED_CAUTION)}</p>")
    return "".join(lines)


def _verdict(result: Result) -> str:
    outcomes = result.outcomes
    if not outcomes:
        return ""
    kinds = {"met": "good", "missed": "bad", "not judged": "bad"}
    items = "".join(f'<li class="{kinds[o.verdict]}">{escape(str(o))}</li>' for o in outcomes)
    # One missed objective decides for all.
    text = next((v for v in ("missed", "not judged") if any(o.verdict == v for o in outcomes)), "met")
    return f'<p class="verdict {kinds[text]}">Objectives {text}</p><ul>{items}</ul>'


def _tiles(result: Result) -> str:
    latency = result.record.latency
    tiles = [("answers a second", format_rate(result.throughput_per_s).removesuffix("/s"))]
    tiles += [(f"p{p:g}", format_seconds(known_s(latency, p))) for p in PERCENTILES]
    tiles += [
        ("max", format_seconds(latency.percentile_s(100.0))),
        ("not served", format_share(result.error_share)),
    ]
    shown = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(n)}</span></div>' for n, v in tiles)
    note = few_answers(result) if result.answered else ""
    return f'<div class="tiles">{shown}</div>' + (f'<p class="faint">{escape(note)}</p>' if note else "")


def _windows(result: Result) -> list[tuple[float, Window]]:
    """Windows with their start in seconds, up to the end of the measurement."""
    last = result.duration_s / result.record.window_s - 1e-9
    found = sorted((number, window) for number, window in result.record.windows.items() if number < last)
    return [(number * result.record.window_s, window) for number, window in found]


def _over_time(result: Result) -> str:
    windows = _windows(result)
    begin = 0.0 if result.scenario["warm_up_s"] else None
    lines = [
        Series(name, [_milliseconds(known_s(w.latency, p)) for _, w in windows], color)
        for name, p, color in (("max", 100.0, 4), ("p99", 99.0, 1), ("p50", 50.0, 0))
    ]
    lines = [line for line in lines if any(y is not None for y in line.ys)]
    latencies = line_chart(
        f"Latency by {_start(result)}, ms",
        "seconds",
        [at_s for at_s, _ in windows],
        lines,
        shade_below=begin,
        limit=_limit(result),
        is_log=True,
    )
    return f"<h2>Over time</h2>{latencies}{_rates(result, begin)}"


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _rates(result: Result, begin: float | None) -> str:
    parts = bins(result)
    sent = "sent" if result.is_closed else "intended"
    rates = [
        Series("answered", [part.per_s(part.window.completed) for part in parts], 0),
        Series("failed", [part.per_s(sum(part.window.tally.failed.values())) for part in parts], 5),
        Series("dropped", [part.per_s(part.window.tally.dropped) for part in parts], 3),
        Series(sent, [part.intended_per_s for part in parts], 4, dashed=True),  # on top: may hide another
    ]
    kept = [each for each in rates if any(each.ys) or each.name == "answered"]
    return line_chart("Calls a second", "seconds", [p.middle_s for p in parts], kept, shade_below=begin)


def _start(result: Result) -> str:
    """When a call's latency begins: a closed loop has no intended start, it sends when it can."""
    return "start" if result.is_closed else "intended start"


def _limit(result: Result) -> tuple[str, float] | None:
    """The objective of the highest percentile, in milliseconds."""
    if not result.scenario["slo"]:
        return None
    objectives = [o for o in Slo.parse(result.scenario["slo"]).objectives if o.name.startswith("p")]
    best = max(objectives, key=lambda o: float(o.name[1:]), default=None)
    return (f"{best.name} objective", best.limit * 1e3) if best else None


def _distribution(result: Result) -> str:
    """Percentiles on a scale on which each further nine takes the same room."""
    points = [p for p in _CURVE if result.answered >= count_for(p)]
    xs = [-math.log10(1 - p / 100) for p in points]
    wanted = {0: "0", 50: "50", 90: "90", 99: "99", 99.9: "99.9", 99.99: "99.99"}
    record = result.record
    series = [Series(f"from the {_start(result)}", [1e3 * record.latency.percentile_s(p) for p in points], 0)]
    measured = [(f"from the {_start(result)}", record.latency)]
    if not result.is_closed:
        measured += [("from the actual start", record.service), ("sent late by", record.lateness)]
        actual = [1e3 * record.service.percentile_s(p) for p in points]
        series.append(Series("from the actual start", actual, 1, dashed=True))
    marks = [(x, wanted[p]) for x, p in zip(xs, points, strict=True) if p in wanted]
    chart = line_chart(
        "Latency by percentile, ms",
        "percent of the calls",
        xs,
        series,
        x_ticks=marks,
        is_log=True,
        describe=lambda x: f"p{100 * (1 - 10**-x):.4g}",
    )
    rows = [
        (
            name,
            *(format_seconds(known_s(d, p)) for p in (*PERCENTILES, 100.0)),
            format_seconds(d.mean_s),
        )
        for name, d in measured
    ]
    table = _table(("", "p50", "p90", "p99", "p99.9", "max", "mean"), rows)
    return f"<h2>Latency</h2>{_unserved(result)}{chart}{table}"


def _unserved(result: Result) -> str:
    if not result.failed and not result.dropped:
        return ""
    share = format_share(result.error_share)
    text = (
        f"Of answered calls. {share} of the calls had no answer; objectives count these as infinitely slow."
    )
    return f'<p class="faint">{escape(text)}</p>'


def _stages(result: Result) -> str:
    windows = _windows(result)
    layers = [
        Series(
            STAGE_NAMES[stage],
            [1e3 * w.stages[index] / w.tally.answered if w.tally.answered else None for _, w in windows],
            index,
        )
        for index, stage in enumerate(STAGES)
    ]
    begin = 0.0 if result.scenario["warm_up_s"] else None
    chart = stack_chart(
        "Mean time of a call by stage, ms",
        "seconds",
        [at_s for at_s, _ in windows],
        layers,
        shade_below=begin,
    )
    means = result.stage_means_s
    whole = sum(means.values()) or 1.0
    rows = [
        (
            STAGE_NAMES[stage],
            format_seconds(means[stage]),
            f"{means[stage] / whole:.1%}",
            *(format_seconds(known_s(result.record.stages[stage], p)) for p in (50.0, 99.0)),
        )
        for stage in STAGES
    ]
    table = _table(("", "mean", "share", "p50", "p99"), rows)
    return f"<h2>Stages, as the server reports them</h2>{chart}{table}"


def _parts(title: str, what: str, parts: dict[str, Part], result: Result) -> str:
    if not parts:
        return ""
    rates = [(name, result.part_per_s(part)) for name, part in sorted(parts.items())]
    bars = [(name, per_s, format_rate(per_s)) for name, per_s in rates]
    rows = [
        (
            name,
            str(part.tally.answered),
            str(sum(part.tally.failed.values()) + part.tally.dropped),
            f"{result.running_share(part):.1%}",
            *(format_seconds(known_s(part.latency, p)) for p in (50.0, 99.0, 100.0)),
        )
        for name, part in sorted(parts.items())
    ]
    table = _table((what, "answers", "not served", "device time", "p50", "p99", "max"), rows)
    return f"<h2>{title}</h2>{bar_chart(f'Answers a second by {what}', bars)}{table}"


def _errors(result: Result) -> str:
    counts = [*result.record.total.failed.most_common()]
    if result.dropped:
        counts.append((f"dropped: {result.scenario['max_in_flight']} in flight already", result.dropped))
    if not counts:
        return '<h2>Errors</h2><p class="good">None: every call was sent and answered.</p>'
    rows = [(reason, str(count), format_share(count / max(result.intended, 1))) for reason, count in counts]
    return f"<h2>Errors</h2>{_table(('reason', 'calls', 'share'), rows)}"


def _facts(result: Result) -> str:
    scenario, environment = result.scenario, result.environment
    level = "in flight" if result.is_closed else "a second"
    load = "; ".join(
        f"{a:g} {level} for {s:g} s" if a == b else f"{a:g} to {b:g} {level} in {s:g} s"
        for a, b, s in scenario["load"]
    )
    workloads = "; ".join(
        f"{w['weight']:g} x {w['name']} ({w['request_bytes']:,} bytes sent, {w['response_bytes']:,} received)"
        for w in scenario["workloads"]
    )
    busy = ", ".join(f"{cpu.loop_share:.0%}" for cpu in result.cpus)
    rows = [
        ("load", load),
        ("warm-up", f"{scenario['warm_up_s']:g} s"),
        ("mix", workloads),
        ("deadline of a call", f"{scenario['timeout_s']:g} s"),
        ("most in flight", str(scenario["max_in_flight"]) if not result.is_closed else "set by the load"),
        ("seed", str(scenario["seed"])),
        ("client", f"{scenario['workers']} worker(s), event loop busy {busy}; {_versions(environment)}"),
        ("inputs", "; ".join(dict.fromkeys(told_inputs(w) for w in scenario["workloads"]))),
        ("server", "; ".join(f"{s['target']} {s['version']}" for s in environment.get("servers", ()))),
        ("connection", "encrypted" if environment.get("is_encrypted") else "not encrypted"),
    ]
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<h2>What was sent</h2><table>{cells}</table>"


def told_inputs(workload: Mapping[str, Any]) -> str:
    """Describes where the operands of a workload come from."""
    if workload["inputs"] == "data":
        return "operands are sent with each call"
    return f"operands are made by the server{', which checks their digests' if workload['digest'] else ''}"


def _versions(environment: object) -> str:
    if not isinstance(environment, dict):
        return ""
    keys = ("npugrad", "python", "machine", "cpus")
    return ", ".join(f"{key} {environment[key]}" for key in keys if key in environment)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text, the others figures."""
    head = "".join(f"<th{_kind(index)}>{escape(each)}</th>" for index, each in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{_kind(index)}>{escape(each)}</td>" for index, each in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _kind(index: int) -> str:
    return ' class="n"' if index else ""
