"""The acceptance from its options to its exit code."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import npugrad
from npugrad.releases import CannRelease
from npugrad_server.acceptance.bench import Bench, BenchSettings
from npugrad_server.acceptance.console import AcceptanceConsole
from npugrad_server.acceptance.html import render
from npugrad_server.acceptance.report import Report, StepReport
from npugrad_server.acceptance.runner import run_steps
from npugrad_server.config import ServerSettings
from npugrad_server.preflight import npu_report, pool_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npugrad.products import Product
    from npugrad_server.acceptance.step import Step
    from npugrad_server.npus import NpuReport


@dataclass(frozen=True)
class AcceptanceOptions:
    """What is to be accepted, and how thoroughly.

    Attributes:
        device: Number of the NPU.
        report: JSON to write; a page of the same name with the ending ``.html`` goes beside it, and what
            workers and libraries print into one with ``.log``.
        steps: Steps to run.
        soak_s: Seconds of the soak.
        product: Product, or ``"auto"`` to ask the NPU, which it may only confirm.
        streams: Calls that run at once.
    """

    device: int
    report: Path
    steps: tuple[Step, ...]
    soak_s: float = 600.0
    product: str = "auto"
    streams: int = 2

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """JSON, page and log."""
        return self.report, self.report.with_suffix(".html"), self.report.with_suffix(".log")


def accept(options: AcceptanceOptions) -> bool:
    """Runs the steps, shows them and writes the report after each.

    Returns:
        Whether all passed.

    Raises:
        StartError: There is no such NPU, or what it needs is missing; the same words as of `check`.
        OSError: A report cannot be written.
    """
    settings = ServerSettings.model_validate(
        {
            "devices": f"npu:{options.device}",
            "product": options.product,
            "streams_per_device": options.streams,
        }
    )
    found = npu_report(settings)
    made = pool_settings(settings, found)
    bench_settings = BenchSettings(
        device=made.devices[0],
        product=made.product,
        streams=options.streams,
        release=CannRelease.parse(found.cann) if found.cann else None,
        soak_s=options.soak_s,
        simulated=found.simulated,
    )
    report = Report(
        npugrad.__version__,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        found.simulated,
        _environment(options, made.product, found),
    )
    return run_and_report(options, bench_settings, report)


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
    """Without an import: nothing of torch may come into this process."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def run_and_report(options: AcceptanceOptions, settings: BenchSettings, report: Report) -> bool:
    """Runs the chosen steps on a bench of its own, shows them and writes the report after each.

    Args:
        options: Steps and files.
        settings: The device.
        report: What is known before the steps.

    Returns:
        Whether all passed.

    Raises:
        OSError: A report cannot be written.
    """
    json_path, html_path, log_path = options.files
    _write(options, report)  # a folder that is missing is told now, not after the soak
    with AcceptanceConsole() as console:
        if report.simulated:
            console.say_simulated()
        console.say_environment(report)
        with _stderr_to(log_path), Bench(settings) as bench:
            for step in run_steps(bench, options.steps, console):
                report = replace(report, steps=(*report.steps, step))
                _write(options, report)
        console.say_end(report, (json_path, html_path, log_path))
        if report.simulated:
            console.say_simulated()
    return report.ok


def _write(options: AcceptanceOptions, report: Report) -> None:
    """Writes the report; steps still to come count as skipped, so that no part passes for the whole."""
    json_path, html_path, _ = options.files
    whole = replace(report, steps=(*report.steps, *_to_come(options, report)))
    json_path.write_text(whole.to_json(), encoding="utf-8")
    html_path.write_text(render(whole), encoding="utf-8")


def _to_come(options: AcceptanceOptions, report: Report) -> Iterator[StepReport]:
    done = {step.number for step in report.steps}
    for step in options.steps:
        if step.number not in done:
            yield StepReport(step.number, step.key, step.title, "skipped", 0.0, error="not run, or not yet")


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Standard error of this process and its children goes to a file for a block.

    Workers and vendor libraries print there what would tear the progress apart.
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
