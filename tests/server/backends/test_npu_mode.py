"""When a worker is deterministic, by release of CANN; the simulated one reads the option as each does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.cann_sim.fixtures import Ended
from tests.operators import GRID_SAMPLER, GROUP_NORM, MSDA
from tests.server.backends.conftest import NpuWorker, StartNpuWorker

from npugrad.call import CallOptions
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.releases import CannRelease
from npugrad_server.backends.npu.mode import offer
from npugrad_server.worker.protocol import CallDone, CallFailed

ON, OFF = CallOptions(deterministic=True), CallOptions()
NORM = GROUP_NORM.build(n=2, c=8, hxw=64, group=2)
ATTENTION = MSDA.build(nq=8)
SAMPLED = GRID_SAMPLER.build(n=1, c=4, h=4, w=4, oh=8, ow=8)
CALLS: tuple[tuple[OpRecord, CallMeta], ...] = (
    (MSDA, ATTENTION),
    (GRID_SAMPLER, SAMPLED),
    (GROUP_NORM, NORM),
)
MISSING = "aclrtSetSysParamOpt is not in libascendcl.so"


@pytest.mark.parametrize(
    ("release", "wanted", "missing", "kept", "refusal"),
    [
        ("9.1.0", None, "", None, ""),
        ("9.0.0-beta.1", None, "", None, ""),
        ("9.1.0", True, "", True, ""),
        ("9.1.0", False, "", False, "named with deterministic=0"),
        ("9.1.0", None, MISSING, False, f"CANN 9.1.0 reads the option of the process, and {MISSING}"),
        ("9.1.0", True, MISSING, False, MISSING),
        ("8.5.0", None, "", False, "CANN 8.5.0 reads the option once, before the first launch"),
        ("8.5.0", None, MISSING, False, "?deterministic=1, such as npu:0?deterministic=1"),
        ("8.5.0", True, MISSING, True, ""),
        ("8.3.RC1", False, "", False, "named with deterministic=0"),
        # What is right on every release is one mode from the start, if both options can be set.
        (None, None, "", False, "CANN of unknown release may read the option once"),
        (None, True, "", True, ""),
        (None, True, MISSING, False, MISSING),
    ],
)
def test_what_a_worker_offers(
    release: str | None, wanted: bool | None, missing: str, kept: bool | None, refusal: str
) -> None:
    found = offer(CannRelease.parse(release) if release else None, wanted, missing)
    assert found.kept is kept
    assert refusal in found.refusal
    assert bool(found.refusal) is bool(refusal)


# ------------------------------------------------------------------------------------ workers, for real


def results(
    worker: NpuWorker, record: OpRecord, meta: CallMeta, options: CallOptions, repeats: int
) -> set[bytes]:
    """Different results of one call, run again and again."""
    order, _ = worker.order(record, meta, options=options)
    found = set()
    for turn in range(repeats):
        again = replace(order, call=1000 * order.call + turn)
        worker.send(again)
        worker.get(CallDone)
        found.add(worker.contents(again))
    return found


def refusal(worker: NpuWorker, record: OpRecord, meta: CallMeta) -> str:
    """What a deterministic call is refused with."""
    answer = worker.ask(record, meta, options=ON)
    assert isinstance(answer, CallFailed), answer
    assert answer.reason == "DETERMINISM_UNSUPPORTED"
    return answer.message


def planned_modes(worker: NpuWorker) -> list[int]:
    """Whether each first phase, those of the probes included, chose deterministic kernels."""
    return [plan["deterministic"] for plan in worker.report.records("plan")]


@pytest.mark.npu_sim
@pytest.mark.slow
def test_from_9_0_each_call_has_its_own_mode(start_npu_worker: StartNpuWorker) -> None:
    worker = start_npu_worker()
    assert worker.ready.description.endswith("CANN 9.1.0, torch_npu 2.13.0, deterministic on request")
    assert (worker.ready.one_mode, worker.ready.deterministic, worker.ready.no_determinism) == (
        True,
        None,
        "",
    )
    for record, meta in CALLS:
        assert len(results(worker, record, meta, OFF, 4)) > 1
        if record is MSDA:
            assert "expected False with CANN 9.1.0, because" in refusal(worker, record, meta)
        else:
            assert len(results(worker, record, meta, ON, 4)) == 1
        assert len(results(worker, record, meta, OFF, 4)) > 1


@pytest.mark.npu_sim
@pytest.mark.slow
def test_up_to_8_5_a_worker_is_deterministic_from_before_its_first_launch(
    start_npu_worker: StartNpuWorker,
) -> None:
    worker = start_npu_worker("cann=8.5.0;record=1", device="npu:0?deterministic=1")
    assert worker.ready.description.endswith("always deterministic")
    assert (worker.ready.one_mode, worker.ready.deterministic) == (False, True)
    for record, meta in CALLS:
        assert len(results(worker, record, meta, ON, 4)) == 1
        assert len(results(worker, record, meta, OFF, 4)) == 1
    assert set(planned_modes(worker)) == {1}
    beyond = GRID_SAMPLER.build(n=1, c=2049, h=1, w=1, oh=1, ow=1)
    assert "expected at most 2048" in refusal(worker, GRID_SAMPLER, beyond)


@pytest.mark.npu_sim
@pytest.mark.slow
def test_up_to_8_5_a_worker_without_the_mode_refuses_before_the_first_phase(
    start_npu_worker: StartNpuWorker,
) -> None:
    worker = start_npu_worker("cann=8.5.0;record=1")
    assert worker.ready.description.endswith("CANN 8.5.0, torch_npu 2.13.0, not deterministic")
    assert "name the device with ?deterministic=1" in worker.ready.no_determinism
    before = len(planned_modes(worker))
    for record, meta in CALLS:
        assert "CANN 8.5.0 reads the option once" in refusal(worker, record, meta)
    assert len(planned_modes(worker)) == before
    assert len(results(worker, GROUP_NORM, NORM, OFF, 4)) > 1


@pytest.mark.npu_sim
@pytest.mark.slow
def test_a_device_may_be_named_with_its_mode_on_any_release(start_npu_worker: StartNpuWorker) -> None:
    worker = start_npu_worker("record=1", device="npu:0?deterministic=0")
    assert worker.ready.deterministic is False
    assert len(results(worker, GROUP_NORM, NORM, OFF, 4)) > 1
    assert "the device was named with deterministic=0" in refusal(worker, GROUP_NORM, NORM)
    assert set(planned_modes(worker)) == {0}


@pytest.mark.npu_sim
@pytest.mark.slow
@pytest.mark.usefixtures("torch_npu")
def test_without_the_option_of_the_process_there_is_no_mode_to_switch(run_on_sim: Any) -> None:
    ended: Ended = run_on_sim(
        "tests.server.backends.mode_scenarios", "without_process_option", with_torch=True
    )
    assert ended.status == 0, ended.errors[-3000:]
    why, complaint = json.loads(ended.output.splitlines()[-1])
    assert why.startswith(f"CANN 9.1.0 reads the option of the process, and {MISSING}")
    assert complaint == f"found deterministic=1; expected none, because {why}"


@pytest.mark.npu_sim
@pytest.mark.slow
@pytest.mark.usefixtures("torch_npu")
def test_calls_of_both_modes_from_eight_streams_have_the_bits_of_a_single_one(run_on_sim: Any) -> None:
    plan = "kernel_ms=10;pageable=abort"
    ended: Ended = run_on_sim(
        "tests.server.backends.mode_scenarios", "eight_streams", plan=plan, with_torch=True
    )
    assert (ended.status, ended.report.violations()) == (0, []), ended.errors[-3000:]
    counters = ended.report.counters()
    assert counters["max_concurrent_kernels"] > 1
    found = json.loads(ended.output.splitlines()[-1])
    assert found["deterministic"] == 8 * 12 // 2
    assert found["other bits with the option"] == 0
    assert found["other bits without it"] > found["without it"] // 2
