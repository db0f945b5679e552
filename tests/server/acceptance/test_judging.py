"""What passes and what does not: comparisons, probes, steps that judge, and trials that end badly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.edge_calls import IMAGES, grid_call

from npugrad import get_operator
from npugrad.coordinates import CoordinateRule
from npugrad_server.acceptance.job import Job, Ran, make_job
from npugrad_server.acceptance.known import known
from npugrad_server.acceptance.numerics import COLUMNS, Accuracy
from npugrad_server.acceptance.probes import check_probes
from npugrad_server.acceptance.rig import Rig
from npugrad_server.acceptance.step import StepLog
from npugrad_server.acceptance.steps import determinism
from npugrad_server.acceptance.steps.round_trip import sizes
from npugrad_server.acceptance.trial import TrialFailed
from npugrad_server.worker.protocol import CallDone, CallFailed

RECORD = get_operator("group_norm_backward")
DONE = CallDone(1, 0.0, 0.0, 0.0, 0, "test")


def reference(job: Job) -> dict[str, Any]:
    outputs = {
        name: np.empty(meta.shape, meta.dtype.numpy)
        for name, meta in job.record.infer(job.call).items()
        if meta is not None
    }
    job.record.reference(job.arrays, job.call.attrs, outputs)
    return outputs


def test_right_results_pass_and_their_errors_are_kept() -> None:
    out, accuracy = StepLog(), Accuracy()
    for seed in range(3):
        job = make_job(RECORD, RECORD.build(dtype="float16"), seed)
        assert accuracy.check(out, "one", "small", "float16", job, Ran(reference(job), DONE))
    rows = {row[3]: row for row in accuracy.rows()}
    assert set(rows) == {"grad_input", "grad_gamma", "grad_beta"}
    for operator, dtype, kind, _, calls, error, worst in rows.values():
        assert (operator, dtype, kind, calls) == (RECORD.name, "float16", "small", 3)
        assert isinstance(error, float)
        assert isinstance(worst, float)
        assert 0 < error < 1e-3
        assert 0 < worst < 1
    assert len(COLUMNS) == 7


def test_points_on_pixel_edges_pass_with_the_rule_that_explains_them() -> None:
    call = grid_call(IMAGES, "identity", 3, padding_mode=0)
    job, out = replace(make_job(call.record, call.meta), arrays=call.inputs), StepLog()
    results = call.by_rule(CoordinateRule.VENDOR_A2)
    assert Accuracy().check(out, "one", "small", "float32", job, Ran(results, DONE))
    assert out.checks[0].found.endswith("by coordinate rule torch-unfused = vendor-a2 = vendor-950")
    assert known("one", job).complaint(Ran(results, DONE)) == ""
    mistaken = call.mutated("hundredth", CoordinateRule.VENDOR_A2)
    assert not Accuracy().check(out, "one", "small", "float32", job, Ran(mistaken, DONE))
    assert out.checks[1].found.endswith("no coordinate rule explains it: " + ", ".join(call.rules))
    assert known("one", job).complaint(Ran(mistaken, DONE)) == out.checks[1].found


def test_one_wrong_element_fails_with_the_output_and_where(rig: Rig) -> None:
    job = make_job(RECORD, RECORD.build())
    outputs = reference(job)
    outputs["grad_gamma"][3] += 1
    kept: dict[str, Any] = {}

    class Keeper:
        def keep(self, name: str, arrays: Mapping[str, Any]) -> None:
            kept[name] = arrays

    out = StepLog(keeper=Keeper())
    assert not Accuracy().check(out, "one", "small", "float32", job, Ran(outputs, DONE))
    (check,) = out.checks
    assert check.found.startswith("grad_gamma: outside tolerance")
    assert "the first at [3]" in check.found
    assert "grad_input" not in check.found
    assert list(kept) == ["one"]
    assert kept["one"]["result.grad_gamma"] is outputs["grad_gamma"]
    assert kept["one"]["operand.grad_out"] is job.arrays["grad_out"]


def test_a_call_without_a_result_fails_with_its_words() -> None:
    out, job = StepLog(), make_job(RECORD, RECORD.build())
    failed = CallFailed(1, "DEVICE_ERROR", "returned 361001")
    assert not Accuracy().check(out, "one", "small", "float32", job, Ran({}, failed))
    assert out.checks[0].found == "CallFailed: returned 361001"


@pytest.mark.slow
def test_probes_worked_out_by_hand_hold_on_a_cpu_and_tell_x_from_y(rig: Rig) -> None:
    out = StepLog()
    check_probes(rig, out)
    assert len(out.checks) == 7
    assert [check for check in out.checks if not check.ok] == []
    named = {check.name.rpartition(": ")[2]: check for check in out.checks}
    assert named["point a quarter off in x only"].found == "0 0.75 0.25 0 0 0 0 0"
    assert named["point a quarter off in y only"].found == "0 0 0.75 0 0 0 0.25 0"
    swapped = StepLog()
    check_probes(Swapped(rig), swapped)  # type: ignore[arg-type]
    assert [check for check in swapped.checks if check.ok] == []


class Swapped:
    """A rig whose device takes y for x."""

    def __init__(self, rig: Rig) -> None:
        self.settings, self.operators, self._bench = rig.settings, rig.operators, rig

    def run_job(self, job: Job) -> Ran:
        location = job.arrays["location"]
        assert location is not None
        ran = self._bench.run_job(replace(job, arrays={**job.arrays, "location": location[..., ::-1]}))
        turned = ran.outputs["grad_location"][..., ::-1]
        return Ran({**ran.outputs, "grad_location": turned}, ran.answer)


@pytest.mark.slow
def test_a_device_that_keeps_its_bits_passes_where_the_operator_has_the_option(rig: Rig) -> None:
    out = StepLog()
    determinism.run(rig, out)
    # A CPU has it for every operator, an NPU not, and that is what is expected here.
    wrong = {check.name for check in out.checks if not check.ok}
    assert wrong == {
        *(f"fused_floyd_attention_grad {dtype} triangles: option on" for dtype in ("float16", "bfloat16")),
        "grid_sampler_3d_backward float64 registration: option on",
    }
    (table,) = out.tables
    assert {row[2] for row in table.rows} == {1}


class Dithering:
    """A rig whose device flips the last bit of every third result."""

    def __init__(self, rig: Rig) -> None:
        self.operators, self._bench = rig.operators[2:3], rig
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bench, name)

    def run_job(self, job: Job) -> Ran:
        ran = self._bench.run_job(job)
        self._count += 1
        if self._count % 3 == 0:
            next(iter(ran.outputs.values())).view(np.uint8).reshape(-1)[0] ^= 1
        return ran

    def run_many(self, jobs: Any) -> list[Ran]:
        return [self.run_job(job) for job in jobs]


@pytest.mark.slow
def test_one_bit_that_differs_fails_with_the_option_and_is_reported_without(rig: Rig) -> None:
    out = StepLog()
    determinism.run(Dithering(rig), out)  # type: ignore[arg-type]
    wrong = [check for check in out.checks if not check.ok]
    titles = {check.name.rpartition(": ")[2] for check in wrong}
    assert titles == {"option on", "option on first", "option on and off in turns"}
    assert any(check.found == "2 different results" for check in wrong)
    assert {row[2] for row in out.tables[0].rows} == {2}


def test_sizes_stand_on_both_sides_of_every_limit() -> None:
    found = sizes(2**22)
    for limit in (32, 4096, 65536, 2**20, 2**22):
        assert {limit - 1, limit, limit + 1} <= set(found)
    assert 0 in found
    assert max(found) > 2 * 2**22


@pytest.mark.slow
def test_trials_tell_what_the_node_is_even_where_there_is_nothing_and_how_they_fail(absent: Rig) -> None:
    with absent.trial("surroundings") as trial:
        found = trial.run({})
    assert any("torch" in problem or "libascendcl" in problem for problem in found["problems"])
    assert "ASCEND_HOME_PATH" in found["variables"]
    assert json.dumps(found)
    order = {"device": 0, "staging_bytes": 2**20, "sizes": [1], "concurrent_bytes": 1}
    reason = r"copies: ended with status 1: .*(torch_npu|libascendcl)"
    with absent.trial("copies") as trial, pytest.raises(TrialFailed, match=reason):
        trial.run(order)
