"""A node's NPU software: versions, which library has which function, device nodes.

CANN is loaded, but no device is set, and torch is not imported. The order is ignored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npugrad.ops import OPERATORS
from npugrad.releases import CannRelease
from npugrad_server.acl.launcher import Launcher
from npugrad_server.acl.libraries import Cann, Functions, LibraryError, Missing, origin
from npugrad_server.acl.release import installed_release, pairing
from npugrad_server.acl.runtime import Runtime
from npugrad_server.acl.symbols import operator_symbols
from npugrad_server.backends.base import DeviceUnusable
from npugrad_server.backends.npu.bringup import check_packages
from npugrad_server.backends.npu.trials.exchange import run_trial
from npugrad_server.npus import VISIBLE_DEVICES, device_nodes, node_problems, visibility

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLES = (
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "LD_LIBRARY_PATH",
    VISIBLE_DEVICES,
)
"""Environment variables that decide which CANN is found."""
_DRIVER_ROOTS = ("/usr/local/Ascend/driver", "/usr/local/Ascend/firmware")
_VERSION_FILES = ("version.info", "version.cfg", "ascend_toolkit_install.info")
_MOST_WORDS = 300


def surroundings() -> dict[str, Any]:
    """Versions, libraries, functions and device nodes."""
    found: dict[str, Any] = {
        "packages": {},
        "variables": {name: os.environ.get(name, "") for name in VARIABLES},
        "device_nodes": list(device_nodes()),
        "installed": dict(_installed()),
        "problems": [],
        "notes": [note for note in (visibility(), *node_problems()) if note],
    }
    try:
        found["packages"] = check_packages()
    except DeviceUnusable as error:
        found["problems"].append(str(error))
    try:
        found |= _cann(Cann())
        release = CannRelease.parse(found["cann"]) if found["cann"] else None
        found["notes"] += filter(None, [pairing(found["packages"].get("torch_npu", ""), release)])
    except LibraryError as error:
        found["problems"].append(str(error))
    return found


def _cann(cann: Cann) -> dict[str, Any]:
    runtime = Runtime(cann.runtime)
    return {
        "simulated": cann.simulated,
        "layout": cann.layout,
        "libraries": sorted(cann.libraries),
        "cann": str(installed_release(runtime) or ""),
        "soc": runtime.soc_name(),
        "functions": [*_functions(cann.runtime), *_functions(cann.tensors), *_operators(cann, runtime)],
    }


def _functions(functions: Functions, operator: str = "") -> Iterator[dict[str, Any]]:
    """Each function with the library that it really comes from, or why it is missing."""
    for name, function in functions.by_name.items():
        missing = isinstance(function, Missing)
        yield {
            "name": name,
            "library": origin(function),
            "missing": function.reason if missing else "",
            "optional": missing and function.symbol.optional,
            "operator": operator,
        }


def _operators(cann: Cann, runtime: Runtime) -> Iterator[dict[str, Any]]:
    launcher = Launcher(cann, runtime)
    for record in OPERATORS.values():
        names = (symbol.name for symbol in operator_symbols(record))
        yield from _functions(Functions(dict(zip(names, launcher.phases(record), strict=True))), record.name)


def _installed() -> Iterator[tuple[str, str]]:
    """Versions that the vendor's packages keep in files: (file, its lines about versions)."""
    homes = [os.environ.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    for root in dict.fromkeys((*filter(None, homes), *_DRIVER_ROOTS)):
        for name in _VERSION_FILES:
            for path in sorted({*Path(root).glob(name), *Path(root).glob(f"*/{name}")}):
                lines = _version_lines(path)
                if lines:
                    yield str(path), lines


def _version_lines(path: Path) -> str:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return "; ".join(line.strip() for line in text.splitlines() if "ersion" in line)[:_MOST_WORDS]


if __name__ == "__main__":
    run_trial(lambda order, folder: surroundings())
