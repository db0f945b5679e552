"""What every test run says about itself; fixtures live beside the tests that use them."""

from __future__ import annotations

import signal
from importlib.metadata import PackageNotFoundError, version

pytest_plugins = [
    "tests.fix_server",
    "tests.fix_tls",
    "tests.cann_sim.fixtures",
    "tests.fix_npu",
    "tests.summary",
]


def pytest_configure() -> None:
    """Take interrupts as a terminal's processes do: what a shell runs in the background ignores them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Return the line that tells which libraries a report speaks of."""
    return "npugrad: " + ", ".join(
        f"{name} {_version(name)}" for name in ("grpcio", "protobuf", "numpy", "torch")
    )


def _version(name: str) -> str:
    """Return the installed version without importing the package: torch alone takes seconds."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
