"""Simulators, built once a session, for tests of this folder and of anything that runs on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.cann_sim.arithmetic import arithmetic
from tests.cann_sim.build import Installation, find_torch_npu, installed
from tests.cann_sim.report import HOST_OBJECTS, Report
from tests.cann_sim.runtime import Runtime
from tests.worker_forks import Template

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300

LIVE = (
    *(name.removeprefix("live.") for name in HOST_OBJECTS),
    "streams",
    "events",
    "device_allocations",
    "pinned_allocations",
)
"""What a test that uses the simulator in this process must clean up."""


@pytest.fixture(scope="session")
def install_cann_sim() -> Iterator[Callable[..., Installation]]:
    """Give a function that builds an installation of a layout and version, each once for these sources."""
    if not shutil.which("g++"):
        pytest.skip("the simulator needs g++")
    with arithmetic() as computing:

        @cache
        def install(*place: Any, **options: Any) -> Installation:
            made = installed(REPOSITORY / "build" / "cann_sim", *place, **options)
            return replace(made, arithmetic=computing)

        yield install


@pytest.fixture(scope="session")
def cann_sim(install_cann_sim: Callable[..., Installation]) -> Installation:
    """Give the simulator of the newest version, in the split layout."""
    return install_cann_sim()


@pytest.fixture(scope="session")
def torch_npu() -> Path:
    """Give the folder of the installed torch_npu; tests that need it skip without."""
    found = find_torch_npu()
    if found is None:
        pytest.skip("torch_npu is not installed")
    return found


@dataclass(frozen=True)
class Ended:
    """A process that ran on the simulator.

    Attributes:
        status: Exit status, negative for a signal.
        output: What it printed.
        errors: What it wrote to stderr.
        report: What the simulator says of it.
    """

    status: int
    output: str
    errors: str
    report: Report


_IMPORTED = ("tests.cann_sim.operators", "tests.cann_sim.rig")
_WITH_TORCH = (
    *("torch", "torch_npu", "npugrad_server.backends.npu", "npugrad_server.worker.loop"),
    *("npugrad_server.worker.verifier", "npugrad_server.cli"),
)
_READ_LATE = ("CANN_SIM_", "NPUGRAD_", "ACL_OP_INIT_MODE")
"""How variables begin that a fork of what has imported torch_npu still reads."""
_QUEUE = ("TASK_QUEUE_ENABLE", "0")


@cache
def template(installation: Installation, with_torch: bool) -> Template:
    """A process to fork, which has imported what others need on a simulator, torch_npu among it or not."""
    environment = {**inherited(), **installation.environment({}), **dict([_QUEUE])}
    return Template([*_IMPORTED, *(_WITH_TORCH if with_torch else ())], environment)


def may_be_forked(plan: str, variables: Mapping[str, str]) -> bool:
    """Whether a process of this plan and environment may have imported torch_npu before it had them."""
    return "cann=" not in plan and all(
        name.startswith(_READ_LATE) or (name, value) == _QUEUE for name, value in variables.items()
    )


@pytest.fixture
def run_on_sim(cann_sim: Installation, tmp_path: Path) -> Callable[..., Ended]:
    """Give a function that runs a Python module, or code behind `-c`, on the simulator to its end."""

    def run(
        module: str,
        *arguments: str,
        plan: str = "",
        installation: Installation = cann_sim,
        timeout_s: float = TIMEOUT_S,
        with_torch: bool = False,
        **variables: str,
    ) -> Ended:
        folder = tmp_path / "report"
        folder.mkdir(exist_ok=True)
        environment = {
            **inherited(),
            **installation.environment({}),
            "CANN_SIM_PLAN": plan,
            "CANN_SIM_REPORT_DIR": str(folder),
            **variables,
        }
        output, errors = tmp_path / "output", tmp_path / "errors"
        with output.open("wb") as out, errors.open("wb") as err:
            if installation == cann_sim and (not with_torch or may_be_forked(plan, variables)):
                descriptors = out.fileno(), err.fileno()
                process: Any = template(cann_sim, with_torch).fork(
                    [module, *arguments], (), *descriptors, environment
                )
            else:
                command = [sys.executable, *([] if module == "-c" else ["-m"]), module, *arguments]
                process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=out, stderr=err)
            try:
                status = process.wait(timeout_s)
            finally:
                process.kill()
                process.wait()
        return Ended(status, output.read_text(), errors.read_text(), Report(folder))

    return run


def inherited() -> Mapping[str, str]:
    """What a Python needs; nothing that a CANN of this machine may have set."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    return {**kept, "PYTHONPATH": "protos:server:client", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def loaded_runtime(cann_sim: Installation) -> Runtime:
    """Give the simulator loaded into this process."""
    return Runtime(cann_sim)


@pytest.fixture
def runtime(loaded_runtime: Runtime) -> Iterator[Runtime]:
    """Give that simulator with device 0 set and no plan; afterwards nothing may be left alive."""
    runtime = loaded_runtime
    runtime.set_plan("")
    runtime.status("aclInit", None)
    runtime.call("aclrtSetDevice", 0)
    runtime.message()
    yield runtime
    runtime.set_plan("")
    runtime.call("aclrtResetDevice", 0)
    left = {name: runtime.counter(f"live.{name}") for name in LIVE}
    assert not any(left.values()), left
