"""What every test run says about itself; fixtures live beside the tests that use them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

pytest_plugins = ["tests.fix_server", "tests.fix_tls", "tests.cann_sim.fixtures", "tests.fix_npu"]


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
