"""The driver gives the bits of this process, and finds what a wrong kernel does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.derived import told
from tests.server.kernels import arm
from tests.server.kernels.compare import assert_right, assert_same_bits, computed, outputs_for
from tests.server.kernels.conftest import ROOT
from tests.server.kernels.driven import DrivenKernels, build_driver, driver_command

from npugrad import get_operator
from npugrad_server.backends.cpu.kernels import Kernels, KernelUnsupported, usable_variants

pytestmark = pytest.mark.skipif(bool(driver_command()), reason="compares the driver with this process")
NORM = get_operator("group_norm_backward")

# A library whose one operator does what BODY says.
_WRONG = """
#include "server/kernels/abi.h"
static int32_t run(npugrad_context*, const npugrad_call* call) { BODY; return 0; }
static const npugrad_operator table[] = {{"group_norm_backward", run, 31}};
extern "C" {
int32_t npugrad_abi_version(void) { return NPUGRAD_ABI_VERSION; }
const char* npugrad_variant(void) { return "wrong"; }
const char* npugrad_compiler(void) { return "none"; }
const npugrad_operator* npugrad_operators(int32_t* count) { *count = 1; return table; }
npugrad_context* npugrad_open(int32_t, int64_t, int32_t) { return (npugrad_context*)table; }
void npugrad_close(npugrad_context*) {}
int32_t npugrad_threads(npugrad_context*) { return 1; }
}
"""


@pytest.fixture(scope="module")
def compiler(build_module: Any) -> list[str]:
    try:
        return list(build_module.find_compiler())
    except build_module.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def driver(compiler: list[str]) -> Path:
    return build_driver(ROOT / "build" / "kernels-driver" / "driver", compiler)


@pytest.fixture(scope="module")
def driven(driver: Path, libraries: Path) -> Iterator[DrivenKernels]:
    """Kernels of the best variant, in a process of their own."""
    library = libraries / f"libnpugrad_kernels_{usable_variants()[0]}.so"
    kernels = DrivenKernels(2, library, command=[str(driver)])
    yield kernels
    kernels.close()


def test_it_gives_the_bits_of_this_process(driven: DrivenKernels, libraries: Path) -> None:
    with closing(Kernels(2, libraries / f"libnpugrad_kernels_{driven.variant}.so")) as here:
        assert (driven.compiler, driven.operators, driven.threads) == (here.compiler, here.operators, 2)
        assert driven.operators
        for record in map(get_operator, driven.operators):
            call = record.build()
            inputs = record.make_inputs(call, np.random.default_rng(0))
            with told(record.name):
                for name in inputs:
                    assert driven.takes_strides(record, name) == here.takes_strides(record, name), name
                assert_same_bits(computed(driven, record, call, inputs), computed(here, record, call, inputs))


def test_strides_refusals_and_callers_that_leave_get_through(driven: DrivenKernels) -> None:
    call = NORM.build(n=2, c=6, hxw=40, group=2)
    inputs = NORM.make_inputs(call, np.random.default_rng(1))
    spread = {**inputs, "mean": np.broadcast_to(np.float32(0.5), call.tensor("mean").shape)}
    assert_right(NORM, call, spread, computed(driven, NORM, call, spread))
    array = inputs["input"]
    assert array is not None
    with pytest.raises(KernelUnsupported):
        driven.run(NORM, {**inputs, "input": array.astype(np.float16)}, call.attrs, outputs_for(NORM, call))

    def gone() -> None:
        raise KeyError("nobody waits")

    with pytest.raises(KeyError, match="nobody waits"):
        driven.run(NORM, inputs, call.attrs, outputs_for(NORM, call), gone)
    assert_right(NORM, call, inputs, computed(driven, NORM, call, inputs))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("((float*)call->tensors[5]->data)[-1] = 0", "wrote beside a tensor"),
        ("((float*)call->tensors[7]->data)[call->tensors[7]->shape[0]] = 0", "wrote beside a tensor"),
        ("((float*)call->tensors[1]->data)[3] += 1", "wrote an operand"),
        ("__builtin_trap()", "the driver ended with -"),
        ("return 5", "status 5"),
    ],
)
def test_what_a_wrong_kernel_does_is_found(
    driver: Path, compiler: list[str], tmp_path: Path, body: str, message: str
) -> None:
    source, library = tmp_path / "wrong.cpp", tmp_path / "wrong.so"
    source.write_text(_WRONG.replace("BODY", body))
    subprocess.run([*compiler, "-shared", "-fPIC", f"-I{ROOT}", "-o", library, source], check=True)
    kernels = DrivenKernels(1, library, command=[str(driver)])
    call = NORM.build(n=1, c=2, hxw=4, group=1)
    inputs = NORM.make_inputs(call, np.random.default_rng(2))
    with pytest.raises(RuntimeError, match=message):
        kernels.run(NORM, inputs, call.attrs, outputs_for(NORM, call))
    if not kernels.ended:
        kernels.close()


def test_a_library_that_is_not_there_is_said(driver: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the driver ended with 3:\n.*nothing\.so"):
        DrivenKernels(1, tmp_path / "nothing.so", command=[str(driver)])


def test_without_an_emulator_it_is_said_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(arm, "OUT", tmp_path)
    with pytest.raises(arm.Missing, match="apt-get install qemu-user-static libc6-arm64-cross"):
        arm.find_emulator()
