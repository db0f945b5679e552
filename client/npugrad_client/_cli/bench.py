"""`npugrad bench`: builds a scenario from options, runs and judges it, reports, sets the exit status."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npugrad.errors import NpugradError
from npugrad.ops import OPERATORS
from npugrad_client._cli import completion
from npugrad_client._cli.bench_scenario import DEFAULT_OPERATOR, scenario_of
from npugrad_client._cli.bench_search import check_search, search_capacity
from npugrad_client._cli.bench_status import (
    COMPARE_HELP,
    DIED,
    FAILED,
    HELP,
    INTERRUPTED,
    INVALID,
    MISSED,
)
from npugrad_client._cli.connection import (
    DEFAULT_TARGETS,
    Authority,
    Certificate,
    Encrypted,
    Key,
    Targets,
    servers_of,
    tls,
)
from npugrad_client._cli.terminal import (
    STDOUT,
    FileError,
    check_writable,
    console_for,
    err,
    fail,
    out,
    reporting,
    write_json,
    write_text,
)
from npugrad_client.bench.interrupts import terminated_as_interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_client._tls import Servers
    from npugrad_client.bench.result import Result
    from npugrad_client.bench.scenario import Scenario

app = typer.Typer(rich_markup_mode=None)

_EXTRA = "the extra `bench`: pip install '.[bench]' in a checkout of npugrad"


@app.callback(invoke_without_command=True, help=HELP)
def bench(
    context: typer.Context,
    scenario: Annotated[
        str,
        typer.Option(
            help="YAML file, or a shipped scenario (`npugrad bench scenarios` lists them).",
            autocompletion=completion.scenarios,
        ),
    ] = "",
    operator: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(OPERATORS)}; {DEFAULT_OPERATOR} by default.",
            autocompletion=completion.operators,
        ),
    ] = "",
    size: Annotated[
        str,
        typer.Option(
            metavar="NAME|SIZES",
            help="small (the default), medium, large, a model's size such as detr-decoder, or explicit "
            "sizes: n=8,c=320,hxw=4096,group=32; shapes as 8x1024, lists as levels=50x67,25x34.",
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(help="Element type; the operator's first one by default.")] = "",
    label: Annotated[
        str, typer.Option(help="Label of the calls; a tenant's labels take turns. Default: bench.")
    ] = "",
    priority: Annotated[int | None, typer.Option(help="Priority of the calls, -100 to 100.")] = None,
    rate: Annotated[
        str, typer.Option(metavar="R[:R]", help="Open loop: calls a second, or a ramp such as 50:200.")
    ] = "",
    poisson: Annotated[
        bool, typer.Option("--poisson", help="Random (Poisson) arrivals instead of equal intervals.")
    ] = False,
    concurrency: Annotated[
        str, typer.Option(metavar="N[:N]", help="Closed loop: calls in flight, or a ramp; 1 by default.")
    ] = "",
    duration: Annotated[str, typer.Option(help="Time to measure, such as 30s or 2m; 10s by default.")] = "",
    calls: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after this many calls in total, including the warm-up."),
    ] = None,
    warm_up: Annotated[str, typer.Option(help="Time to run before measuring, such as 5s.")] = "",
    workers: Annotated[int | None, typer.Option(help="Number of processes that send calls.")] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(help="Open loop: maximum calls in flight; others are dropped and counted.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for operands, arrivals and the mix.")] = None,
    inputs: Annotated[
        str,
        typer.Option(
            metavar="data|recipe",
            help="Send operands with each call, or let the server make them; overrides a scenario.",
        ),
    ] = "",
    digest: Annotated[
        bool, typer.Option("--digest", help="With recipes: check that the server made the same bits.")
    ] = False,
    slo: Annotated[str, typer.Option(help="Objectives, such as p99=50ms,errors=0.1%.")] = "",
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Search for the highest rate that meets the objectives.")
    ] = False,
    precision: Annotated[float, typer.Option(help="Relative precision of --find-capacity.")] = 0.02,
    allow_client_bound: Annotated[
        bool, typer.Option("--allow-client-bound", help="Report even if the client was the bottleneck.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write the report as JSON; - for standard output, and all else to standard error.",
        ),
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a line for each time window.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write the report as an HTML page.")
    ] = None,
    target: Targets = DEFAULT_TARGETS,
    encrypted: Encrypted = False,
    tls_ca: Authority = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    timeout: Annotated[str, typer.Option(help="Deadline of each call, such as 10s; 60s by default.")] = "",
) -> None:
    """Measures, or searches; see `HELP`."""
    if context.invoked_subcommand is not None:
        return
    given: dict[str, Any] = {
        "operator": operator,
        "size": size,
        "dtype": dtype,
        "label": label,
        "priority": priority,
        "rate": rate,
        "poisson": poisson,
        "concurrency": concurrency,
        "duration": duration,
        "max_calls": calls,
        "warm_up_s": warm_up,
        "workers": workers,
        "max_in_flight": max_in_flight,
        "seed": seed,
        "slo": slo,
        "timeout_s": timeout,
        "inputs": inputs,
        "digest": digest,
    }
    with terminated_as_interrupted(), reporting(DIED), _needing_extra():
        made = scenario_of(scenario, given)
        for path in (json_file if json_file != STDOUT else None, csv_file, html_file):
            if path is not None:
                check_writable(path)  # before the run, not after it
        server = servers_of(target, tls(encrypted, tls_ca, tls_certificate, tls_key))
        if find_capacity:
            check_search(precision, csv_file, html_file)
            status = search_capacity(made, server, precision, json_file, allow_client_bound)
        else:
            status = _measure(made, server, (json_file, csv_file, html_file), allow_client_bound)
    raise typer.Exit(status)


@contextmanager
def _needing_extra() -> Iterator[None]:
    """Reports a missing extra in one line."""
    try:
        yield
    except ImportError:
        raise FileError(f"npugrad bench needs {_EXTRA}") from None


# -------------------------------------------------------------------------------- the commands


def _measure(
    scenario: Scenario, server: Servers, paths: tuple[Path | None, Path | None, Path | None], is_allowed: bool
) -> int:
    from npugrad_client.bench import show
    from npugrad_client.bench.bottleneck import client_bound
    from npugrad_client.bench.flaws import spoiling

    result = replace(_run_or_save(scenario, server, paths), is_client_bound_allowed=is_allowed)
    _write(result, *paths)
    spoilt = spoiling(result)
    if [flaw.kind for flaw in spoilt] == ["client_bound"]:
        fail(show.refusal(client_bound(result)), INVALID)
    show.show_result(console_for(paths[0]), result)
    if spoilt:
        return DIED if result.died else INTERRUPTED
    if not result.answered:
        return FAILED
    if result.outcomes:
        verdicts = {outcome.verdict for outcome in result.outcomes}
        return MISSED if "missed" in verdicts else INVALID if "not judged" in verdicts else 0
    return 0 if result.succeeded else FAILED


def _run_or_save(
    scenario: Scenario, server: Servers, paths: tuple[Path | None, Path | None, Path | None]
) -> Result:
    """Runs the scenario; if nothing is measured, writes reports that say so before the error is reported."""
    from npugrad_client.bench.live import live_view
    from npugrad_client.bench.run import run, unmeasured

    try:
        with live_view(err(), scenario) as on_progress:
            return run(scenario, server.targets, on_progress, server.tls)
    except NpugradError as error:
        _write(unmeasured(scenario, server.tls is not None, died=str(error)), *paths)
        raise
    except KeyboardInterrupt:
        _write(unmeasured(scenario, server.tls is not None, is_interrupted=True), *paths)
        raise


def _write(result: Result, json_file: Path | None, csv_file: Path | None, html_file: Path | None) -> None:
    from npugrad_client.bench.interrupts import held_back
    from npugrad_client.bench.report_html import page

    with held_back():  # no file is left half written
        if json_file is not None:
            write_json(json_file, result.as_json())
        if csv_file is not None:
            write_text(csv_file, result.as_csv())
        if html_file is not None:
            write_text(html_file, page(result))


@app.command()
def scenarios() -> None:
    """List the scenarios that come with the package."""
    from npugrad_client.bench.scenario_file import load_scenario, shipped_scenarios

    with reporting(), _needing_extra():
        for name, path in shipped_scenarios().items():
            made = load_scenario(name)
            comment = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
            told = " ".join(line.removeprefix("#").strip() for line in comment)
            out().print(f"{name}: {made.arrival}, {made.duration_s:g} s. {told}", soft_wrap=True)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(metavar="A.json", help="JSON of a run.", show_default=False)],
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write the report as an HTML page.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a line for each window.")] = None,
) -> None:
    """Show a saved run again, or write other reports from it."""
    from npugrad_client.bench.result import load_result
    from npugrad_client.bench.show import show_result

    with reporting(), _needing_extra():
        result = load_result(file)
        show_result(out(), result)
        _write(result, None, csv_file, html_file)


@app.command(help=COMPARE_HELP, context_settings={"allow_extra_args": True})
def compare(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(metavar="A.json", help="JSON of the first run.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="JSON of the second run.", show_default=False)],
    margin: Annotated[float, typer.Option(help="Ignore smaller relative changes.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="Joint confidence level of all intervals.")] = 0.95,
    allow_flawed: Annotated[
        bool,
        typer.Option(
            "--allow-flawed",
            help="Also compare runs that were interrupted, died or were limited by the client.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for scripts; `--json -` does the same.")
    ] = False,
) -> None:
    """Compares two runs; see `COMPARE_HELP`."""
    from npugrad_client.bench.compare import compare as held_against
    from npugrad_client.bench.result import load_result
    from npugrad_client.bench.show import show_comparison

    with reporting(), _needing_extra():
        paths = [path for path in (a, b, *map(Path, context.args)) if not (as_json and path == STDOUT)]
        if len(paths) != 2:
            raise FileError(f"compare: found {len(paths)} files; expected two")
        first, second = map(load_result, paths)
        found = held_against(first, second, margin, confidence, allow_flawed=allow_flawed)
        if as_json:
            out().print_json(json.dumps(found.as_dict()))
        else:
            show_comparison(out(), found)
    raise typer.Exit({"slower": MISSED, "inconclusive": INVALID}.get(found.judgement, 0))
