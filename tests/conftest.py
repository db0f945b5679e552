"""What every test run says about itself; fixtures live beside the tests that use them."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest
from hypothesis import HealthCheck, settings

# `make test` asks for the second by `--hypothesis-profile`; a test that says how many it needs has as many.
# How long an example takes is no matter of these tests: a busy machine is slow.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", unhurried, max_examples=150)
settings.register_profile("quick", unhurried, max_examples=30)
settings.load_profile("deep")

pytest_plugins = [
    "tests.fix_server",
    "tests.fix_tls",
    "tests.cann_sim.fixtures",
    "tests.fix_npu",
    "tests.summary",
]


# The objects of 25,000 tests come to stay: to look again and again whether they can go is a third of the
# time of their collection.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: at the end, all other processes would only wait for it."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, and only that of the tests."""
    gc.freeze()
    gc.enable()


def pytest_configure() -> None:
    """Take interrupts as a terminal's processes do: what a shell runs in the background ignores them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """About half of the time of a test goes into waiting, for processes, deadlines and service times."""
    return 2 * len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Put level and handlers back: a command that runs in this process takes them for itself."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


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
