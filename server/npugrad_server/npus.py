"""Finds the NPUs of this host, with a short-lived process.

The front process runs it before it starts workers, to learn how many NPUs there are and of which product.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE_TIMEOUT_S = 60.0
"""Seconds after which a driver that does not answer counts as broken."""
_MAX_WORDS = 500

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
"""Variable with the numbers of the devices that CANN shows to a process, up to the first other character."""
_SHARED_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
"""Device files that every process with an NPU needs, besides those of the cards."""
_CARD = re.compile(r"davinci\d+")

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
        notes: What may surprise, although the NPUs can be used.
        device_nodes: The driver's device files; if there are any, this is a host with NPUs, whatever the
            problems.
    """

    count: int = 0
    soc: str = ""
    cann: str = ""
    simulated: bool = False
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    device_nodes: tuple[str, ...] = ()

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
    nodes, closed = device_nodes(device_folder), node_problems(device_folder)
    found = _probed(timeout_s)
    if found.problems:
        return replace(found, problems=(*found.problems, *closed), device_nodes=nodes)
    return replace(found, notes=(*found.notes, *closed), device_nodes=nodes)


def _probed(timeout_s: float) -> NpuReport:
    command = [sys.executable, "-m", "npugrad_server.backends.npu.probe"]
    # In-memory files, not pipes: a process forked by a vendor library would keep pipes open.
    with open(os.memfd_create("answer"), "w+b") as answer, open(os.memfd_create("words"), "w+b") as said:
        try:
            done = subprocess.run(command, stdout=answer, stderr=said, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return NpuReport(problems=(f"the NPU driver did not answer within {timeout_s:g} s",))
        stdout, stderr = _text(answer), _text(said)
    try:
        found = json.loads(stdout)
    except ValueError:
        words = " ".join(stderr.split())[-_MAX_WORDS:]
        return NpuReport(
            problems=(f"the process that looks for NPUs exited with status {done.returncode}: {words}",)
        )
    return NpuReport(
        count=found["count"],
        soc=found["soc"],
        cann=found["cann"],
        simulated=found["simulated"],
        problems=tuple(found["problems"]),
        notes=tuple(found["notes"]),
    )


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def device_nodes(folder: Path = Path("/dev")) -> tuple[str, ...]:
    """Paths of the NPU driver's device files, sorted."""
    return tuple(sorted(str(path) for path in folder.glob("davinci*")))


def node_problems(folder: Path = Path("/dev")) -> tuple[str, ...]:
    """What keeps this process from the driver's device files; empty if nothing does, or if there are none.

    None is opened, as that could take a device; the rules of a container for devices count all the same.
    """
    cards = sorted(path for path in folder.glob("davinci*") if _CARD.fullmatch(path.name))
    shared = [folder / name for name in _SHARED_NODES]
    there = [*cards, *(path for path in shared if path.exists())]
    lacking = [str(path) for path in shared if path not in there] + [str(folder / "davinciN")] * (not cards)
    if not there:
        return ()
    problems = []
    if lacking:
        problems.append(
            f"found {', '.join(map(str, there))}, but not {', '.join(lacking)}; expected davinciN and "
            f"{', '.join(_SHARED_NODES)}, in a container too"
        )
    closed = defaultdict(list)
    for path in there:
        if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
            found = path.stat()
            closed[found.st_uid, found.st_gid, stat.filemode(found.st_mode)].append(str(path))
    groups = ", ".join(map(str, sorted({os.getegid(), *os.getgroups()})))
    problems += [
        f"{', '.join(paths)} cannot be opened by user {os.geteuid()} with groups {groups}: found owner "
        f"{uid}:{gid}, mode {mode}; expected a user or group that may read and write, and, in a container, "
        "that it is given these devices"
        for (uid, gid, mode), paths in closed.items()
    ]
    return tuple(problems)


def visibility(environment: Mapping[str, str] = os.environ) -> str:
    """How the environment hides devices and numbers the others; empty if it does not."""
    listed = environment.get(VISIBLE_DEVICES)
    if listed is None:
        return ""
    return (
        f"{VISIBLE_DEVICES}={listed!r} hides all devices that it does not list (ascending, commas only); "
        "npu:N counts the visible ones, from npu:0"
    )


def and_visibility(text: str) -> str:
    """A message about the devices found, and how the environment hides others, if it does."""
    return "; ".join(filter(None, (text, visibility())))


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
