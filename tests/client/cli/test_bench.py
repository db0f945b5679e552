"""`npugrad bench`: real runs in processes of their own, counted whole, judged, written, and refused."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.client import programs
from tests.client.bench.made import forked_workers as forked_workers
from tests.client.bench.made import result
from tests.client.cli.command import NOWHERE, failed, run
from tests.client.fake_service import Context, abort_with, fake_service, zeros
from tests.fix_server import ServerProcess, StartServer
from tests.fix_tls import Certificates
from typer.testing import Result

from npugrad import OPERATORS, OpRecord
from npugrad.errors import ServerBusy
from npugrad_client._cli.bench_status import OF_COMPARE, STATUSES, capacity_status
from npugrad_client.bench.capacity import Capacity, CapacityTrial
from npugrad_client.bench.scenario import LoadStage, Scenario, WeightedWorkload
from npugrad_client.bench.sizes import example, parse_sizes

COMMAND = "runpy.run_module('npugrad_client.cli', run_name='__main__', alter_sys=True)"
ALL_THE_SAME = "--allow-client-bound"
"""These tests share a machine with others, and count calls: who was the bottleneck does not matter."""


SIZES = {
    "multi_scale_deformable_attention_grad": "bs=1,nq=5,nh=2,ch=8,levels=6x7,3x4,points=4",
    "grid_sampler_2d_backward": "n=1,c=2,h=7,w=9,oh=5,ow=3,padding_mode=1,align_corners=true",
    "group_norm_backward": "n=3,c=12,hxw=20,group=4,shape=3x12x4x5,output_mask=true,false,true",
    "fused_floyd_attention_grad": "b=1,h=2,n=16,m=128,k=256,d=32,scale_value=0.5",
    "layer_norm_backward": "leading=3x5,normalized=24",
    "grid_sampler_3d_backward": "n=1,c=2,d=3,h=4,w=5,od=2,oh=3,ow=4",
}


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_of_each_operator_are_measured(operator: str, server: ServerProcess, tmp_path: Path) -> None:
    path, record = tmp_path / "report.json", OPERATORS[operator]
    size = SIZES.get(operator, example(record))
    flags = ["--operator", operator, "--size", size, "--dtype", "bfloat16", "--concurrency=2", "--calls=6"]
    done = run("bench", *flags, ALL_THE_SAME, "--json", str(path), target=server.address)
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_text("utf-8"))
    assert (report["loop"], report["interrupted"]) == ("closed", False)
    sent = WeightedWorkload(operator, "bfloat16", sizes=parse_sizes(record, size))
    expected = Scenario((sent,), (LoadStage(1, 1, 1),)).as_dict()["workloads"]
    assert report["scenario"]["workloads"] == expected
    summary = report["summary"]
    assert (summary["intended"], summary["answered"]) == (6, 6)
    assert sum(summary["devices"].values()) == 6
    assert report["environment"]["servers"][0]["devices"][0]["name"] == "cpu:0"


@pytest.mark.slow
def test_the_design_s_own_command_writes_every_report(tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"report.{kind}" for kind in ("json", "csv", "html")}
    flags = list(itertools.chain(*((f"--{kind}", str(path)) for kind, path in paths.items())))
    with fake_service() as service:
        load = ["--operator", "grid_sampler_2d_backward", "--rate", "40", "--duration", "1s"]
        done = run("bench", *load, *flags, ALL_THE_SAME, "--target", service.address)
    assert done.exit_code == 0, done.output
    assert "40 a second (open loop, constant), 1.0 s: 40 answers, " in done.stdout
    assert "p99.9" in done.stdout
    assert len(service.methods) == 41, "40 and the one that warms up"
    assert json.loads(paths["json"].read_text("utf-8"))["summary"]["answered"] == 40
    assert paths["csv"].read_text("utf-8").startswith("start_s,is_warm_up,intended,")
    assert paths["html"].read_text("utf-8").startswith("<!DOCTYPE html>")
    again = run("bench", "report", str(paths["json"]), "--html", str(tmp_path / "again.html"))
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.html").read_text("utf-8") == paths["html"].read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "status", "said", "key"),
    [
        (["--concurrency=1", "--calls=3"], 0, "1 in flight (closed loop), ", "summary"),
        (["--concurrency=1", "--calls=3", "--slo=max=1us"], 3, "MISSED: max: ", "objectives"),
        (["--rate=5", "--duration=200ms", "--find-capacity", "--slo=max=1us"], 4, "No rate was", "trials"),
    ],
)
def test_standard_output_gets_the_json_alone(flags: list[str], status: int, said: str, key: str) -> None:
    with fake_service() as service:
        done = run("bench", *flags, ALL_THE_SAME, "--json", "-", target=service.address)
    assert done.exit_code == status, done.output
    assert json.loads(done.stdout)[key]
    assert said in done.stderr
    assert not Path("-").exists()


def test_standard_output_gets_the_json_of_what_fails() -> None:
    done = run("bench", "--timeout", "1s", "--json", "-")
    assert done.exit_code == 6
    assert f"cannot reach {NOWHERE}" in json.loads(done.stdout)["died"]
    assert f"cannot reach {NOWHERE}" in done.stderr


def _busy_every_third(*slo: str) -> Result:
    """150 calls, of which the server refuses 50."""
    calls = itertools.count()

    def answer(record: OpRecord, request: Any, context: Context) -> Any:
        if next(calls) % 3 == 2:
            abort_with(context, ServerBusy("busy", operator=record.name))
        return zeros(record, request, context)

    with fake_service(answer) as service:
        load = ["--concurrency", "1", "--calls", "150", ALL_THE_SAME]
        return run("bench", *load, *(f"--slo={each}" for each in slo), target=service.address)


@pytest.mark.slow
def test_objectives_decide_the_exit_status() -> None:
    plain, kept, missed = (_busy_every_third(*flags) for flags in ((), ("errors=50%",), ("p99=1h",)))
    assert plain.exit_code == 1
    assert "failed: 50 x QUEUE_FULL" in plain.stdout
    assert kept.exit_code == 0, kept.output
    assert missed.exit_code == 3
    assert "MISSED: errors: 33.3 % (objective: at most 0 %)" in missed.stdout
    assert "MISSED: p99: no answer, because 33.3 % of the calls were not served" in missed.stdout


@pytest.mark.slow
def test_objectives_that_few_calls_do_not_tell_are_not_met(tmp_path: Path) -> None:
    """A missed one decides all the same."""
    paths = {kind: tmp_path / f"report.{kind}" for kind in ("json", "csv", "html")}
    flags = list(itertools.chain(*((f"--{kind}", str(path)) for kind, path in paths.items())))
    with fake_service() as service:
        load = ["--concurrency", "1", "--calls", "3", ALL_THE_SAME, "--target", service.address]
        few = run("bench", *load, "--slo", "p99=1h,p50=1h", *flags)
        missed = run("bench", *load, "--slo", "p99=1h,max=1us")
    assert (few.exit_code, missed.exit_code) == (4, 3), few.output
    told = "not judged: p99: not known from 3 answers, it takes 100 (objective: at most 3600 s)"
    assert told in few.stdout
    assert "met: p50: " in few.stdout
    assert "too few answers for p90 (it takes 10), p99 (100), p99.9 (1000)" in few.stdout
    assert re.search(r"^p50 +\d.*\np90 +- .*\np99 +- .*\np99.9 +- .*\nmax +\d", few.stdout, re.MULTILINE)
    report = json.loads(paths["json"].read_text("utf-8"))
    assert [each["verdict"] for each in report["objectives"]] == ["not judged", "met", "met"]
    latency = report["summary"]["latency_s"]
    assert [name for name, seconds in latency.items() if seconds is None] == ["p90", "p99", "p99.9"]
    page = paths["html"].read_text("utf-8")
    assert "Objectives not judged" in page
    assert "too few answers for p90" in page
    assert "<b>-</b><span>p99</span>" in page
    rows = list(csv.DictReader(paths["csv"].read_text("utf-8").splitlines()))
    assert {row["p99_s"] for row in rows} == {""}


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (Capacity([CapacityTrial(10)]), 0),
        (Capacity([CapacityTrial(10, ("p99: found too much",))]), 3),
        (Capacity([CapacityTrial(10)], is_client_limited=True), 4),
        (Capacity(is_client_limited=True), 4),
        (Capacity([CapacityTrial(10)], is_settled=False), 4),
        (Capacity([CapacityTrial(10, ("p99: found too much",))], is_settled=False), 4),
        (Capacity(is_settled=False, is_interrupted=True), 5),
        (Capacity([CapacityTrial(10)], is_settled=False, is_interrupted=True), 5),
        (Capacity([CapacityTrial(10)], is_settled=False, died="cannot reach it"), 6),
    ],
)
def test_a_search_that_found_nothing_sure_is_no_missed_objective(found: Capacity, status: int) -> None:
    assert capacity_status(found) == status


@pytest.mark.slow
def test_a_client_that_is_the_bottleneck_shows_no_figures_and_finds_no_rate(tmp_path: Path) -> None:
    """More calls a second than one Python process can make, whatever the machine."""
    load = ["--rate", "20000", "--duration", "100ms", "--max-in-flight", "64", "--label", "tenant"]
    load += ["--slo", "errors=100%"]
    path, found = tmp_path / "report.json", tmp_path / "found.json"
    with fake_service() as service:
        done = run("bench", *load, "--json", str(path), target=service.address)
        searched = run("bench", *load, "--find-capacity", "--json", str(found), target=service.address)
    told = failed(done, 4)
    assert told.startswith("No figures: the client was the bottleneck")
    # Which reasons there are depends on the host; those that are shown are saved.
    reasons = [line.strip() for line in told.splitlines() if line.startswith("  ")]
    known = ("calls were sent late: by ", "the event loop of worker 0 was busy ")
    assert any(reason.startswith(known) for reason in reasons)
    assert "Use more --workers" in told
    saved = json.loads(path.read_text("utf-8"))
    (flaw,) = saved["flaws"]
    bound = f"The client was the bottleneck: {'; '.join(reasons)}."
    assert (flaw["kind"], flaw["message"]) == ("client_bound", bound)
    assert {each["verdict"] for each in saved["objectives"]} == {"not judged"}
    assert "--allow-flawed" in failed(run("bench", "compare", str(path), str(path)), 2)

    assert searched.exit_code == 4, searched.output
    *trials, verdict = searched.stdout.splitlines()
    assert len(trials) == 2, "a moment of a busy client is tried again"
    assert all("/s answered  not counted, the client was the bottleneck: " in each for each in trials)
    assert verdict == "No rate was found: the client cannot send at the rates it would have to try."
    searched_for = json.loads(found.read_text("utf-8"))
    assert (searched_for["capacity_per_s"], searched_for["scenario"]) == (0, saved["scenario"])


@pytest.mark.slow
@pytest.mark.parametrize("search", [(), ("--find-capacity",), ("--find-capacity", "--rate", "5")])
def test_a_server_that_is_not_there_is_no_measurement(search: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = ["--duration", "1s", "--timeout", "1s", "--slo", "errors=100%", "--json", str(path), *search]
    done = run("bench", *flags)
    assert done.exit_code == 6, done.output
    assert f"cannot reach {NOWHERE}" in done.output
    saved = json.loads(path.read_text("utf-8"))
    assert f"cannot reach {NOWHERE}" in saved["died"]
    if not search:
        assert [each["kind"] for each in saved["flaws"]] == ["died"]
        assert [each["verdict"] for each in saved["objectives"]] == ["not judged"]
        shown = run("bench", "report", str(path))
        assert "The run died: group_norm_backward: cannot reach" in shown.stdout


def test_the_help_tells_every_exit_status() -> None:
    for command, statuses in (((), STATUSES), (("compare",), OF_COMPARE)):
        text = " ".join(run("bench", *command, "--help").output.split())
        for status, told in statuses.items():
            assert f"Exit status {status}: {told}" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--size huge",
            f"--size: found 'huge'; expected {', '.join(OPERATORS['group_norm_backward'].workloads.named)}, "
            "or sizes by name such as n=2,c=32,hxw=64,group=8",
        ),
        (
            "--size n=8,c=320,hxw=4096,group=33",
            "--size: group_norm_backward: c, group: found c 320, group 33; expected c divisible by group",
        ),
        (
            "--size n=8,c=320,hxw=4096,group=32,shape=8x320x64x65",
            "--size: group_norm_backward: grad_out: found 10649600 elements, shape [8, 320, 64, 65]",
        ),
        ("--size n=99999,c=320,hxw=4096,group=32", "expected at most 2147483647, or --inputs recipe"),
        (
            f"--size n={'9' * 30},c=320,hxw=4096,group=32",
            "which make no call: found shape [999999999999999999999999999999, 320, 4096], above 2^63",
        ),
        ("--dtype int8", "--dtype: found 'int8'; expected float32, float16, bfloat16"),
        ("--operator floyd", "OPERATOR: found 'floyd'; did you mean fused_floyd_attention_grad?"),
        ("--rate 5 --concurrency 2", "--rate and --concurrency cannot be combined"),
        ("--rate fast", "--rate: found 'fast'; expected a number, or two for a ramp such as 50:200"),
        ("--concurrency nan", "--concurrency: found nan; expected 0 to 65536"),
        ("--poisson", "--poisson needs --rate"),
        ("--poisson --concurrency 2", "--poisson needs --rate"),
        (
            "--rate 50 --duration 500us",
            "--duration: found 500 us at a rate of 50/s, which is 0.025 calls; expected 1 or more: use a "
            "duration of at least 0.02 s, or a rate of at least 2000/s",
        ),
        ("--rate 0:0.3 --poisson --duration 6s", "found 6.00 s at a rate of 0.15/s, which is 0.9 calls"),
        ("--inputs bits", "--inputs: found 'bits'; expected data, recipe"),
        ("--digest", "--digest: needs recipes as inputs"),
        ("--scenario smoke --digest", "--digest: needs recipes as inputs"),
        (
            "--scenario smoke --priority 0",
            "--priority cannot be combined with --scenario: set it in the file",
        ),
        ("--target ,", "--target: no address in ','"),
        ("--tls-ca nowhere.pem", "--tls: cannot read 'nowhere.pem': No such file or directory"),
        ("--tls-key nowhere.pem", "--tls-key needs --tls-certificate"),
        (
            "--find-capacity --html x.html",
            "--html cannot be combined with --find-capacity, which writes --json only",
        ),
        (
            "--find-capacity --calls 5",
            "--find-capacity: trials end by time, so leave out the number of calls",
        ),
        ("--find-capacity --precision nan", "--precision: found nan; expected 0.001 to 0.5"),
        ("--duration soon", "--duration: found 'soon'; expected a duration such as 50ms, 30s or 2m"),
        ("--warm-up 1000h", "--warm-up: found 3600000.0; expected 0 s and up to a week"),
        ("--scenario mixed-tenants --warm-up 1000h", "--warm-up: found 3600000.0; expected 0 s and"),
        ("--timeout 0s", "--timeout: found 0.0; expected above 0 s"),
        ("--duration 30", "--duration: found '30'; expected a duration with its unit, such as 30ms or 30s"),
        ("--slo fast", "--slo: found 'fast'; expected p99=50ms"),
        ("--workers 0", "--workers: found 0; expected 1 to 64"),
        ("--scenario smoke --size small", "--size cannot be combined with --scenario: set it in the file"),
        ("--scenario mixed-tenants --duration 1s", "--duration: the scenario's file sets it"),
        ("--scenario nowhere.yaml", "nowhere.yaml: cannot be read (No such file or directory)"),
        (
            "--scenario mixed-tenants --find-capacity",
            "--find-capacity: the scenario has a trace or several stages",
        ),
        ("--json /nonexistent/a.json", "/nonexistent/a.json: cannot be written: No such file"),
        ("--html .", ".: cannot be written: Is a directory"),
        ("--find-capacity --json /dev/null/a", "/dev/null/a: cannot be written: Not a directory"),
        ("compare nowhere.json nowhere.json", "nowhere.json: cannot be read (No such file or directory)"),
    ],
)
def test_what_cannot_be_measured_is_told(flags: str, message: str) -> None:
    assert message in failed(run("bench", *flags.split()), 2)


@pytest.mark.slow
@pytest.mark.parametrize("load", ["--rate=100", "--concurrency=2"])
def test_calls_that_the_warm_up_took_all_are_told(load: str) -> None:
    """Those of all workers and of the warm-up count together."""
    with fake_service() as service:
        flags = ["--workers", "2", "--calls", "5", "--warm-up", "3s", "--duration", "100ms"]
        done = run("bench", load, *flags, ALL_THE_SAME, target=service.address)
    assert done.exit_code == 1
    assert len(service.methods) == 5 + 2, "5 and one with which each worker connects"
    assert "--calls: all 5 were sent in the warm-up; use more, or a --warm-up" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", ["--warm-up=", "--warm-up=200ms"])
def test_calls_that_were_never_due_are_not_told_as_the_warm_ups(warm_up: str) -> None:
    with fake_service() as service:
        # A call is due on average, and none with this seed.
        flags = ["--rate", "5", "--poisson", "--seed", "8", "--calls", "5", "--duration", "200ms", warm_up]
        done = run("bench", *flags, ALL_THE_SAME, target=service.address)
    assert done.exit_code == 1
    assert "0 answers" in done.stdout
    assert "--calls" not in done.stdout


def test_the_shipped_scenarios_are_listed() -> None:
    done = run("bench", "scenarios")
    assert done.exit_code == 0
    assert "mixed-tenants: poisson, 60 s. Three applications of one tenant" in done.stdout


def test_comparisons_decide_the_exit_status(tmp_path: Path) -> None:
    paths = {}
    runs = {"a": result(0.02, seed=1), "b": result(0.02, seed=2), "slow": result(0.025, seed=3)}
    runs["short"] = result(0.02, duration_s=0.5)
    for name, made in runs.items():
        paths[name] = str(tmp_path / f"{name}.json")
        (tmp_path / f"{name}.json").write_text(made.as_json(), "utf-8")
    same = run("bench", "compare", paths["a"], paths["b"])
    assert (same.exit_code, same.stdout.splitlines()[0]) == (0, "no difference beyond 5 % was found")
    for files in (["A", "B", "--json"], ["A", "B", "--json", "-"], ["--json", "-", "A", "B"]):
        named = [{"A": paths["a"], "B": paths["slow"]}.get(each, each) for each in files]
        slower = run("bench", "compare", *named)
        assert slower.exit_code == 3
        assert (json.loads(slower.stdout)["verdict"], slower.stderr) == ("slower", "")
    for files in ([paths["a"]] * 3, [paths["a"], paths["b"], "-"]):
        assert "compare: found 3 files; expected two" in failed(run("bench", "compare", *files), 2)
    assert run("bench", "compare", paths["slow"], paths["a"]).exit_code == 0
    assert "load: found" in failed(run("bench", "compare", paths["a"], paths["short"]), 2)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["hdrh", "yaml"])
def test_a_missing_library_is_one_line(library: str) -> None:
    """The library is blocked in a process of its own; the message names the extra that brings it."""
    blocked = f"import runpy, sys; assert {library!r} not in sys.modules; sys.modules[{library!r}] = None; "
    ran = programs.run(blocked + COMMAND, "bench", "--scenario", "smoke")
    assert ran.returncode == 2
    install = "pip install '.[bench]' in a checkout of npugrad"
    assert ran.stderr == f"npugrad bench needs the extra `bench`: {install}\n"


@pytest.mark.slow
def test_operands_are_made_by_the_server_by_a_flag_also_over_a_scenario(
    server: ServerProcess, tmp_path: Path
) -> None:
    path, scenario = tmp_path / "a.json", tmp_path / "s.yaml"
    scenario.write_text(
        "workloads: [{operator: grid_sampler_2d_backward}]\narrival: closed\n"
        "load: [{concurrency: 1, duration: 60s}]\ncalls: 4\n",
        "utf-8",
    )
    flags = ["--scenario", str(scenario), "--inputs", "recipe", "--digest", "--json", str(path)]
    done = run("bench", *flags, ALL_THE_SAME, target=server.address)
    assert done.exit_code == 0, done.output
    assert (
        "operands made by the server, not sent: grid_sampler_2d_backward float32 small recipe" in done.stdout
    )
    (workload,) = json.loads(path.read_text("utf-8"))["scenario"]["workloads"]
    assert (workload["inputs"], workload["digest"]) == ("recipe", True)


@pytest.mark.slow
def test_several_targets_are_sent_to_in_turn() -> None:
    with fake_service() as one, fake_service() as other:
        flags = ["--concurrency", "1", "--calls", "10", ALL_THE_SAME]
        by_commas = run("bench", *flags, target=f"{one.address}, {other.address}")
        again = run("bench", *flags, "--target", one.address, "--target", other.address)
    assert len(one.methods) == len(other.methods) == 2 * (5 + 1)
    for done in (by_commas, again):
        assert done.exit_code == 0, done.output
        assert f"{one.address}: 5 answers to 5 calls, p50" in done.stdout


@pytest.mark.slow
def test_an_encrypted_server_is_measured(
    start_server: StartServer, certificates: Certificates, tmp_path: Path
) -> None:
    key, certificate = certificates.caller()
    (tmp_path / "client.key").write_bytes(key)
    (tmp_path / "client.pem").write_bytes(certificate)
    running = start_server(
        *certificates.mutual_flags, credentials=certificates.credentials(certificates.caller())
    )
    flags = ["--concurrency", "1", "--calls", "4", ALL_THE_SAME, "--tls-ca", certificates.authority]
    mutual = ["--tls-certificate", str(tmp_path / "client.pem"), "--tls-key", str(tmp_path / "client.key")]
    done = run("bench", *flags, *mutual, target=running.address)
    assert done.exit_code == 0, done.output
    refused = run("bench", *flags, "--timeout", "5s", target=running.address)
    assert f"cannot reach {running.address}" in failed(refused, 6)


def _is_gone(group: int) -> bool:
    """Whether nobody of a process group is left; Python's own tracker of resources takes a moment."""
    for _ in range(3000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


class Counted:
    """A service that says when it has seen some calls, and then answers none until it is told to."""

    def __init__(self, calls: int, *, holds: bool = False) -> None:
        self.seen, self.freed = threading.Event(), threading.Event()
        self._calls, self._left, self._holds = itertools.count(1), calls, holds

    def __call__(self, record: OpRecord, request: Any, context: Context) -> Any:
        number = next(self._calls)
        if number >= self._left:
            self.seen.set()
            if self._holds:
                self.freed.wait(60)
        return zeros(record, request, context)


def _interrupted(
    counted: Counted, *flags: str, signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
) -> tuple[int, str, str]:
    """A search or a run in a process group of its own, all of which gets the signals: as by a terminal."""
    grouped = "import os, runpy; os.setsid(); " + COMMAND
    with fake_service(counted) as service, tempfile.TemporaryFile("w+") as stderr:
        command = ["bench", ALL_THE_SAME, *flags, "--target", service.address]
        running = programs.start(grouped, *command, stderr=stderr)
        try:
            assert counted.seen.wait(60), "no calls came"
            for number in signals:
                os.killpg(running.pid, number)
                time.sleep(0.5 if len(signals) > 1 else 0.0)  # two at once are one
            if len(signals) == 1:
                counted.freed.set()
            status = running.wait(60)
            assert running.stdout is not None
            with running.stdout as stdout:
                output = stdout.read()
            assert _is_gone(running.pid)
        finally:
            counted.freed.set()
            running.kill()
            running.wait()
        stderr.seek(0)
        errors = stderr.read()
    assert "Traceback" not in errors
    return status, output, errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.deep)])
def test_an_interrupt_keeps_what_was_measured(number: signal.Signals, tmp_path: Path) -> None:
    """With objectives that every call keeps: a run that was ended before its time meets none of them."""
    paths = {kind: tmp_path / f"report.{kind}" for kind in ("json", "csv", "html")}
    flags = list(itertools.chain(*((f"--{kind}", str(path)) for kind, path in paths.items())))
    load = ["--duration", "300s", "--concurrency", "2", "--slo", "p99=1h,errors=100%"]
    status, output, errors = _interrupted(Counted(10), *load, *flags, signals=(number,))
    assert status == 5, errors
    assert "Interrupted: this is what was measured until then." in output
    assert "not judged: p99: " in output
    assert not any(line.startswith(("met", "MISSED")) for line in output.splitlines())
    report = json.loads(paths["json"].read_text("utf-8"))
    assert report["interrupted"]
    assert [each["kind"] for each in report["flaws"]][:1] == ["interrupted"]
    assert {each["verdict"] for each in report["objectives"]} == {"not judged"}
    assert report["summary"]["answered"] >= 5
    assert "Objectives not judged" in paths["html"].read_text("utf-8")
    assert paths["csv"].read_text("utf-8").startswith("start_s,")


@pytest.mark.slow
def test_an_interrupt_before_anything_is_measured_is_saved(tmp_path: Path) -> None:
    """The call with which a worker connects has no answer yet."""
    path = tmp_path / "report.json"
    flags = ["--duration", "300s", "--json", str(path)]
    status, output, errors = _interrupted(Counted(1, holds=True), *flags, signals=(signal.SIGTERM,))
    assert status == 5, errors
    assert "0.0 s: 0 answers" in output
    assert json.loads(path.read_text("utf-8"))["interrupted"]


@pytest.mark.slow
def test_a_second_interrupt_gives_up_and_is_saved_as_one(tmp_path: Path) -> None:
    """Calls in flight are not waited for."""
    path = tmp_path / "report.json"
    flags = ["--duration", "300s", "--concurrency", "2", "--json", str(path)]
    status, _, errors = _interrupted(Counted(10, holds=True), *flags, signals=(signal.SIGINT, signal.SIGTERM))
    assert status == 130, errors
    saved = json.loads(path.read_text("utf-8"))
    assert (saved["interrupted"], saved["summary"]["answered"]) == (True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.deep), signal.SIGTERM])
def test_an_interrupt_ends_a_whole_search(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    flags = ["--find-capacity", "--rate", "20", "--duration", "60s", "--workers", "2", "--json", str(path)]
    status, output, errors = _interrupted(Counted(30), *flags, signals=(number,))
    assert status == 5, errors
    assert output == "The search was interrupted before it found a rate that meets the objectives.\n"
    found = json.loads(path.read_text("utf-8"))
    assert (found["interrupted"], found["settled"], found["capacity_per_s"]) == (True, False, 0)
