"""Calls that PyTorch's operators compute on a CPU device, and those that they leave to the reference."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.derived import every_second
from tests.server.kernels.compare import assert_right, contents, outputs_for

from npugrad import OpRecord, Product, get_operator
from npugrad.binding import TorchBinding
from npugrad.call import CallOptions
from npugrad.meta import CallMeta
from npugrad_server.backends.base import CallAbandoned, DeviceCall
from npugrad_server.backends.canary import Canaries
from npugrad_server.backends.cpu import CpuBackend
from npugrad_server.backends.cpu import torch as cpu_torch
from npugrad_server.backends.cpu.kernels import COMPUTED, Kernels, KernelsUnavailable
from npugrad_server.backends.cpu.torch import SETTING, Torch, tensor
from npugrad_server.devices import parse_device

A2 = Product.ATLAS_A2
# Operators of other names, which no kernel computes.
LAYER_NORM = replace(get_operator("layer_norm_backward"), name="a_layer_norm")
GROUP_NORM = replace(get_operator("group_norm_backward"), name="a_group_norm")
RECORDS = {record.name: record for record in (LAYER_NORM, GROUP_NORM)}


@contextmanager
def opened(*records: OpRecord) -> Iterator[CpuBackend]:
    with closing(CpuBackend({record.name: record for record in records})) as backend:
        backend.open(parse_device("cpu:0"), A2, 1)
        yield backend


def read_only(array: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """The array in memory that no process can write, as a worker has its operands."""
    if array is None:
        return None
    descriptor = os.memfd_create("operand")
    os.write(descriptor, array.tobytes() or b"\0")
    memory = mmap.mmap(descriptor, max(array.nbytes, 1), prot=mmap.PROT_READ)
    os.close(descriptor)
    return np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)


def ran(
    backend: CpuBackend, record: OpRecord, call: CallMeta, inputs: dict[str, Any], **changes: Any
) -> tuple[str, dict[str, npt.NDArray[Any]]]:
    """What computed the call, and its results."""
    outputs = outputs_for(record, call, 0xA5)
    timings = backend.run(record, DeviceCall(call, inputs, outputs, CallOptions(), 0, **changes))
    return timings.backend or backend.name, outputs


def test_every_library_has_the_kernels_that_are_named() -> None:
    try:
        with closing(Kernels(1)) as kernels:
            assert set(kernels.operators) == COMPUTED
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_pytorch_computes_what_its_operator_takes(record: OpRecord) -> None:
    """Of all types, strided, with any mask, from memory that cannot be written; not where one is empty."""
    assert record.binding is not None
    with opened(record) as backend:
        for sample in record.samples(A2):
            inputs = record.make_inputs(sample.call, np.random.default_rng(0))
            if "one_of_one" in sample.name or "one_group" in sample.name:
                continue  # PyTorch's sums cancel there
            is_empty = any(meta is not None and not meta.size for meta in sample.call.inputs.values())
            by_torch = record.binding.takes(sample.call) and not is_empty
            found = []
            for move in (read_only, lambda a: None if a is None else every_second(a)):
                moved = {name: move(array) for name, array in inputs.items()}
                said, outputs = ran(backend, record, sample.call, moved)
                assert said == ("cpu-torch" if by_torch else "cpu-reference"), sample.name
                assert_right(record, sample.call, inputs, outputs)
                found.append(contents(outputs))
            assert found[0] == found[1], sample.name


def test_a_tensor_shares_the_memory_of_its_array_in_any_type() -> None:
    for name in ("float32", "bfloat16", "float64", "int8", "uint8", "int64", "bool"):
        dtype = tensor(torch, np.zeros((), bool)).dtype if name == "bool" else getattr(torch, name)
        memory = np.zeros((2, 3), LAYER_NORM.build(dtype="bfloat16").tensor("input").dtype.numpy)
        array = memory if name == "bfloat16" else np.zeros((2, 3), name)
        made = tensor(torch, array)
        made.fill_(1)
        assert (made.dtype, made.shape, array.tolist()) == (
            dtype,
            (2, 3),
            np.ones((2, 3), array.dtype).tolist(),
        )
        assert tensor(torch, array[:0]).shape == (0, 3)


def _bound(path: str = "aten.native_layer_norm_backward", **changes: Any) -> OpRecord:
    assert LAYER_NORM.binding is not None
    return replace(LAYER_NORM, binding=replace(LAYER_NORM.binding, path=path, **changes))


# A record whose operator fails, and what is said about it.
FAILING: dict[str, tuple[OpRecord, str]] = {
    "no kernel for the type": (
        _bound(made={p.name: lambda given, name=p.name: given[name].long() for p in LAYER_NORM.inputs}),
        "",
    ),
    "no such operator": (_bound("aten.none_such"), "AttributeError: "),
    "another shape": (
        _bound(results=(2, 1, 1)),
        "ValueError: grad_input: found shape [40]; expected [2, 3, 40]",
    ),
    "other arguments": (_bound(positional=("input",)), "RuntimeError: "),
}


@pytest.mark.parametrize("name", FAILING)
def test_the_reference_computes_where_pytorch_fails(name: str, caplog: pytest.LogCaptureFixture) -> None:
    record, said = FAILING[name]
    call = record.build(leading=(2, 3), normalized=(40,))
    inputs = record.make_inputs(call, np.random.default_rng(0))
    with opened(record) as backend, caplog.at_level(logging.WARNING):
        for _ in range(2):
            backend_name, outputs = ran(backend, record, call, inputs)
            assert backend_name == "cpu-reference"
            assert_right(record, call, inputs, outputs)
    expected = f"{record.name}: PyTorch's operator failed, and the reference computes such calls: {said}"
    assert [line[: len(expected)] for line in caplog.messages] == [expected] * bool(said)


def test_memory_that_is_lacking_is_said() -> None:
    record = _bound(made={"mean": lambda given: torch.empty(2**60, dtype=torch.uint8)})
    call = record.build()
    inputs = record.make_inputs(call, np.random.default_rng(0))
    with opened(record) as backend, pytest.raises(MemoryError, match="a_layer_norm: no memory for PyTorch's"):
        ran(backend, record, call, inputs)


def test_a_caller_who_leaves_during_the_import_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, goes_on = threading.Event(), threading.Event()
    imported = cpu_torch._imported

    def slowly(threads: int) -> Any:
        goes_on.wait()
        return imported(threads)

    def check_wanted() -> None:
        if asked.is_set():
            raise CallAbandoned
        asked.set()

    monkeypatch.setattr(cpu_torch, "_imported", slowly)
    call = LAYER_NORM.build()
    inputs = LAYER_NORM.make_inputs(call, np.random.default_rng(0))
    with opened(LAYER_NORM) as backend:
        with pytest.raises(CallAbandoned):
            ran(backend, LAYER_NORM, call, inputs, check_wanted=check_wanted)
        goes_on.set()
        assert ran(backend, LAYER_NORM, call, inputs)[0] == "cpu-torch"


def test_canaries_of_such_operators_wait_and_import_nothing() -> None:
    with opened(LAYER_NORM, GROUP_NORM, get_operator("layer_norm_backward")) as backend:
        canaries = Canaries(backend, A2)
        has_kernels = backend.name == "cpu"
        assert [len(canaries.first(rounds)) for rounds in (1, 2)] == [int(has_kernels), 3]
        assert canaries.first_wrong(2) is None
        imported = [backend._torch and backend._torch._module]
        call = LAYER_NORM.build()
        ran(backend, LAYER_NORM, call, LAYER_NORM.make_inputs(call, np.random.default_rng(0)))
        imported.append(backend._torch and backend._torch._module)
        assert imported == [None, torch]
        assert canaries.first_wrong(1) is None


def test_coordinates_are_never_left_to_pytorch() -> None:
    record = replace(get_operator("grid_sampler_2d_backward"), name="a_sampler")
    assert record.binding is not None
    assert not Torch.has(record)
    assert Torch.has(LAYER_NORM)
    assert not Torch.has(replace(LAYER_NORM, binding=TorchBinding("npu.npu_layer_norm_backward", ())))


def test_a_pytorch_that_does_not_fit_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Torch(1, []).trouble == ""
    (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    found = Torch(1, [str(tmp_path)])
    assert not found.is_found
    assert found.trouble.startswith(
        "it is not built for this Python: found _C.cpython-39-x86_64-linux-gnu.so; expected _C.cpython-"
    )
    monkeypatch.setenv(SETTING, "off")
    with opened(LAYER_NORM) as backend:
        assert backend.description.endswith("; no PyTorch: NPUGRAD_KERNELS_TORCH=off")
        call = LAYER_NORM.build()
        inputs = LAYER_NORM.make_inputs(call, np.random.default_rng(0))
        assert ran(backend, LAYER_NORM, call, inputs)[0] == "cpu-reference"


_PROGRAM = """
import logging
from dataclasses import replace
import numpy as np
from npugrad import Product, get_operator
from npugrad.call import CallOptions
from npugrad_server.backends.base import DeviceCall
from npugrad_server.backends.cpu import CpuBackend
from npugrad_server.devices import parse_device

logging.basicConfig(format="%(message)s")
record = replace(get_operator("layer_norm_backward"), name="a_layer_norm")
backend = CpuBackend({record.name: record})
backend.open(parse_device("cpu:0"), Product.ATLAS_A2, 1)
call = record.build()
inputs = record.make_inputs(call, np.random.default_rng(0))
outputs = {name: np.empty(meta.shape, meta.dtype.numpy) for name, meta in record.infer(call).items()}
for _ in range(2):
    print(backend.run(record, DeviceCall(call, inputs, outputs, CallOptions(), 0)).backend)
"""


def test_a_pytorch_that_cannot_be_imported_is_said_once(tmp_path: Path) -> None:
    """Its library is one of another ABI."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/_C.abi3.so").write_bytes(b"no library")
    (tmp_path / "torch/__init__.py").write_text("from torch import _C")
    path = os.pathsep.join((str(tmp_path), *filter(None, (os.environ.get("PYTHONPATH"), *sys.path))))
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True)
    assert done.stdout.split() == ["cpu-reference"] * 2, done.stderr
    assert done.stderr.count("PyTorch is not used on the CPU, as it cannot be imported: ImportError: ") == 1
