"""End-to-end demo: starts a server, runs every operator on real input, checks, reports, stops."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from npugrad_client import Client
from npugrad_client._retry import INTERACTIVE
from npugrad_client.demo._cases import official_cases, realistic_cases
from npugrad_client.demo._report import Row, run_case, tables
from npugrad_client.demo._service import ServiceFailed as ServiceFailed
from npugrad_client.demo._service import ServiceMissing as ServiceMissing
from npugrad_client.demo._service import local_service, require_service

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npugrad_client import Tls

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "register_images.py"


def run_demo(
    targets: Sequence[str] | None = None,
    out: Path = Path("build/demo"),
    quick: bool = False,
    tls: Tls | None = None,
) -> int:
    """Runs the demo and prints its table.

    Args:
        targets: Addresses of running services; None starts one on loopback and stops it at the end.
        out: Folder for the registration's picture.
        quick: Leave out the largest shapes.
        tls: TLS settings with paths of files; None for no encryption.

    Returns:
        0 when every result is right and the registration succeeded, else 1.

    Raises:
        ServiceMissing: A service must be started, but is not installed.
    """
    console = Console(width=None if sys.stdout.isatty() else 200)
    started = time.monotonic()
    if targets is None:
        require_service()
        console.print("Starting the service on loopback ...")
    with _services(targets) as found, Client(found, tls=tls, retry=INTERACTIVE) as client:
        _introduce(console, client)
        rows = _run_all(console, client, quick)
        is_registered = _register(console, found, tls, out / "registration.png")
    for table in tables(rows):
        console.print(table)
    _explain(console, rows)
    is_right = all(row.is_right for row in rows) and is_registered
    right = sum(row.is_right for row in rows)
    console.print(f"{right} of {len(rows)} calls right, {time.monotonic() - started:.0f} s in all.")
    return 0 if is_right else 1


@contextmanager
def _services(targets: Sequence[str] | None) -> Iterator[list[str]]:
    """Yields the addresses of the services: those given, or that of one that runs during the block."""
    if targets is not None:
        yield list(targets)
        return
    with local_service("--metrics-listen", "") as address:
        yield [address]


def _introduce(console: Console, client: Client) -> None:
    info = client.server_info()
    devices = ", ".join(f"{d.name} ({d.description})" for d in info.devices)
    console.print(
        f"npugrad {info.version} at {client.target}, validating for {info.product}; devices: {devices}"
    )


def _run_all(console: Console, client: Client, quick: bool) -> list[Row]:
    cases = [*official_cases(), *realistic_cases(quick)]
    rows = []
    for number, case in enumerate(cases, 1):
        label = f"{case.record.name} {case.dtype}, {case.title}"
        with console.status(f"{number}/{len(cases)} {label}"):
            row = run_case(client, case)
        rows.append(row)
        verdict = "right" if row.is_right else "[bold red]WRONG[/]"
        console.print(f"  {number:2d}/{len(cases)} {label}: {verdict}, {row.wall_s:.2f} s", highlight=False)
    return rows


def _register(console: Console, targets: Sequence[str], tls: Tls | None, picture: Path) -> bool:
    if not EXAMPLE.exists():
        console.print(
            "Registration of two photographs: skipped, the example is part of the source tree only."
        )
        return True
    console.print("Registering two photographs with gradients from the service:")
    command = [sys.executable, str(EXAMPLE), *_connection(targets, tls), "--out", str(picture)]
    return subprocess.run(command, check=False).returncode == 0


def _connection(targets: Sequence[str], tls: Tls | None) -> list[str]:
    """The options with which the example connects in the same way."""
    options = [text for target in targets for text in ("--target", target)]
    if tls is not None:
        options.append("--tls")
        for name, path in (("ca", tls.ca), ("certificate", tls.certificate), ("key", tls.key)):
            options += [f"--tls-{name}", str(path)] if path is not None else []
    return options


def _explain(console: Console, rows: list[Row]) -> None:
    console.print(
        "Every result was compared with the float64 reference computed by the client.\n"
        "error: largest absolute error over the largest reference value, worst output of the call.\n"
        "of tolerance: share of the allowed error that was used; 100% is the limit.\n"
        "transfer: everything between client and operator."
    )
    if any(row.info.backend == "cpu-reference" for row in rows):
        console.print(
            "Rows marked cpu-reference were computed by the NumPy reference itself, so their error is\n"
            "rounding to the dtype only; the official values are the independent check."
        )
