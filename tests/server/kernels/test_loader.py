"""Which library is loaded, and what is said when there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.server.kernels.driven import driver_command

from npugrad import OPERATORS, Product
from npugrad_server.backends.cpu.backend import CpuBackend
from npugrad_server.backends.cpu.kernels import (
    SETTING,
    VARIANTS,
    Kernels,
    KernelsUnavailable,
    cpu_flags,
    find_library,
    usable_variants,
)
from npugrad_server.devices import parse_device

pytestmark = pytest.mark.skipif(
    bool(driver_command()), reason="loads libraries itself: only for those of this process"
)
AVX2 = frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2"])
AVX512 = AVX2 | frozenset(["avx512f", "avx512bw", "avx512dq", "avx512vl"])


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", AVX512, ("avx512", "avx2", "baseline")),
        ("x86_64", AVX512 - {"avx512vl"}, ("avx2", "baseline")),
        ("x86_64", AVX2 - {"f16c"}, ("baseline",)),
        ("aarch64", frozenset({"fp", "asimd"}), ("neon",)),
        ("riscv64", frozenset(), ()),
    ],
)
def test_the_processor_decides_the_best_first(
    machine: str, flags: frozenset[str], expected: tuple[str, ...]
) -> None:
    assert usable_variants(machine, flags) == expected


def test_flags_come_from_the_kernel(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path) == frozenset()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\n")
    assert cpu_flags(tmp_path) == {"fpu", "avx2", "fma"}
    (tmp_path / "proc" / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(tmp_path) == {"fp", "asimd"}


def test_the_builder_and_the_loader_know_the_same_variants(build_module: object) -> None:
    built = getattr(build_module, "VARIANTS")  # noqa: B009
    assert {m: list(v) for m, v in built.items()} == {m: list(v) for m, v in VARIANTS.items()}


def test_a_library_says_which_variant_it_is(library: Path) -> None:
    kernels = Kernels(1, library)
    assert f"_{kernels.variant}.so" in library.name
    assert kernels.compiler.startswith(("GCC", "Clang"))
    assert "group_norm_backward" in kernels.operators
    kernels.close()


def test_the_environment_chooses(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in usable_variants():
        monkeypatch.setenv(SETTING, variant)
        assert find_library(libraries).name == f"libnpugrad_kernels_{variant}.so"
    monkeypatch.delenv(SETTING)
    assert find_library(libraries).name == f"libnpugrad_kernels_{usable_variants()[0]}.so"
    monkeypatch.setenv(SETTING, "sse9")
    with pytest.raises(KernelsUnavailable, match=f"found {SETTING}=sse9; expected {usable_variants()[0]}"):
        find_library(libraries)


def test_the_next_best_library_is_taken_where_one_is_missing(libraries: Path, tmp_path: Path) -> None:
    last = usable_variants()[-1]
    shutil.copy(libraries / f"libnpugrad_kernels_{last}.so", tmp_path)
    assert find_library(tmp_path).parent == tmp_path


def test_a_missing_or_broken_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    with pytest.raises(KernelsUnavailable, match="not built for"):
        find_library(tmp_path)
    elsewhere = tmp_path / "libnpugrad_kernels_riscv.so"
    elsewhere.write_bytes(b"")
    with pytest.raises(
        KernelsUnavailable, match="installed for another processor: found kernels for riscv; "
    ):
        find_library(tmp_path)
    broken = tmp_path / f"libnpugrad_kernels_{usable_variants()[0]}.so"
    broken.write_bytes(b"no library")
    with pytest.raises(KernelsUnavailable, match=f"{broken.name} cannot be loaded"):
        Kernels(1, find_library(tmp_path))


def test_the_backend_names_the_variant(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    for variant in usable_variants():
        monkeypatch.setenv(SETTING, variant)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        backend = CpuBackend()
        backend.open(parse_device("cpu:0"), Product.ATLAS_A2, 1)
        assert backend.name == "cpu"
        assert backend.description.startswith(f"host CPU, compiled kernels ({variant}), 3 threads")
        backend.close()


def test_the_backend_says_why_it_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    backend = CpuBackend({"group_norm_backward": OPERATORS["group_norm_backward"]})
    backend.open(parse_device("cpu:0"), Product.ATLAS_A2, 1)
    assert (backend.name, backend.simulated) == ("cpu-reference", False)
    assert backend.description == (
        "host CPU, NumPy reference in float64, 3 threads for linear algebra; "
        f"no compiled kernels: {SETTING}=none"
    )
    backend.close()
