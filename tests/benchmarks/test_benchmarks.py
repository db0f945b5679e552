"""The harness, end to end on one tiny case each; what it measures is not looked at."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.benchmarks import client, frames, memory, service, transport
from tests.benchmarks.__main__ import NAMES, main
from tests.benchmarks.canned import SMALL
from tests.benchmarks.contestant import difference, fingerprint, largest_error
from tests.benchmarks.goals import at_least, at_most, figure, promised
from tests.benchmarks.harness import Effort, Result, compare, in_both_orders
from tests.benchmarks.kernel_cases import ERROR, MEMORY, all_cases
from tests.benchmarks.kernel_subjects import FmaRoofline
from tests.benchmarks.picture import svg
from tests.benchmarks.processes import ROOT, Entry, Field, ProcessEnded
from tests.benchmarks.report import show_figures
from tests.benchmarks.service import CASES, TOLERANCE, ReferenceCall

from npugrad import OPERATORS
from npugrad_server.backends.cpu.kernels import KernelsUnavailable, find_library

STUB, NAIVE, TCP, TORCH = "generated stub", "grpcio, protobuf bytes", "raw TCP", "torch backward"
PROMISED = {
    "transport": {
        ("1 KiB, generated stub", NAIVE): at_least(0.5, 0.65),
        ("1 KiB", NAIVE): at_least(0.42, 0.55),
        ("64 KiB", NAIVE): at_least(0.5, 0.7),
        ("1 MiB", NAIVE): at_least(1, 1.5),
        ("16 MiB", NAIVE): at_least(5, 7),
        ("16 MiB", TCP): at_least(0.5, 0.6),
        ("64 MiB", NAIVE): at_least(6, 8),
        ("64 MiB", TCP): at_least(0.5, 0.6),
    },
    "service": {
        ("1 KiB, 32 in flight, simulated device", NAIVE): at_least(0.45, 0.7),
        ("multi_scale_deformable_attention_grad decoder", TORCH): at_least(0.7, 1),
        ("fused_floyd_attention_grad 64x128x128 D32", TORCH): at_least(0.5, 0.8),
        ("grid_sampler_2d_backward 4x3x128x128", TORCH): at_least(0.25, 0.5),
    },
    "client": {
        **{(f"{operator}, one at a time", STUB): at_least(0.85, 0.95) for operator in SMALL},
        ("asyncio, 1000 in flight", STUB): at_least(0.7, 0.9),
    },
    "memory": {
        ("64 MiB, peak over content", "server"): at_most(1.3, 1.1),
        ("64 MiB, peak over content", "client"): at_most(1.2, 1.1),
        **{
            (kind, who): at_most(32, 4)
            for kind in ("calls of one signature", "signatures", "calls of 4 MiB")
            for who in ("server", "client")
        },
    },
}


def _has_kernels() -> bool:
    try:
        return find_library().is_file()
    except KernelsUnavailable:
        return False


needs_kernels = pytest.mark.skipif(not _has_kernels(), reason="the kernels are not built")
KEYS = ["bench", "case", "dtype", "peer", "ratio", "low", "high"]


PEERS = {
    "transport": {"grpcio, protobuf bytes", "grpcio, identity", "raw TCP"},
    "service": {"reference in process", "grpcio, protobuf bytes", "without metrics"},
    "client": {"generated stub", "grpc, NumPy and protobuf alone"},
    "kernels": {"npugrad, fresh memory", "torch", "torch, memory kept", "DRAM roofline"},
}


def lines_of(folder: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """What a quick run says, and its lines of JSON."""
    command = [sys.executable, "-m", "tests.benchmarks", *arguments, "--quick", "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def judge(bench: str, folder: Path, said: str, found: list[dict[str, Any]]) -> None:
    """There are lines of ratios to every peer, of what was promised, a picture, and the file."""
    lines = [line for line in found if "ratio" in line and line["bench"] == bench]
    assert all(list(line) == KEYS for line in lines)
    assert all(0 < line["low"] <= line["ratio"] <= line["high"] for line in lines)
    held = {(line["case"], line["what"]) for line in found if "what" in line}
    cases = {line["case"] for line in lines}
    for case, peer in PROMISED.get(bench, {}):
        assert case not in cases or peer == TORCH or (case, f"{peer}'s time over ours") in held
    assert {line["peer"] for line in lines} == PEERS[bench]
    assert all(f"x {peer}" in said and "cpu: " in said for peer in PEERS[bench])
    assert ET.parse(folder / f"{bench}.svg").getroot().tag.endswith("svg")
    assert json.loads((folder / f"{bench}.json").read_text())["rows"]


@pytest.mark.slow
def test_one_case_gives_table_lines_and_picture(tmp_path: Path) -> None:
    judge("transport", tmp_path, *lines_of(tmp_path, "transport"))


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.long
def test_so_do_the_others(tmp_path: Path) -> None:
    said, found = lines_of(tmp_path, "service", "client", "memory", "frames")
    for bench in ("service", "client"):
        judge(bench, tmp_path, said, found)
    lines = [line for line in found if line["bench"] == "memory"]
    assert [(line["case"], line["what"].partition("'s growth")[0]) for line in lines] == [*PROMISED["memory"]]
    assert all(line["verdict"] for line in lines)
    peaks = [line["value"] for line in lines if line["case"] == memory.PEAK]
    assert all(0.9 < peak < 5 for peak in peaks)  # what holds a content at all has it in memory
    median, mean = [line for line in found if line["bench"] == "frames"]
    assert set(median["peers"]) == {"client", "front process", "worker"}
    assert 0 < sum(median["peers"].values()) <= median["value"] * 1.1
    assert all(count > 10 for count in median["peers"].values())
    assert mean["value"] > 0


@needs_kernels
@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.long
def test_kernels_have_their_errors_memory_and_rooflines(tmp_path: Path) -> None:
    said, found = lines_of(tmp_path, "kernels", "--operator", "group_norm", "--case", "64x64x8x8")
    judge("kernels", tmp_path, said, found)
    figures = [line for line in found if "what" in line]
    assert all(line["verdict"] in {None, "must", "stretch", "NOT REACHED"} for line in figures)
    assert {"largest error of grad_input", "loading and first call, over NumPy"} <= {
        f["what"] for f in figures
    }
    assert ET.parse(tmp_path / "kernels-rooflines.svg").getroot().tag.endswith("svg")
    (grown,) = (
        line
        for line in json.loads((tmp_path / "kernels.json").read_text())["results"]
        if line["unit"] == "bytes"
    )
    result = 64 * 64 * 64 * 4
    assert 0.9 * result <= grown["ours"][0] < 4 * result, "the memory of a call is that of its results"
    assert FmaRoofline().prepare({"flops": 1e6})() == {}


def test_a_frame_counts_each_time_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "switch").write_bytes(b"\7")
    program = (
        "def three():\n yield 1\n yield 2\n"
        "for _ in three(): pass\n"
        "open(__import__('os').environ['FRAMES_FOLDER'] + '/switch', 'r+b').write(b'\\xff')\n"
        "(lambda: None)()\n"
    )
    path = str(ROOT / "tests" / "benchmarks" / "counting")
    environment = {**os.environ, "PYTHONPATH": path, "FRAMES_FOLDER": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=True)
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert found["command"] == [sys.executable, "-c", program]
    assert [call for call in found["counts"] if call[2] == "three"] == [[7, "<string>", "three", 3]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "avx2"], "found --variant; expected it with the benchmark kernels alone"),
        (["kernels", "transport", "--case", "BEV"], "found --case; expected it with the benchmark kernels"),
        (["kernels", "--case", "no such case"], "no case is left"),
        (["none"], "found 'none'; expected transport, service, client, kernels"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.deep
def test_torch_computes_the_same() -> None:
    pytest.importorskip("torch")
    from tests.benchmarks.torch_peer import TorchCall

    # The first of each operator, and each that has another type than that.
    for operator, dtype in dict.fromkeys((operator, dtype) for operator, _, dtype, _ in CASES):
        sizes = next(case[3] for case in CASES if (case[0], case[2]) == (operator, dtype))
        described = {"operator": operator, "dtype": dtype, "sizes": sizes}
        ours, theirs = (fingerprint(made.prepare(described)()) for made in (ReferenceCall(), TorchCall()))
        assert difference(ours, theirs) <= TOLERANCE[dtype], described


def test_a_contestant_that_dies_is_named_and_started_again_and_tells_the_errors_of_every_result(
    tmp_path: Path,
) -> None:
    case = {"operator": CASES[0][0], "dtype": CASES[0][2], "sizes": CASES[0][3]}
    for name, values in ReferenceCall().prepare(case)().items():
        golden = values.astype(np.float64)
        if name == "grad_beta":
            golden.flat[3] += np.abs(golden).max()
        np.save(tmp_path / f"{name}.npy", golden)
    with Field(Effort(), {"it": Entry("tests.benchmarks.service:ReferenceCall")}) as contestants:
        with pytest.raises(ProcessEnded, match=r"ReferenceCall.*ended without an answer, exit code 1"):
            contestants["it"].prepare({"operator": "none"})
        contestants.end("it")
        contestants["it"].prepare(case)
        assert contestants["it"].fingerprint.keys() == {"grad_input", "grad_gamma", "grad_beta"}
        assert contestants["it"].median_s() > 0
        errors = contestants["it"].errors(tmp_path)
    assert errors["grad_input"] == errors["grad_gamma"] == 0
    assert 0.4 < errors["grad_beta"] <= 1


def test_an_error_that_is_no_number_shows() -> None:
    golden = np.arange(5.0)
    assert largest_error(golden.astype(np.float32), golden) == 0
    assert largest_error(np.array([0.0, 1, 3, 3, 4]), golden) == 0.25
    assert np.isnan(largest_error(np.array([0, np.nan, 2, 3, 4]), golden))


def test_a_goal_says_what_was_reached() -> None:
    more, less, one = at_least(4, 8), at_most(1.6, 1.3), at_most(50)
    assert [more.reached(x) for x in (3.9, 4, 7.9, 8)] == ["NOT REACHED", "must", "must", "stretch"]
    assert [less.reached(x) for x in (1.7, 1.6, 1.2)] == ["NOT REACHED", "must", "stretch"]
    assert [one.reached(x) for x in (1.0, 51.0, float("nan"))] == ["must", "NOT REACHED", "NOT REACHED"]
    assert at_least(1, 2).reached(float("nan")) == "NOT REACHED"


def test_figures_are_shown_with_their_verdicts() -> None:
    stream = io.StringIO()
    figures = [
        figure(("case", "float32"), "torch's time over ours", [3.0, 5.0, 4.5], at_least(4, 8)),
        figure(("case", "float32"), "largest error of x", [1e-6], at_most(5e-7), peers={"torch": 2e-6}),
        figure(("case", "float32"), "our time over the limit's", [3.0], None),
    ]
    show_figures("kernels", figures, stream)
    lines = [json.loads(line) for line in stream.getvalue().splitlines() if line.startswith("{")]
    assert [line["verdict"] for line in lines] == ["must", "NOT REACHED", None]
    assert lines[0]["value"] == 4.5
    assert lines[1]["peers"] == {"torch": 2e-6}
    assert "1 of 2 goals not reached" in stream.getvalue()


def test_what_was_promised_of_the_service_is_what_its_benchmarks_are_held_to() -> None:
    modules = {"transport": transport, "service": service, "client": client, "memory": memory}
    assert modules.keys() == PROMISED.keys() < set(NAMES)
    for name, module in modules.items():
        goals = {(case, who): goal for case, each in module.GOALS.items() for who, goal in each.items()}
        assert goals == PROMISED[name], name
    assert at_most(500, 300) == frames.GOAL


def test_each_of_these_cases_is_measured() -> None:
    assert transport.GOALS.keys() == transport.CASES.keys()
    of_operators = {f"{operator} {sizes}" for operator, sizes, *_ in CASES}
    loads = {
        f"1 KiB, {count} in flight, {label}" for count in service.CONCURRENCY for label in service.LOADED
    }
    assert service.GOALS.keys() <= of_operators | loads
    bursts = {f"asyncio, {count} in flight" for count in client.IN_FLIGHT}
    assert client.GOALS.keys() <= bursts | {f"{name}, one at a time" for name in SMALL}


def test_a_promise_of_a_peer_that_took_part_has_its_figure() -> None:
    result = Result("case", "float32", ours=(1.0, 2.0), peers={"peer": (0.5, 1.5), "other": (1.0, 1.0)})
    (found,) = promised(result, {"peer": at_least(0.6), "absent": at_least(1)})
    assert (found.what, found.value, found.verdict) == ("peer's time over ours", 0.625, "must")


def test_signatures_differ_from_number_to_number() -> None:
    calls = [memory.signature(number) for number in (*range(600), *range(10**6, 10**6 + 600))]
    shapes = {
        tuple(value.shape if isinstance(value, np.ndarray) else value for value in call.values())
        for call in calls
    }
    assert len(shapes) == len(calls)


def test_every_goal_is_of_something_that_is_measured() -> None:
    for case in all_cases():
        assert case.goals.keys() <= {*case.peers, case.roofline, ERROR, MEMORY}, case.label
        assert case.operator in OPERATORS


def test_a_difference_shows() -> None:
    right = np.random.default_rng(0).standard_normal(1000)
    assert difference(fingerprint({"x": right}), fingerprint({"x": right})) == 0
    for wrong in (right * 1.01, -right, right[::-1], np.where(np.arange(1000) == 3, 9.0, right)):
        assert difference(fingerprint({"x": right}), fingerprint({"x": wrong})) > 5e-3


def test_a_ratio_is_the_median_of_those_of_each_repetition() -> None:
    result = Result("case", "float32", ours=(1.0, 2.0, 4.0), peers={"peer": (3.0, 1.0, 4.0)})
    (row,) = result.rows("bench")
    assert (row.ratio, row.low, row.high) == (1.0, 0.5, 3.0)
    assert json.loads(row.line()) == dict(
        zip(KEYS, ["bench", "case", "float32", "peer", 1.0, 0.5, 3.0], strict=True)
    )


def test_slots_alternate_in_both_orders() -> None:
    log: list[str] = []

    def slot(name: str) -> float:
        log.append(name)
        return float(len(log))

    result = compare(
        "case", "", {"ours": lambda: slot("a"), "peer": lambda: slot("b")}, Effort(repetitions=4)
    )
    assert "".join(log) == "abbaabba"
    assert result.ours == (1.0, 4.0, 5.0, 8.0)
    assert list(in_both_orders(["a", "b", "c"], 2)) == [["a", "b", "c"], ["c", "b", "a"]]


def test_a_case_ends_early_when_its_time_is_over_but_not_before_three_repetitions() -> None:
    result = compare(
        "case", "", {"ours": lambda: 1.0, "peer": lambda: 2.0}, Effort(repetitions=9, case_s=-1.0)
    )
    assert result.peers == {"peer": (2.0, 2.0, 2.0)}


def test_the_picture_places_ratios_in_order_and_escapes_names() -> None:
    results = [
        Result("a < b", "float32", (1.0,), {"peer & co": (0.5,)}),
        Result("c", "float32", (1.0,), {"peer & co": (200.0,)}),
    ]
    rows = [row for result in results for row in result.rows("x")]
    goals = {("c", "float32", "peer & co"): at_least(4, 8)}
    root, of = ET.fromstring(svg("title", "subtitle", rows, goals)), "{http://www.w3.org/2000/svg}"
    (group,) = (group for group in root.iter(f"{of}g") if group.attrib.get("id") == "peer & co")
    first, second = (float(mark.attrib["x"]) for mark in group.iter(f"{of}use"))
    assert 0 < first < second <= float(root.attrib["viewBox"].split()[2])
    texts = {text.text for text in root.iter(f"{of}text")}
    assert {"a < b  float32", "against peer & co", "must", "stretch"} <= texts
