from __future__ import annotations

import os
from pathlib import Path

import pytest

from npugrad_server.machine import cpu_count, memory_bytes

HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
HOST_CPUS = len(os.sched_getaffinity(0))
MIB = 2**20


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write what the kernel would show of control groups; files lie under sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_without_control_groups_the_host_counts(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == HOST_BYTES
    assert cpu_count(tmp_path) == HOST_CPUS


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(
    ("text", "expected"), [("max\n", HOST_BYTES), ("1048576\n", MIB), (str(2**63 - 4096), HOST_BYTES)]
)
def test_container_sees_its_memory_limit_at_the_root(
    tmp_path: Path, name: str, text: str, expected: int
) -> None:
    assert memory_bytes(tree(tmp_path, "0::/\n", {name: text})) == expected


def test_second_version_takes_the_least_limit_up_to_the_root(tmp_path: Path) -> None:
    files = {
        "pod/box/memory.max": "max\n",
        "pod/memory.max": f"{100 * MIB}\n",
        "memory.max": f"{200 * MIB}\n",
        "pod/cpu.max": "100000 100000\n",
        "pod/box/cpu.max": "max 100000\n",
    }
    root = tree(tmp_path, "0::/pod/box\n", files)
    assert memory_bytes(root) == 100 * MIB
    assert cpu_count(root) == 1


def test_first_version_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    files = {
        "memory/pod/memory.limit_in_bytes": f"{50 * MIB}\n",
        "memory/x/memory.limit_in_bytes": f"{MIB}\n",
        "cpu/x/cpu.cfs_quota_us": "100000\n",
        "cpu/x/cpu.cfs_period_us": "100000\n",
    }
    root = tree(tmp_path, "4:cpu,cpuacct:/x\n3:memory:/pod\n", files)
    assert memory_bytes(root) == 50 * MIB
    assert cpu_count(root) == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000"}, HOST_CPUS),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu.max": "99900000 100000"}, HOST_CPUS),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, HOST_CPUS),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_processor_quota_counts_and_is_one_at_least_in_either_form(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert cpu_count(tree(tmp_path, "0::/\n" if "cpu.max" in files else "", files)) == expected
