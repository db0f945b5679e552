"""Step 1: describes the node, and checks that everything the service calls is there."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npugrad.ops import get_operator
from npugrad.products import product_from_soc
from npugrad.releases import CannRelease
from npugrad_server.acceptance.step import Step
from npugrad_server.acl.release import predating

if TYPE_CHECKING:
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog

_ALLOWED = re.compile(r"lib(opapi(_\w+)?|aclnn_\w+)\.so(\.\d+)*")
"""Libraries the operators may come from. Not ``libcust_opapi``: add-ons there take other layouts."""


def run(rig: Rig, out: StepLog) -> None:
    """Looks without the device first, because a device that does not open would hide what is missing."""
    out.progress(0, 2, "looking for CANN, torch_npu and their functions")
    with rig.trial("surroundings") as trial:
        found = trial.run({})
    out.check(
        "CANN and torch_npu are usable", not found["problems"], "no problem", _or_none(found["problems"])
    )
    _versions(rig, out, found)
    _chip(rig, out, found)
    excused = _functions(out, found)
    out.progress(1, 2, "opening the device")
    _device(rig, out, excused)


def _versions(rig: Rig, out: StepLog, found: Any) -> None:
    rows = [
        *found["packages"].items(),
        ("CANN", found.get("cann") or "of unknown version"),
        *found["installed"].items(),
        ("Python", f"{platform.python_implementation()} {platform.python_version()}"),
        ("operating system", f"{platform.platform()}, {_distribution()}"),
        *((name, value or "not set") for name, value in found["variables"].items()),
        ("device nodes", _or_none(found["device_nodes"])),
    ]
    out.table("Versions and places", ("what", "found"), rows)
    for note in found["notes"]:
        out.note(f"{note}.")
    if not any("driver" in path for path in found["installed"]):
        out.note("The driver's version file is not where its installer writes it.")
    if not found["device_nodes"] and not rig.settings.simulated:
        out.note("No device node /dev/davinci* is visible, though CANN finds devices.")


def _distribution() -> str:
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return "distribution unknown"
    names = [line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")]
    return names[0] if names else "distribution unknown"


def _chip(rig: Rig, out: StepLog, found: Any) -> None:
    soc, product = found.get("soc", ""), rig.settings.product
    if soc:  # CANN may not know it before a device is set
        out.check("the chip is one of the product", product_from_soc(soc) is product, product, soc)


def _functions(out: StepLog, found: Any) -> set[str]:
    """Checks that every function is found; returns the operators that this CANN need not have."""
    functions = found.get("functions", ())
    rows = [(f["name"], f["operator"] or "runtime", f["library"] or f["missing"]) for f in functions]
    out.table("Functions and the library each comes from", ("function", "for", "library"), rows)
    out.note(f"Library layout: {found.get('layout')} ({', '.join(found.get('libraries', ()))}).")
    release = CannRelease.parse(found["cann"]) if found.get("cann") else None
    excused = {function["operator"] for function in functions if _predates(function["operator"], release)}
    for function in functions:
        if function["missing"]:
            excuse = _excuse(function, release)
            out.check(f"{function['name']} is there", bool(excuse), "found", function["missing"], excuse)
    for function in functions:
        name = Path(function["library"]).name
        if function["operator"] and name and not _ALLOWED.fullmatch(name):
            out.check(f"{function['name']} is CANN's own", False, "a library of CANN's operators", name)
    return excused


def _excuse(function: Any, release: CannRelease | None) -> str:
    """Returns why a function may be missing; empty if it may not."""
    if function["optional"]:
        return "optional for the service"
    if _predates(function["operator"], release):
        return f"CANN {release} predates the operator, so the service does not offer it"
    return ""


def _predates(operator: str, release: CannRelease | None) -> bool:
    return bool(operator and predating(release, get_operator(operator)))


def _device(rig: Rig, out: StepLog, excused: set[str]) -> None:
    seconds = rig.restart()
    ready, settings = rig.ready, rig.settings
    out.check("the device opens", True, "a worker that answers", f"{ready.description} in {seconds:.1f} s")
    out.check(
        "the worker agrees on whether CANN is simulated",
        ready.simulated == settings.simulated,
        settings.simulated,
        ready.simulated,
    )
    for record in rig.offered:
        if record.name in excused:
            continue
        reason = ready.unavailable.get(record.name, "")
        out.check(f"{record.name} answers a first, tiny call", not reason, "a result", reason or "a result")
    free = ready.memory_bytes or 0
    rows: list[tuple[str, Cell]] = [
        ("device", settings.device),
        ("what it is", ready.description),
        ("product", f"{settings.product} ({settings.product.full_name})"),
        ("free memory", f"{free} bytes ({free / 2**30:.1f} GiB)"),
        ("seconds until a worker was ready", round(seconds, 2)),
        ("streams", settings.streams),
    ]
    out.table("Device", ("what", "found"), rows)


def _or_none(words: list[str]) -> str:
    return "; ".join(words) or "none"


STEP = Step(
    1,
    "environment",
    "Environment",
    "Versions of everything, the chip, which library each function comes from, and a worker that opens it.",
    run,
    needs_device=False,
)
