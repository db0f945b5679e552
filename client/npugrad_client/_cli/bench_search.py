"""`npugrad bench --find-capacity`: the first rate, the trials, and what they found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from npugrad import NpugradError
from npugrad_client._cli.bench_status import capacity_status
from npugrad_client._cli.terminal import console_for, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from npugrad_client._tls import Servers
    from npugrad_client.bench.capacity import Capacity
    from npugrad_client.bench.result import Result
    from npugrad_client.bench.scenario import Scenario

_INFO_S = 10.0


def check_search(precision: float, csv_file: Path | None, html_file: Path | None) -> None:
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


def search_capacity(
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
        show.show_trial(console, trial)
        return trial

    first, console = scenario, console_for(json_file)
    search = capacity.Search(measure, precision)
    try:
        first = _first_rate(scenario, server, console)
        search.run(first.top_level)
    except capacity.Ended as ended:
        search.end(ended)
    except KeyboardInterrupt:
        search.end(capacity.Interrupted())
        _write_search(search.found, first, json_file)
        raise
    show.show_capacity(console, search.found)
    _write_search(search.found, first, json_file)
    return capacity_status(search.found)


def _write_search(found: Capacity, first: Scenario, json_file: Path | None) -> None:
    """Writes the finding and the first trial's scenario; the other trials differ only in their rate."""
    from npugrad_client.bench.interrupts import held_back

    if json_file is not None:
        values = {"scenario": first.as_dict(), **found.as_dict()}
        with held_back():
            write_json(json_file, json.dumps(values, indent=2) + "\n")


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


def _first_rate(scenario: Scenario, server: Servers, console: Console) -> Scenario:
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
    console.print(f"a closed loop reaches {format_rate(guess.throughput_per_s)}")
    return capacity.at_rate(scenario, max(guess.throughput_per_s, 1 / scenario.duration_s))
