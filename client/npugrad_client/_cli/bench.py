"""`npugrad bench`: builds a scenario from options, runs and judges it, reports, sets the exit status."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path  # noqa: TC003 - typer looks at the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npugrad import OPERATORS, NpugradError
from npugrad_client._cli import files
from npugrad_client._cli.bench_scenario import DEFAULT_OPERATOR, scenario_of
from npugrad_client._cli.bench_status import (
    COMPARE_HELP,
    DIED,
    FAILED,
    HELP,
    INTERRUPTED,
    INVALID,
    MISSED,
    capacity_status,
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
from npugrad_client._cli.terminal import err, fail, out, reporting
from npugrad_client.bench.interrupts import terminated_as_interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_client._tls import Servers
    from npugrad_client.bench.capacity import Capacity
    from npugrad_client.bench.result import Result
    from npugrad_client.bench.scenario import Scenario

app = typer.Typer()

_EXTRA = "the extra `bench`: pip install 'npugrad[bench]'"
_INFO_S = 10.0


@app.callback(invoke_without_command=True, help=HELP)
def bench(
    context: typer.Context,
    scenario: Annotated[
        str, typer.Option(help="YAML file, or a shipped scenario (`npugrad bench scenarios` lists them).")
    ] = "",
    operator: Annotated[
        str, typer.Option(help=f"One of {', '.join(OPERATORS)}; {DEFAULT_OPERATOR} by default.")
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
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
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
        for path in filter(None, (json_file, csv_file, html_file)):  # before the run, not after it
            files.check_writable(path)
        server = servers_of(target, tls(encrypted, tls_ca, tls_certificate, tls_key))
        if find_capacity:
            _check_search(precision, csv_file, html_file)
            status = _find_capacity(made, server, precision, json_file, allow_client_bound)
        else:
            status = _measure(made, server, (json_file, csv_file, html_file), allow_client_bound)
    raise typer.Exit(status)


@contextmanager
def _needing_extra() -> Iterator[None]:
    """Reports a missing extra in one line."""
    try:
        yield
    except ImportError:
        raise files.FileError(f"npugrad bench needs {_EXTRA}") from None


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
    show.show_result(out, result)
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
        with live_view(err, scenario) as on_progress:
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
        for path, make in (
            (json_file, result.as_json),
            (csv_file, result.as_csv),
            (html_file, lambda: page(result)),
        ):
            if path is not None:
                files.write_text(path, make())


def _find_capacity(
    scenario: Scenario, server: Servers, precision: float, json_file: Path | None, is_allowed: bool
) -> int:
    from npugrad_client.bench import capacity, show
    from npugrad_client.bench.scenario import ScenarioError

    slo = scenario.slo or capacity.UNLIMITED
    if scenario.max_calls:
        raise ScenarioError("--find-capacity: trials end by time, so leave out the number of calls")
    if scenario.arrival == "trace" or len(scenario.stages) > 1:
        raise ScenarioError(
            "--find-capacity: the scenario has a trace or several stages; it needs one stage to scale"
        )

    def measure(rate: float) -> capacity.CapacityTrial:
        result = _trial(capacity.at_rate(first, rate), server)
        trial = capacity.judge(replace(result, is_client_bound_allowed=is_allowed), rate, slo)
        if is_allowed:
            trial = replace(trial, client_bound=())
        show.show_trial(out, trial)
        return trial

    first = scenario
    search = capacity.Search(measure, precision)
    try:
        first = _first_rate(scenario, server)
        search.run(first.top_level)
    except capacity.Ended as ended:
        search.end(ended)
    except KeyboardInterrupt:
        search.end(capacity.Interrupted())
        _write_search(search.found, first, json_file)
        raise
    show.show_capacity(out, search.found)
    _write_search(search.found, first, json_file)
    return capacity_status(search.found)


def _write_search(found: Capacity, first: Scenario, json_file: Path | None) -> None:
    """Writes the finding and the first trial's scenario; the other trials differ only in their rate."""
    from npugrad_client.bench.interrupts import held_back

    if json_file is not None:
        values = {"scenario": first.as_dict(), **found.as_dict()}
        with held_back():
            files.write_text(json_file, json.dumps(values, indent=2) + "\n")


def _trial(scenario: Scenario, server: Servers) -> Result:
    """Makes one run of a search.

    Raises:
        Ended: The search must end: it was interrupted, or the run failed.
    """
    from npugrad_client.bench import capacity
    from npugrad_client.bench.run import run

    try:
        result = run(scenario, server.targets, tls=server.tls)
    except NpugradError as error:
        raise capacity.Died(str(error)) from error
    if result.is_interrupted:
        raise capacity.Interrupted
    if result.died:
        raise capacity.Died(result.died)
    return result


def _check_search(precision: float, csv_file: Path | None, html_file: Path | None) -> None:
    """Rejects options that a search does not support, before it takes minutes."""
    from npugrad_client.bench.capacity import check_precision
    from npugrad_client.bench.scenario import ScenarioError

    for name, path in (("csv", csv_file), ("html", html_file)):
        if path is not None:
            raise ScenarioError(f"--{name} cannot be combined with --find-capacity, which writes --json only")
    try:
        check_precision(precision)
    except ScenarioError as error:
        raise ScenarioError(f"--{error}") from None


def _first_rate(scenario: Scenario, server: Servers) -> Scenario:
    """Returns the scenario as an open loop at the first rate: the given one, else that of a closed loop.

    Raises:
        Ended: The search must end.
    """
    from npugrad_client import Client
    from npugrad_client.bench import capacity
    from npugrad_client.bench.units import format_rate

    if not scenario.is_closed:
        return capacity.at_rate(scenario, scenario.top_level)
    devices = 0
    try:
        for target in server.targets:
            with Client(target, timeout_s=_INFO_S, tls=server.tls) as client:
                devices += len(client.server_info().devices)
    except NpugradError as error:
        raise capacity.Died(str(error)) from error
    guess = _trial(capacity.first_guess(scenario, max(4, 3 * devices)), server)
    out.print(f"a closed loop reaches {format_rate(guess.throughput_per_s)}")
    return capacity.at_rate(scenario, max(guess.throughput_per_s, 1 / scenario.duration_s))


@app.command()
def scenarios() -> None:
    """List the scenarios that come with the package."""
    from npugrad_client.bench.scenario_file import load_scenario, shipped_scenarios

    with reporting(), _needing_extra():
        for name, path in shipped_scenarios().items():
            made = load_scenario(name)
            comment = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
            told = " ".join(line.removeprefix("#").strip() for line in comment)
            out.print(f"{name}: {made.arrival}, {made.duration_s:g} s. {told}", soft_wrap=True)


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
        show_result(out, result)
        _write(result, None, csv_file, html_file)


@app.command(help=COMPARE_HELP)
def compare(
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Compares two runs; see `COMPARE_HELP`."""
    from npugrad_client.bench.compare import compare as held_against
    from npugrad_client.bench.result import load_result
    from npugrad_client.bench.show import show_comparison

    with reporting(), _needing_extra():
        found = held_against(load_result(a), load_result(b), margin, confidence, allow_flawed=allow_flawed)
        if as_json:
            out.print_json(json.dumps(found.as_dict()))
        else:
            show_comparison(out, found)
    raise typer.Exit({"slower": MISSED, "inconclusive": INVALID}.get(found.judgement, 0))
