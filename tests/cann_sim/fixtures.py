"""Simulators, built once a session, for tests of this folder and of anything that runs on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cann_sim.build import DEFAULT_CANN, Installation, Layout, build, find_torch_npu
from tests.cann_sim.report import HOST_OBJECTS, Report
from tests.cann_sim.runtime import Runtime

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
def install_cann_sim(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Installation]:
    """Give a function that builds an installation of a layout and version, each once."""
    if not shutil.which("g++"):
        pytest.skip("the simulator needs g++")
    made: dict[tuple[str, str], Installation] = {}
    objects = REPOSITORY / "build" / "cann_sim"  # kept between runs; names tell what they were made of

    def install(layout: Layout = "split", cann: str = DEFAULT_CANN) -> Installation:
        if (layout, cann) not in made:
            home = tmp_path_factory.mktemp(f"cann-{layout}-{cann}")
            made[layout, cann] = build(home, layout=layout, cann=cann, objects=objects)
        return made[layout, cann]

    return install


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


@pytest.fixture
def run_on_sim(cann_sim: Installation, tmp_path: Path) -> Callable[..., Ended]:
    """Give a function that runs a Python module's command on the simulator and waits for its end."""

    def run(
        *command: str,
        plan: str = "",
        installation: Installation = cann_sim,
        timeout_s: float = TIMEOUT_S,
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
        done = subprocess.run(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr, Report(folder))

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
