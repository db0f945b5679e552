"""Real servers whose devices are NPUs of the simulated CANN, driven through the unmodified torch_npu.

Only the environment tells such a server from one on hardware. Its end is part of the test: the simulator has
seen no broken rule, and no handle or executor is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from tests.cann_sim.build import Installation
from tests.cann_sim.fixtures import may_be_forked, template
from tests.cann_sim.report import HOST_OBJECTS, Report, write_plan
from tests.e2e.harness import workers_of
from tests.fix_server import SERVER_PROGRAM, ServerProcess, run_server, server_environment, start_process
from tests.worker_forks import ForkedWorker


@dataclass(frozen=True)
class NpuServer:
    """A server on simulated NPUs.

    Attributes:
        process: The server.
        report: What the simulator says of its processes.
        plan_path: File with the plan in force.
    """

    process: ServerProcess
    report: Report
    plan_path: Path

    def plan(self, text: str) -> None:
        """Puts a plan into force, in all its processes and for those that come."""
        write_plan(self.plan_path, text)

    def workers(self) -> dict[int, Counter[str]]:
        """What the simulator counted in each worker that lives, by process."""
        return {pid: self.report.counters(pid) for pid in workers_of(self.process.process.pid)}

    def assert_clean(self, *, lost_workers: bool = False) -> None:
        """No rule was broken; nothing is left on the host.

        Args:
            lost_workers: Whether workers ended in mid call, which may leave what they had.
        """
        assert self.report.violations() == [], self.process.log_text()[-4000:]
        counters = self.report.counters()
        assert counters["calls.aclCreateTensor"] > 0, "the simulator was not used"
        if not lost_workers:
            left = {name: counters[name] for name in HOST_OBJECTS}
            assert not any(left.values()), left


StartNpuServer = Callable[..., NpuServer]
"""Starts a server on simulated NPUs, ready to be called; see `run_npu_server` for the arguments."""


def npu_environment(installation: Installation, folder: Path, plan: str = "") -> dict[str, str]:
    """Variables that make processes use a simulator, with its report and plan file in a folder."""
    reports = folder / "report"
    reports.mkdir(parents=True, exist_ok=True)
    write_plan(folder / "plan", plan)
    return {
        **installation.environment(),
        "CANN_SIM_REPORT_DIR": str(reports),
        "CANN_SIM_PLAN_FILE": str(folder / "plan"),
    }


class ForkedServer:
    """A fork as servers are handled; see `tests.zygote.Process`."""

    def __init__(self, process: ForkedWorker, stdout: IO[str]) -> None:
        self._process, self.stdout, self.pid = process, stdout, process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit code."""
        return self._process.wait(timeout)

    def send_signal(self, sig: int) -> None:
        """Sends a signal unless it has ended."""
        if self.poll() is None:
            self._process.send_signal(sig)

    def kill(self) -> None:
        """Sends SIGKILL unless it has ended."""
        self.send_signal(signal.SIGKILL)


def fork_program(
    installation: Installation, arguments: Sequence[str], errors: IO[str], env: Mapping[str, str], *_: object
) -> ForkedServer:
    """Runs `npugrad-server` on a simulator as a fork, and its workers, too; see `tests.server_program`."""
    output, to_output = os.pipe()
    command, environment = ["tests.server_program", *arguments], server_environment(env)
    try:
        made = template(installation, True).fork(command, (), to_output, errors.fileno(), environment)
    finally:
        os.close(to_output)
    return ForkedServer(made, open(output))


@contextmanager
def run_npu_server(
    installation: Installation,
    folder: Path,
    *flags: str,
    devices: str = "npu:0",
    plan: str = "",
    lost_workers: bool = False,
    wait: bool = True,
    check_end: bool = True,
    program: Sequence[str] | None = None,
) -> Iterator[NpuServer]:
    """Runs a server on simulated NPUs for a block, without canaries once a device is ready.

    One would take a fault, or memory, that a test counts; `flags` may turn them on.

    Args:
        installation: The simulator.
        folder: For log, plan and report.
        flags: Flags of ``serve``.
        devices: Devices, such as ``"npu:0,npu:1"``.
        plan: Plan of the simulator at the start.
        lost_workers: Whether workers may end in mid call.
        wait: Whether to wait until calls are served.
        check_end: Whether the server has to end by itself, with exit code 0 and nothing leaked.
        program: What Python runs, as for `run_server`; None for the server, forked where that is the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_forked = program is None and may_be_forked(plan, {})
    with run_server(
        folder / "server.log",
        "--canary-interval-s=0",
        *flags,
        devices=devices,
        env=npu_environment(installation, folder, plan),
        wait=wait,
        check_end=check_end,
        program=program or SERVER_PROGRAM,
        start=partial(fork_program, installation) if is_forked else start_process,
    ) as process:
        running = NpuServer(process, Report(folder / "report"), folder / "plan")
        yield running
    if check_end:
        running.assert_clean(lost_workers=lost_workers)


@pytest.fixture(scope="session")
def npu_server(
    cann_sim: Installation, torch_npu: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NpuServer]:
    """One server on two simulated NPUs with two streams each, for tests that only call it."""
    folder = tmp_path_factory.mktemp("npu-server")
    with run_npu_server(
        cann_sim, folder, "--streams-per-device", "2", devices="npu:0,npu:1", plan="ndev=2;record=1"
    ) as running:
        yield running


@pytest.fixture
def start_npu_server(
    install_cann_sim: Callable[..., Installation], torch_npu: Path, tmp_path: Path
) -> Iterator[StartNpuServer]:
    """Starts servers of the test's own; each is ended, and checked, after the test."""
    with ExitStack() as stack:
        count = 0

        def start(*flags: str, installation: Installation | None = None, **options: Any) -> NpuServer:
            nonlocal count
            count += 1
            simulator, folder = installation or install_cann_sim(), tmp_path / f"npu{count}"
            # A template to fork has to be made first, which does not pay for one server.
            if installation is not None:
                options.setdefault("program", SERVER_PROGRAM)
            return stack.enter_context(run_npu_server(simulator, folder, *flags, **options))

        yield start
