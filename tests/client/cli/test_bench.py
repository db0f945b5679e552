"""`npugrad bench`: counts are kept, failures counted, an interrupt keeps what was measured."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from tests.client.fake_service import Context, abort_with, fake_service, zeros

from npugrad import OPERATORS, OpSpec
from npugrad.errors import ServerBusy
from npugrad.products import Product
from npugrad.validation import validate_call
from npugrad_client import ConnectError
from npugrad_client._cli import bench
from npugrad_client._cli.files import FileError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fix_server import ServerProcess

NORM = OPERATORS["group_norm_backward"]


def plan(concurrency: int = 2, duration_s: float = 60.0, max_calls: int = 20) -> bench.Plan:
    return bench.make_plan(NORM, "", "small", concurrency, duration_s, max_calls)


def shown(report: bench.Report) -> str:
    file = io.StringIO()
    bench.show(Console(file=file, width=200), report)
    return file.getvalue()


@pytest.mark.parametrize("size", ["small", "medium", "large"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_size_is_a_legal_call_of_each_type(operator: str, size: str) -> None:
    spec = OPERATORS[operator]
    for dtype in spec.inputs[0].dtypes[Product.ATLAS_A2]:
        call = spec.build(dtype=dtype, **bench.SIZES[operator][size])
        assert validate_call(spec, call).status == 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_small_calls_of_each_operator_are_measured(server: ServerProcess, operator: str) -> None:
    made = bench.make_plan(OPERATORS[operator], "bfloat16", "small", 2, 60.0, 6)
    report = bench.measure(made, server.address, 60)
    assert report.answered == 6
    assert report.succeeded
    assert sum(report.devices.values()) == 6
    assert report.as_dict()["dtype"] == "bfloat16"


def test_the_number_of_calls_is_kept_and_the_report_adds_up() -> None:
    with fake_service() as service:
        report = bench.measure(plan(concurrency=4, max_calls=50), service.address, 20)
    assert len(service.methods) == 51, "50 and the one that warms up"
    values = report.as_dict()
    assert values["answered"] == 50
    assert values["errors"] == {}
    assert values["devices"] == {"test:0 (test)": 50}
    assert values["throughput_per_s"] == pytest.approx(50 / values["elapsed_s"])
    latency = values["latency_s"]
    assert list(latency) == ["p50", "p90", "p99", "p99.9", "max", "mean"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]
    assert 0 < latency["mean"] <= latency["max"]
    assert json.loads(json.dumps(values)) == values


def test_the_time_is_kept() -> None:
    with fake_service() as service:
        report = bench.measure(plan(duration_s=0.2, max_calls=10**9), service.address, 20)
    assert report.answered > 0
    assert report.elapsed_s >= 0.2


def test_no_more_calls_are_in_flight_than_asked_for() -> None:
    flying, most, lock = itertools.count(), [0], threading.Lock()
    inside: set[int] = set()

    def count(spec: OpSpec, request: Any, context: Context) -> Any:
        with lock:
            number = next(flying)
            inside.add(number)
            most[0] = max(most[0], len(inside))
        answer = zeros(spec, request, context)
        with lock:
            inside.discard(number)
        return answer

    with fake_service(count) as service:
        bench.measure(plan(concurrency=3, max_calls=60), service.address, 20)
    assert 1 <= most[0] <= 3


def test_failures_are_counted_by_reason_and_fail_the_run() -> None:
    calls = itertools.count()

    def busy_every_third(spec: OpSpec, request: Any, context: Context) -> Any:
        if next(calls) % 3 == 2:
            abort_with(context, ServerBusy("busy", operator=spec.name))
        return zeros(spec, request, context)

    with fake_service(busy_every_third) as service:
        report = bench.measure(plan(concurrency=1, max_calls=30), service.address, 20)
    assert report.errors == {"QUEUE_FULL": 10}
    assert report.answered == 20
    assert not report.succeeded
    assert "failed: 10 x QUEUE_FULL" in shown(report)


def test_a_run_where_all_fails_has_a_report_as_well() -> None:
    calls = itertools.count()

    def first_only(spec: OpSpec, request: Any, context: Context) -> Any:
        if next(calls):
            abort_with(context, ServerBusy("busy", operator=spec.name))
        return zeros(spec, request, context)

    with fake_service(first_only) as service:
        report = bench.measure(plan(max_calls=4), service.address, 20)
    assert report.as_dict()["answered"] == 0
    assert report.as_dict()["latency_s"]["mean"] == 0
    assert not report.succeeded
    assert "0 answers" in shown(report)


def test_a_server_that_is_not_there_is_no_measurement() -> None:
    with pytest.raises(ConnectError):
        bench.measure(plan(), "unix:/nonexistent/npugrad.sock", 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "huge"}, "--size: found 'huge'; expected small, medium, large"),
        ({"dtype": "int8"}, "--dtype: found 'int8'; expected float32, float16, bfloat16"),
        ({"dtype": "x"}, "--dtype: found 'x'; expected float32"),
    ],
)
def test_what_cannot_be_measured_is_told(change: dict[str, str], message: str) -> None:
    arguments: dict[str, Any] = {"dtype": "", "size": "small", **change}
    with pytest.raises(FileError, match=message):
        bench.make_plan(NORM, **arguments, concurrency=1, duration_s=1, max_calls=1)


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    """A real process and a real signal, sent once the server has seen some calls."""
    some = threading.Event()
    calls = itertools.count()

    def counted(spec: OpSpec, request: Any, context: Context) -> Any:
        if next(calls) == 10:
            some.set()
        return zeros(spec, request, context)

    report_file = tmp_path / "report.json"
    with fake_service(counted) as service:
        command = [sys.executable, "-m", "npugrad_client.cli", "bench", "--duration", "300"]
        command += ["--concurrency", "2", "--json", str(report_file), "--target", service.address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert some.wait(60), "no calls came"
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, errors
    assert "Interrupted: this is what was measured until then." in output
    assert "Traceback" not in errors
    report = json.loads(report_file.read_text("utf-8"))
    assert report["interrupted"]
    assert report["answered"] >= 5


@pytest.mark.slow
def test_a_missing_histogram_library_is_one_line(tmp_path: Path) -> None:
    """The library is blocked in a process of its own; the message names the extra that brings it."""
    (tmp_path / "hdrh").mkdir()
    (tmp_path / "hdrh" / "__init__.py").write_text("raise ImportError('not installed')\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "npugrad_client.cli", "bench"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert ran.returncode == 2
    assert ran.stderr == "npugrad bench needs the extra `bench`: pip install 'npugrad[bench]'\n"
