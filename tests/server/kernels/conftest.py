"""The compiled kernels under test: every variant that this machine can run."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kernels.driven import DrivenKernels, driver_command

from npugrad_server.backends.cpu.kernels import LIBRARIES, Kernels, usable_variants

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "NPUGRAD_TEST_KERNELS"
"""Environment variable: folder of the libraries to test, such as those with a sanitizer."""
VARIANT = "NPUGRAD_TEST_KERNELS_VARIANT"
"""Environment variable: the variant to test, such as another machine's; without it all that run here."""
VARIANTS = (os.environ[VARIANT],) if os.environ.get(VARIANT) else usable_variants()
"""The best one first."""


def load_builder() -> Any:
    spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "server" / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def build_module() -> Any:
    return load_builder()


@pytest.fixture(scope="session")
def libraries(build_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of up-to-date libraries; skips without a compiler."""
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    try:
        build_module.find_compiler()
    except build_module.BuildError as error:
        pytest.skip(str(error))
    folder = LIBRARIES if os.access(LIBRARIES.parent, os.W_OK) else tmp_path_factory.mktemp("kernels")
    build_module.build(folder)
    return folder


# The others are the same sources under other flags.
@pytest.fixture(
    scope="session",
    params=[*VARIANTS[:1], *(pytest.param(one, marks=pytest.mark.deep) for one in VARIANTS[1:])],
)
def tested(request: pytest.FixtureRequest, libraries: Path) -> Path:
    """Library of each variant in turn, which only a driver may be able to load."""
    path = libraries / f"libnpugrad_kernels_{request.param}.so"
    if not path.is_file():
        pytest.skip(f"{path.name} was not built")
    return path


_OF_TASKS = re.compile(
    r"/test_pool\.py|-(large|4194304)\b|one_window_is_cut|of_several_waves|memory_does_not_grow"
)
"""Tests of how the threads share a call and of the memory it takes, which no instruction set changes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave later turns, and what is about tasks, to the best variant."""
    items[:] = [item for item in items if not _is_for_the_best(item)]


def _is_for_the_best(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    is_another = params.get("tested", VARIANTS[0]) != VARIANTS[0]
    return is_another and (bool(params.get("turn")) or _OF_TASKS.search(item.nodeid) is not None)


@pytest.fixture
def library(tested: Path) -> Path:
    """Library of each variant in turn, for this process to load."""
    if driver_command():
        pytest.skip("loads the library itself: only for one of this process")
    return tested


@pytest.fixture(scope="session")
def make_kernels(tested: Path) -> Iterator[Callable[[int], Kernels]]:
    """Kernels of the variant with so many threads; the same ones for the same number."""
    made: dict[int, Kernels] = {}

    def make(threads: int) -> Kernels:
        before = made.get(threads)
        if isinstance(before, DrivenKernels) and before.ended:
            del made[threads]  # a test that failed has said why
        if threads not in made:
            made[threads] = (DrivenKernels if driver_command() else Kernels)(threads, tested)
        return made[threads]

    yield make
    for kernels in made.values():
        if not (isinstance(kernels, DrivenKernels) and kernels.ended):
            kernels.close()


@pytest.fixture
def kernels(make_kernels: Callable[[int], Kernels]) -> Kernels:
    """Kernels of the variant with two threads."""
    return make_kernels(2)


@pytest.fixture
def has_kernel(request: pytest.FixtureRequest, kernels: Kernels) -> None:
    """Skips a test of an operator that has no kernel: the CPU runs its reference."""
    record = request.node.callspec.params["record"]
    if record.name not in kernels.operators:
        pytest.skip(f"{record.name} has no kernel")
