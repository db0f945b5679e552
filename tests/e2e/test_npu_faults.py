"""Sick NPUs seen from callers: the fault matrix, with counts. All is SIMULATED."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import pytest
from tests.calls import call_unary, fill
from tests.cann_sim.build import Installation
from tests.e2e.harness import workers_of
from tests.e2e.npu_campaign import run
from tests.e2e.npu_cases import CASES, QUICK, FaultCase, Server
from tests.e2e.npu_matrix import Site
from tests.e2e.npu_verdict import judge
from tests.fix_npu import StartNpuServer, run_npu_server
from tests.fix_server import SERVER_PROGRAM
from tests.operators import FLOYD
from tests.summary import Tally

from npugrad_server.worker.descendants import processes

FAULTS = int(os.environ.get("NPUGRAD_PROVE_NPU_FAULTS", "8"))
"""Faults of the vendor's table, one after another; `make prove-npu-faults` has 500."""

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]


@pytest.fixture(scope="module")
def site_of(
    install_cann_sim: Callable[..., Installation], torch_npu: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Server], Site]]:
    """Give a function that finds or starts a server of the matrix; all are ended, and checked, at the end."""
    with ExitStack() as stack:

        @cache
        def find(server: Server) -> Site:
            running = run_npu_server(
                install_cann_sim("split", server.cann) if server.cann else install_cann_sim(),
                tmp_path_factory.mktemp(server.name),
                *(*QUICK, "--max-respawns", str(server.max_respawns)),
                devices=",".join(server.devices),
                plan=f"ndev={server.count}",
                lost_workers=True,
                program=SERVER_PROGRAM if server.cann else None,
            )
            return Site(stack.enter_context(running), server, stack)

        yield find


@pytest.mark.parametrize("case", CASES, ids=str)
def test_callers_and_devices_come_through(
    case: FaultCase, site_of: Callable[[Server], Site], tally: Tally
) -> None:
    site = site_of(case.server)
    found = site.run(case)
    judge(found)
    log = site.npu.process.log_text()
    assert [words for words in case.log if words not in log] == []
    assert site.npu.report.violations() == []
    tally(f"npu fault case={case.name}", found.line())


@pytest.mark.timeout(600 + 10 * FAULTS)
def test_faults_of_the_table_one_after_another(start_npu_server: StartNpuServer, tally: Tally) -> None:
    """Under load, every call is answered, right or with the number of a fault; every device comes back."""
    count = 3
    names = ",".join(f"npu:{index}" for index in range(count))
    running = start_npu_server(*QUICK, devices=names, plan=f"ndev={count}", lost_workers=True)
    found = run(running, count, FAULTS)
    tally("npu faults of the table", found.line())
    assert (found.wrong, found.lost, found.unexplained) == (0, 0, [])
    assert found.faults.total() == FAULTS
    assert found.restarts == found.faults["worker ended"]


def test_helpers_that_cann_forked_do_not_keep_the_device(start_npu_server: StartNpuServer) -> None:
    """They hold everything that a worker holds, as CANN's do; while one lives, nobody can open the NPU."""
    made = fill(FLOYD, FLOYD.build())
    # What is known by the environment that its worker began with, which is none of a fork's.
    running = start_npu_server(*QUICK, plan="helpers=1", lost_workers=True, program=SERVER_PROGRAM)
    (worker,) = workers_of(running.process.process.pid)
    helpers = [process.pid for process in processes() if process.parent == worker]
    try:
        assert len(helpers) == 2
        os.kill(worker, signal.SIGKILL)
        with running.process.channel() as channel:
            assert call_unary(channel, FLOYD, made.message()).info.device == "npu:0"
        assert {process.pid for process in processes() if process.state != "Z"}.isdisjoint(helpers)
        (device,) = running.process.info().devices
        assert device.restarts == 1  # it opened at once
    finally:
        for pid in helpers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_an_operator_that_one_device_lacks_runs_on_the_other(start_npu_server: StartNpuServer) -> None:
    """A device that lacks the kernels of an operator goes without it until its worker is replaced."""
    made = fill(FLOYD, FLOYD.build())
    running = start_npu_server(
        devices="npu:0,npu:1", plan=f"ndev=2;{FLOYD.aclnn_name}GetWorkspaceSize:1:561112:dev=0"
    )
    assert FLOYD.name in running.process.info().operators
    with running.process.channel() as channel:
        found = [call_unary(channel, FLOYD, made.message()).info.device for _ in range(4)]
    assert set(found) == {"npu:1"}
