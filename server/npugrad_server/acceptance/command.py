"""The acceptance from its options to its exit code."""

from __future__ import annotations

import os
import platform
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import npugrad
from npugrad.products import Product, product_from_soc
from npugrad.releases import CannRelease
from npugrad_server.acceptance.bundle import Bundle
from npugrad_server.acceptance.console import AcceptanceConsole
from npugrad_server.acceptance.html import render
from npugrad_server.acceptance.limits import Limits
from npugrad_server.acceptance.node import collect, log_folders
from npugrad_server.acceptance.report import Report, StepReport
from npugrad_server.acceptance.rig import BenchSettings, Rig
from npugrad_server.acceptance.runner import run_steps
from npugrad_server.config import ServerSettings
from npugrad_server.start_checks import StartError, npu_report, pool_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from npugrad_server.acceptance.step import Step
    from npugrad_server.npus import NpuReport

QUICK_S = 150.0
"""Seconds after which a quick acceptance starts no further step and ends the running one."""


@dataclass(frozen=True)
class AcceptanceOptions:
    """What to accept, and how thoroughly.

    Attributes:
        device: Number of the NPU.
        report: JSON file to write. An HTML page with the suffix ``.html`` goes next to it, and what workers
            and libraries print goes into a file with ``.log``.
        steps: Steps to run.
        soak_s: Seconds of the soak.
        product: Product, which must be the NPU's, or ``"auto"`` to ask the NPU.
        streams: Calls that run at once.
        step_limit_s: Seconds that a step may take; the soak may take `soak_s` more.
        quick: Whether to skip what takes long, and to end within `QUICK_S`.
        bundle: File for everything that explains a failure; None for none.
        left_out: What the chosen steps leave out, in sentences.
    """

    device: int
    report: Path
    steps: tuple[Step, ...]
    soak_s: float = 600.0
    product: str = "auto"
    streams: int = 2
    step_limit_s: float = 1800.0
    quick: bool = False
    bundle: Path | None = None
    left_out: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """The JSON file, the HTML page and the log."""
        return self.report, self.report.with_suffix(".html"), self.report.with_suffix(".log")


def accept(options: AcceptanceOptions) -> bool:
    """Runs and shows the steps, and writes the report, and the bundle if there is one, after each.

    If the NPU cannot be used, only what can be checked without it is checked.

    Returns:
        Whether all passed.

    Raises:
        OSError: A report or the bundle cannot be written.
    """
    until_s = time.monotonic() + QUICK_S if options.quick else None
    with ExitStack() as stack:
        limits = stack.enter_context(Limits(options.step_limit_s, until_s))
        bundle = None
        if options.bundle is not None:
            bundle = stack.enter_context(Bundle(options.bundle, log_folders()))
            with bundle.stage("node"):
                collect(bundle)
        with bundle.stage("find the NPUs") if bundle else nullcontext():
            found, settings, problems = _look(options)
        report = Report(
            npugrad.__version__,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            found.simulated,
            _environment(options, settings.product, found),
            left_out=options.left_out,
        )
        return run_and_report(options, settings, report, limits=limits, bundle=bundle, problems=problems)


def _look(options: AcceptanceOptions) -> tuple[NpuReport, BenchSettings, tuple[str, ...]]:
    """Returns what the node reports, the settings of the rig, and why the NPU cannot be used, if so."""
    wanted = ServerSettings.model_validate(
        {
            "devices": f"npu:{options.device}",
            "product": options.product,
            "streams_per_device": options.streams,
        }
    )
    found, problems = npu_report(wanted), tuple[str, ...]()
    product = product_from_soc(found.soc) or Product.ATLAS_A2
    try:
        product = pool_settings(wanted, found).product
    except StartError as error:
        problems = error.problems
    settings = BenchSettings(
        device=f"npu:{options.device}",
        product=product,
        streams=options.streams,
        release=CannRelease.parse(found.cann) if found.cann else None,
        soak_s=options.soak_s,
        simulated=found.simulated,
        rung_limit_s=min(BenchSettings.rung_limit_s, options.step_limit_s),
        quick=options.quick,
    )
    return found, settings, problems


def _environment(options: AcceptanceOptions, product: Product, found: NpuReport) -> dict[str, str]:
    return {
        "device": f"npu:{options.device}, one of {found.count}",
        "chip": found.soc,
        "product": f"{product} ({product.full_name})",
        "CANN": found.cann or "of unknown version",
        **{name: _version(name) for name in ("torch", "torch_npu")},
        "npugrad": npugrad.__version__,
        "Python": platform.python_version(),
        "host": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "streams": str(options.streams),
        "soak": f"{options.soak_s:g} s",
    }


def _version(package: str) -> str:
    """Returns a package's version without importing it: this process must not load torch."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def run_and_report(
    options: AcceptanceOptions,
    settings: BenchSettings,
    report: Report,
    *,
    limits: Limits | None = None,
    bundle: Bundle | None = None,
    problems: Sequence[str] = (),
) -> bool:
    """Runs and shows the chosen steps on a new rig, and writes the report after each.

    Args:
        options: Steps and files.
        settings: The device.
        report: What is known before the steps.
        limits: Ends steps from outside; none by default.
        bundle: Receives the report, and the data of failures.
        problems: Why the device cannot be used, if it cannot.

    Returns:
        Whether all passed.

    Raises:
        OSError: A report or the bundle cannot be written.
    """
    json_path, html_path, log_path = options.files
    _write(options, report, bundle)  # a missing folder must fail now, not after the soak
    with AcceptanceConsole() as console:
        if report.simulated:
            console.say_simulated()
        console.say_problems(problems)
        console.say_environment(report)
        with _stderr_to(log_path), Rig(settings) as rig:
            if limits is not None:
                limits.abandon = rig.abandon
                limits.begin()
            gone = "; ".join(problems)
            for step in run_steps(rig, options.steps, console, limits=limits, keeper=bundle, gone=gone):
                report = replace(report, steps=(*report.steps, step))
                if bundle is not None:
                    bundle.took(f"step {step.number} {step.key}", step.seconds, step.outcome)
                _write(options, report, bundle)
            if limits is not None:
                limits.ignore()
        _write(options, report, bundle)  # with what workers added to the log when they ended
        written = (json_path, html_path, log_path, *([options.bundle] if options.bundle else []))
        console.say_end(report, written)
        if report.simulated:
            console.say_simulated()
    return report.ok


def _write(options: AcceptanceOptions, report: Report, bundle: Bundle | None) -> None:
    """Writes the report; steps yet to run count as skipped, so that a part never passes for the whole."""
    json_path, html_path, _ = options.files
    whole = replace(report, steps=(*report.steps, *_to_come(options, report)))
    json_path.write_text(whole.to_json(), encoding="utf-8")
    html_path.write_text(render(whole), encoding="utf-8")
    if bundle is not None:
        for path in options.files:
            bundle.add_file(f"report{path.suffix}", path)
        bundle.write()


def _to_come(options: AcceptanceOptions, report: Report) -> Iterator[StepReport]:
    done = {step.number for step in report.steps}
    for step in options.steps:
        if step.number not in done:
            yield StepReport(step.number, step.key, step.title, "skipped", 0.0, error="not run, or not yet")


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Redirects standard error of this process and its children to a file in a block.

    Workers and vendor libraries print there, which would garble the progress display.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("wb") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
