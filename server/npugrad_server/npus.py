"""Finds the NPUs of this host, with a short-lived process.

The front process runs it before it starts workers, to learn how many NPUs there are and of which product.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE_TIMEOUT_S = 60.0
"""Seconds after which a driver that does not answer counts as broken."""
_MAX_WORDS = 500

OP_INIT_MODE = "ACL_OP_INIT_MODE"
"""Variable that tells torch_npu when to start CANN's graph engine and TBE: 0 at once, 1 when one of their
operators is first called, 2 never. Nothing here calls one, so workers set it to `DEFAULT_OP_INIT_MODE`."""
DEFAULT_OP_INIT_MODE = "1"
_TBE_MODULES = {
    "absl": "absl-py",
    "attr": "attrs",
    "cffi": "cffi",
    "decorator": "decorator",
    "google.protobuf": "protobuf",
    "numpy": "numpy",
    "psutil": "psutil",
    "requests": "requests",
    "scipy": "scipy",
    "sympy": "sympy",
    "yaml": "PyYAML",
}
"""What TBE imports according to CANN's installation guide: module to package."""


@dataclass(frozen=True)
class NpuReport:
    """The NPUs that were found, and any problems.

    Attributes:
        count: Number of usable devices; 0 if anything is wrong with CANN or the driver.
        soc: Name of the chip; empty if unknown.
        cann: Version of CANN; empty if unknown.
        simulated: Whether CANN is the tests' simulation.
        problems: What is missing, each with what was tried.
        device_nodes: The driver's device files; if there are any, this is a host with NPUs, whatever the
            problems.
    """

    count: int = 0
    soc: str = ""
    cann: str = ""
    simulated: bool = False
    problems: tuple[str, ...] = ()
    device_nodes: tuple[str, ...] = field(default=())

    @property
    def usable_count(self) -> int | None:
        """Number of usable devices; None if `problems` rule out all of them."""
        return None if self.problems else self.count


def find_npus(timeout_s: float = PROBE_TIMEOUT_S, device_folder: Path = Path("/dev")) -> NpuReport:
    """Looks for NPUs in a separate process.

    The driver's device files are looked up in this process: even if the other one hangs or crashes, a host
    with NPUs must not be taken for one without.

    Args:
        timeout_s: Seconds until the other process counts as hung.
        device_folder: Folder of the driver's device files.
    """
    nodes = device_nodes(device_folder)
    command = [sys.executable, "-m", "npugrad_server.backends.npu.probe"]
    # In-memory files, not pipes: a process forked by a vendor library would keep pipes open.
    with open(os.memfd_create("answer"), "w+b") as answer, open(os.memfd_create("words"), "w+b") as said:
        try:
            done = subprocess.run(command, stdout=answer, stderr=said, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return NpuReport(
                problems=(f"the NPU driver did not answer within {timeout_s:g} s",), device_nodes=nodes
            )
        stdout, stderr = _text(answer), _text(said)
    try:
        found = json.loads(stdout)
    except ValueError:
        words = " ".join(stderr.split())[-_MAX_WORDS:]
        return NpuReport(
            problems=(f"the process that looks for NPUs exited with status {done.returncode}: {words}",),
            device_nodes=nodes,
        )
    return NpuReport(
        count=found["count"],
        soc=found["soc"],
        cann=found["cann"],
        simulated=found["simulated"],
        problems=tuple(found["problems"]),
        device_nodes=nodes,
    )


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def device_nodes(folder: Path = Path("/dev")) -> tuple[str, ...]:
    """Paths of the NPU driver's device files, sorted."""
    return tuple(sorted(str(path) for path in folder.glob("davinci*")))


def op_init_mode(environment: Mapping[str, str] = os.environ) -> str:
    """What to set `OP_INIT_MODE` to: the user's choice, else the default."""
    return environment.get(OP_INIT_MODE) or DEFAULT_OP_INIT_MODE


def op_init_problem(environment: Mapping[str, str] = os.environ) -> str:
    """What the graph engine and TBE lack to start with torch_npu; empty if nothing, or if they are not to.

    Without them, torch_npu fails with 500001 and hardly a reason.
    """
    mode = op_init_mode(environment)
    number = re.match(r"\s*([+-]?\d+)", mode)  # torch_npu treats a non-number as 0
    missing = [package for module, package in _TBE_MODULES.items() if not _is_there(module)]
    if not missing or (number is not None and int(number[1]) != 0):
        return ""
    return (
        f"{OP_INIT_MODE}={mode} has torch_npu start CANN's graph engine, which needs {', '.join(missing)}: "
        f"not installed; expected them, or {OP_INIT_MODE} not set"
    )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its parent package is missing, or half imported
        return False
