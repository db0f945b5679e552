"""The plan: what it makes fail, when, how often, on which device, and across processes."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cann_sim.arithmetic import arithmetic
from tests.cann_sim.build import ARITHMETIC, DEFAULT_CANN, Installation, generated_pages
from tests.cann_sim.fixtures import REPOSITORY, TIMEOUT_S, Ended
from tests.cann_sim.observations import REPEATED
from tests.cann_sim.report import Report, leaks, write_plan

from npugrad.ops import OPERATORS
from npugrad.releases import CannRelease

Run = Callable[..., Ended]

pytestmark = pytest.mark.npu_sim

OOM, AICORE, DOWN, KERNEL_PACKAGE, TIMEOUT, INNER = 207001, 507015, 507033, 561112, 507046, 561000
PLAN, LAUNCH = "aclnnGroupNormBackwardGetWorkspaceSize", "aclnnGroupNormBackward"
SYNC = "aclrtSynchronizeStreamWithTimeout"


def observe(run_on_sim: Run, name: str, plan: str, **variables: str) -> Any:
    """What an observation prints."""
    ended = run_on_sim("tests.cann_sim.observations", name, plan=plan, **variables)
    assert ended.status == 0, ended
    assert ended.report.violations() == []
    return json.loads(ended.output)


@pytest.mark.parametrize(
    ("when", "failing"),
    [("1", {0}), ("3", {2}), ("2-4", {1, 2, 3}), ("4+", {3, 4, 5}), ("*", set(range(6)))],
)
@pytest.mark.parametrize("target", ["aclrtMalloc", "malloc"])
def test_calls_are_counted(run_on_sim: Run, target: str, when: str, failing: set[int]) -> None:
    codes = observe(run_on_sim, "malloc_statuses", f"{target}:{when}:{OOM}")
    assert codes == [OOM if i in failing else 0 for i in range(6)]


def test_entries_add_up(run_on_sim: Run) -> None:
    codes = observe(
        run_on_sim, "malloc_statuses", f"# two of them\naclrtMalloc:2:{OOM}\nmalloc:5:207018; hbm_mb=64"
    )
    assert codes == [0, OOM, 0, 0, 207018, 0]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (f"{PLAN}:2:{KERNEL_PACKAGE}", [["", 0], [PLAN, KERNEL_PACKAGE], ["", 0]]),
        (f"{LAUNCH}:1:361001", [[LAUNCH, 361001], ["", 0], ["", 0]]),
        (f"kernel:2:{AICORE}", [["", 0], [SYNC, AICORE]]),
        (f"kernel.aclnnGroupNormBackward:1:{AICORE}", [[SYNC, AICORE]]),
        ("kernel.aclnnGridSampler2DBackward:1:507015", [["", 0]] * 3),
        ("kernel:2:hang", [["", 0], [SYNC, TIMEOUT]]),
        ("kernel:1:slow=20000", [[SYNC, TIMEOUT]]),
        (f"{SYNC}:2:{TIMEOUT}", [["", 0], [SYNC, TIMEOUT]]),
    ],
)
def test_phases_kernels_and_waits_fail_on_order(run_on_sim: Run, fault: str, seen: list[list[Any]]) -> None:
    assert observe(run_on_sim, "launch_statuses", fault) == seen


def test_a_failed_phase_2_leaves_no_executor(run_on_sim: Run) -> None:
    ended = run_on_sim("tests.cann_sim.observations", "launch_statuses", plan=f"{LAUNCH}:*:361001")
    assert ended.status == 0, ended
    # Nothing but the stream that the observation made and the process's own context is left.
    assert leaks(ended.report.counters()) == {"live.streams": 1, "live.contexts": 1}


def test_a_device_alone(run_on_sim: Run) -> None:
    plan = f"ndev=2; aclrtSetDevice:1-2:{DOWN}:dev=1"
    assert observe(run_on_sim, "second_device_statuses", plan) == [0, DOWN, 0, DOWN, 0, 0]


def test_over_all_processes(run_on_sim: Run, tmp_path: Path) -> None:
    state = {"CANN_SIM_STATE": str(tmp_path / "state")}
    plan = f"aclrtSetDevice:2-3:{DOWN}:total"
    found = [observe(run_on_sim, "soc_and_operators", plan, **state) for _ in range(4)]
    assert [isinstance(result, dict) for result in found] == [False, True, True, False]
    assert found[1] == {"start": DOWN}


def test_a_plan_changes_under_a_process(cann_sim: Installation, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, "")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cann_sim.observations", "plans_as_told"],
        cwd=REPOSITORY,
        env={**cann_sim.environment({}), "PYTHONPATH": "protos", "CANN_SIM_PLAN_FILE": str(plan)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin
        assert process.stdout

        def ask() -> int:
            assert process.stdin
            assert process.stdout
            process.stdin.write("\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        assert [ask(), ask()] == [0, 0]
        write_plan(plan, f"aclrtSetDevice:2:{DOWN}")  # counted from now on
        assert [ask(), ask(), ask()] == [0, DOWN, 0]
        # The first entry keeps its count.
        write_plan(plan, f"aclrtSetDevice:2:{DOWN}\naclrtSetDevice:1:{OOM}")
        assert [ask(), ask()] == [OOM, 0]
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0


def test_a_function_may_hang(run_on_sim: Run) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_on_sim("tests.cann_sim.observations", "malloc_statuses", plan="aclrtMalloc:2:hang", timeout_s=2)


def test_a_generated_operator_fails_where_nothing_computes(run_on_sim: Run, tmp_path: Path) -> None:
    """It waits for no longer than the plan says, and tells why."""

    def told(path: Path | str) -> str:
        plan = "arithmetic_ms=100"
        code, text = observe(run_on_sim, "generated_status", plan, **{ARITHMETIC: str(path)})
        assert code == INNER
        assert "a task failed on device 0: aclnnSiluBackward: " in text
        return str(text)

    assert "CANN_SIM_ARITHMETIC is not set; expected the socket of a process that computes" in told("")
    assert "cannot connect: No such file or directory; the process" in told(tmp_path / "none")
    assert "cannot connect: File name too long" in told(tmp_path / ("long" * 30))
    with arithmetic() as path:
        pass
    assert f"{ARITHMETIC}={path} is gone, or stuck" in told(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "stuck"))
        listening.listen()
        assert "cannot receive: nothing came for 100 ms; the process" in told(tmp_path / "stuck")
    assert "cannot connect: Connection refused; the process" in told(tmp_path / "stuck")


def test_the_process_that_computes_tells_what_it_cannot(cann_sim: Installation) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(cann_sim.arithmetic))
        connection.sendall(b'{"op": "aclnnNone", "arguments": []}\n')
        with connection.makefile("rb") as reply:
            (size,) = struct.unpack("<q", reply.read(8))
            text = reply.read(-size).decode()
    assert text == "the process that computes failed: LookupError: no record describes aclnnNone"


def test_a_process_may_be_killed_at_a_call(run_on_sim: Run) -> None:
    ended = run_on_sim("tests.cann_sim.observations", "launch_statuses", plan="kernel:2:kill")
    assert ended.status == -signal.SIGKILL
    counters = ended.report.counters()
    assert counters["kernels.aclnnGroupNormBackward"] == 1
    assert counters["faults.injected"] == 1


def test_a_pointer_may_be_null(run_on_sim: Run) -> None:
    assert observe(run_on_sim, "null_tensor", "aclCreateTensor:1:null") == "aclCreateTensor"


def test_an_error_may_hide_another(run_on_sim: Run) -> None:
    plan = f"{PLAN}:1:361001:last={AICORE}:msg=the stream is gone"
    code, last, text = observe(run_on_sim, "error_after_a_failed_plan", plan)
    assert (code, last) == (361001, AICORE)
    assert "the stream is gone (error code 361001)" in text


def test_a_function_may_poison_the_context(run_on_sim: Run) -> None:
    plan = f"poisoned=code; {LAUNCH}:2:{AICORE}:poison"
    seen = observe(run_on_sim, "launch_statuses", plan)
    assert seen[:2] == [["", 0], [LAUNCH, AICORE]]
    assert seen[2][1] == AICORE


@pytest.mark.parametrize(("plan", "same"), [("", True), ("kernel:2:corrupt", False)])
def test_results_may_be_wrong(run_on_sim: Run, plan: str, same: bool) -> None:
    assert observe(run_on_sim, "results_of_two_launches", plan) is same


MOST = 6
"""Of 8 repetitions so many have other bits without the option, so that tests of it are able to fail."""


@pytest.mark.parametrize(
    ("cann", "name", "stages"),
    [
        ("8.5.0", "option_off_first", ()),
        ("8.5.0", "option_on_first", (0, 1)),
        ("9.1.0", "option_off_first", (2,)),
        ("9.2.0-beta.2", "option_off_first", (2,)),
    ],
)
def test_when_the_deterministic_option_counts(
    run_on_sim: Run, cann: str, name: str, stages: tuple[int, ...]
) -> None:
    """Up to 8.5 as it was when the first kernel was loaded; from 9.0 that of the process, at each phase 1."""
    found: dict[str, list[int]] = observe(run_on_sim, name, f"cann={cann}")
    assert found.keys() == REPEATED.keys() == OPERATORS.keys() - {"fused_floyd_attention_grad"}
    generated = {page.name: page for page in generated_pages(DEFAULT_CANN)}
    for kind, counts in found.items():
        record = OPERATORS[kind]
        offered = record.determinism_check(record.build(), CannRelease.parse(cann)) is None
        page = generated.get(record.aclnn_name)
        always = page is not None and page.determinism == "default"
        for stage, count in enumerate(counts):
            expected = count == 0 if always or (offered and stage in stages) else count >= MOST
            assert expected, (kind, stage, counts)


def test_floyd_attention_is_never_deterministic(run_on_sim: Run) -> None:
    assert observe(run_on_sim, "floyd_with_the_option", "") == 1


@pytest.mark.parametrize(("plan", "same"), [("", True), ("accumulate=1;", False)])
def test_kernels_may_count_on_zeroed_outputs(run_on_sim: Run, plan: str, same: bool) -> None:
    assert observe(run_on_sim, "gradients_over_ones", plan + "sums=ordered") is same


def test_the_workspace_may_be_large(run_on_sim: Run) -> None:
    plain = observe(run_on_sim, "workspace_bytes", "")
    assert observe(run_on_sim, "workspace_bytes", "workspace_mb=100") == plain + 100 * 2**20


@pytest.mark.parametrize(
    ("layout", "cann", "lacking"),
    [
        ("single", "9.1.0", set()),
        ("both", "9.1.0", set()),
        ("split", "8.5.0", {"fused_floyd_attention_grad"}),
        ("single", "8.3.0", {"fused_floyd_attention_grad"}),
    ],
)
def test_layouts_and_versions(
    run_on_sim: Run,
    install_cann_sim: Callable[..., Installation],
    layout: str,
    cann: str,
    lacking: set[str],
) -> None:
    installation = install_cann_sim(layout, cann)
    names = {path.name for path in installation.libraries.glob("libopapi*")}
    split = {"libopapi_nn.so", "libopapi_cv.so", "libopapi_transformer.so"}
    assert names == {"split": split, "single": {"libopapi.so"}, "both": {*split, "libopapi.so"}}[layout]
    ended = run_on_sim("tests.cann_sim.observations", "soc_and_operators", installation=installation)
    soc, version, found = json.loads(ended.output)
    assert (soc, version) == ("Ascend910B2", cann)
    assert set(OPERATORS) - set(found) == lacking


@pytest.mark.parametrize(("name", "status"), [("sudden_end", 7), ("killed", -signal.SIGKILL)])
def test_counters_outlive_the_process(run_on_sim: Run, name: str, status: int) -> None:
    ended = run_on_sim("tests.cann_sim.observations", name, plan="trace=1")
    assert ended.status == status
    counters = ended.report.counters()
    assert counters["device_bytes.0"] == 64
    assert counters["live.device_allocations"] == 1
    assert leaks(counters).get("live.tensors", 0) == (name == "killed")
    assert ended.report.pids()
    assert ended.report.trace()[:2] == ["aclInit", "aclrtSetDevice"]


def test_a_report_of_nothing_is_empty(tmp_path: Path) -> None:
    report = Report(tmp_path)
    assert (report.pids(), report.violations(), report.records(), report.trace()) == ([], [], [], [])
    assert not report.counters()
