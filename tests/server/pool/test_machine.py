from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from npugrad_server.pool import machine

if TYPE_CHECKING:
    from pathlib import Path

HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
HOST_CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    return tmp_path


def test_without_a_container_the_host_counts(cgroup: Path) -> None:
    assert machine.memory_bytes() == HOST_BYTES
    assert machine.cpu_count() == HOST_CPUS


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(
    ("text", "expected"), [("max\n", HOST_BYTES), ("1048576\n", 1 << 20), (str(2**63 - 4096), HOST_BYTES)]
)
def test_the_memory_limit_of_a_container_counts(cgroup: Path, name: str, text: str, expected: int) -> None:
    (cgroup / name).parent.mkdir(exist_ok=True)
    (cgroup / name).write_text(text)
    assert machine.memory_bytes() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", HOST_CPUS), ("100000 100000", 1), ("20000 100000", 1), ("99900000 100000", HOST_CPUS)],
)
def test_the_processor_quota_of_a_container_counts(cgroup: Path, text: str, expected: int) -> None:
    (cgroup / "cpu.max").write_text(text)
    assert machine.cpu_count() == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", HOST_CPUS), ("100000", 1)])
def test_the_older_form_of_the_quota_is_read(cgroup: Path, quota: str, expected: int) -> None:
    (cgroup / "cpu").mkdir()
    (cgroup / "cpu/cpu.cfs_quota_us").write_text(quota)
    (cgroup / "cpu/cpu.cfs_period_us").write_text("100000")
    assert machine.cpu_count() == expected
