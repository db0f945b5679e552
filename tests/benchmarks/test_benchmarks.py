"""The harness, end to end on one tiny case each; what it measures is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.benchmarks.contestant import difference, fingerprint
from tests.benchmarks.harness import Effort, Result, compare, in_both_orders
from tests.benchmarks.picture import svg
from tests.benchmarks.processes import ROOT
from tests.benchmarks.service import CASES, TOLERANCE, ReferenceCall

from npugrad_server.backends.cpu.kernels import KernelsUnavailable, find_library

if TYPE_CHECKING:
    from pathlib import Path


def _has_kernels() -> bool:
    try:
        return find_library().is_file()
    except KernelsUnavailable:
        return False


needs_kernels = pytest.mark.skipif(not _has_kernels(), reason="the kernels are not built")
KEYS = ["bench", "case", "dtype", "peer", "ratio", "low", "high"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "peers"),
    [
        ("transport", {"grpcio, protobuf bytes", "grpcio, identity", "raw TCP"}),
        ("service", {"reference in process", "grpcio, protobuf bytes"}),
        ("client", {"generated stub", "grpc, NumPy and protobuf alone"}),
        pytest.param("kernels", None, marks=needs_kernels),
    ],
)
def test_one_case_gives_table_lines_and_picture(bench: str, peers: set[str] | None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks", bench, "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all(list(line) == KEYS and line["bench"] == bench for line in lines)
    assert all(0 < line["low"] <= line["ratio"] <= line["high"] for line in lines)
    found = {line["peer"] for line in lines}
    assert found == peers if peers else "roofline" in found
    assert all(f"x {peer}" in done.stdout and "cpu: " in done.stdout for peer in found)
    drawn = ET.parse(tmp_path / f"{bench}.svg").getroot()
    assert drawn.tag.endswith("svg")
    assert json.loads((tmp_path / f"{bench}.json").read_text())["rows"]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))
def test_torch_computes_the_same(case: tuple[str, str, str, dict[str, Any]]) -> None:
    pytest.importorskip("torch")
    from tests.benchmarks.torch_peer import TorchCall

    described = {"operator": case[0], "dtype": case[2], "sizes": case[3]}
    ours, theirs = (fingerprint(made.prepare(described)()) for made in (ReferenceCall(), TorchCall()))
    assert difference(ours, theirs) <= TOLERANCE[case[2]]


def test_a_difference_shows() -> None:
    right = np.random.default_rng(0).standard_normal(1000)
    assert difference(fingerprint({"x": right}), fingerprint({"x": right})) == 0
    for wrong in (right * 1.01, -right, right[::-1], np.where(np.arange(1000) == 3, 9.0, right)):
        assert difference(fingerprint({"x": right}), fingerprint({"x": wrong})) > 5e-3


def test_a_ratio_is_the_median_of_those_of_each_repetition() -> None:
    result = Result("case", "float32", ours_s=(1.0, 2.0, 4.0), peers_s={"peer": (3.0, 1.0, 4.0)})
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
    assert result.ours_s == (1.0, 4.0, 5.0, 8.0)
    assert list(in_both_orders(["a", "b", "c"], 2)) == [["a", "b", "c"], ["c", "b", "a"]]


def test_a_case_ends_early_when_its_time_is_over_but_not_before_three_repetitions() -> None:
    result = compare(
        "case", "", {"ours": lambda: 1.0, "peer": lambda: 2.0}, Effort(repetitions=9, case_s=-1.0)
    )
    assert result.peers_s == {"peer": (2.0, 2.0, 2.0)}


def test_the_picture_places_ratios_in_order_and_escapes_names() -> None:
    results = [
        Result("a < b", "float32", (1.0,), {"peer & co": (0.5,)}),
        Result("c", "float32", (1.0,), {"peer & co": (200.0,)}),
    ]
    root = ET.fromstring(svg("title", "subtitle", [row for result in results for row in result.rows("x")]))
    circles = [float(mark.attrib["cx"]) for mark in root.iter("{http://www.w3.org/2000/svg}circle")]
    legend, *points = circles
    assert legend < points[0] < points[1] <= float(root.attrib["width"])
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a < b  float32", "against peer & co"} <= texts
