from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from tests.calls import cpu_results
from tests.derived import every_second, smaller, told
from tests.server.kernels.compare import assert_right, contents, outputs_for

from npugrad import OPERATORS, OpRecord, Product, get_operator
from npugrad.agreement import agreement
from npugrad.call import CallOptions
from npugrad.coordinates import CoordinateRule
from npugrad.meta import CallMeta
from npugrad.tolerance import compare
from npugrad_server.backends.base import DeviceCall
from npugrad_server.backends.cpu import CpuBackend
from npugrad_server.backends.cpu.kernels import SETTING
from npugrad_server.backends.cpu.torch import SETTING as NO_TORCH
from npugrad_server.backends.cpu.torch import Torch
from npugrad_server.devices import parse_device


class Watched:
    """A CPU backend that notes what computes: references, and kernels and PyTorch where they did not refuse.

    Attributes:
        backend: It, opened.
        entries: What it would call each as its backend.
    """

    def __init__(self) -> None:
        self.backend, self.entries = CpuBackend(), list[str]()
        self.backend.open(parse_device("cpu:0"), Product.ATLAS_A2, 1)
        bound: dict[str, Any] = self.backend._kernels._bound if self.backend._kernels else {}
        for name, kernel in bound.items():
            bound[name] = replace(kernel, run=self._noting(kernel.run))
        found: Any = self.backend._torch
        run = found.run

        def noting(*arguments: Any) -> bool:
            self.entries += ["cpu-torch"] if (ran := run(*arguments)) else []
            return bool(ran)

        found.run = noting

    def _noting(self, run: Any) -> Any:
        def noting(context: Any, address: Any) -> int:
            status = int(run(context, address))
            self.entries += [] if status else ["cpu"]
            return status

        return noting

    def record(self, record: OpRecord) -> OpRecord:
        """The record with a reference that is noted."""

        def noting(inputs: Any, attrs: Mapping[str, Any], outputs: Any) -> None:
            self.entries.append("cpu-reference")
            record.reference(inputs, attrs, outputs)

        return replace(record, reference=noting)


@pytest.fixture(scope="module", params=["kernels", "none"])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    """Give a backend with compiled kernels, where there are some, and one with neither these nor PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "none":
            patch.setenv(SETTING, "none")
            patch.setenv(NO_TORCH, "off")
        made = Watched()
        if request.param == "kernels" and made.backend.name != "cpu":
            pytest.skip("no compiled kernels here")
        yield made
        made.backend.close()


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_each_call_says_what_computed_it(watched: Watched, record: OpRecord) -> None:
    """Also of a type that no kernel takes."""
    layouts = ("contiguous", "strided", "expanded")
    for dtype, layout in itertools.product(("float32", "float16", "bfloat16", "float64"), layouts):
        call, inputs = smaller(record, 2).call(dtype), {}
        for name, array in record.make_inputs(call, np.random.default_rng(0)).items():
            inputs[name] = array
            if array is not None and layout != "contiguous":
                one = array[(slice(0, 1),) * array.ndim]
                expanded = np.broadcast_to(one, array.shape)
                inputs[name] = every_second(array) if layout == "strided" else expanded
        watched.entries.clear()
        timings = watched.backend.run(watched.record(record), made(record, call, inputs)[0])
        kernels = watched.backend._kernels
        takes = kernels is not None and record.name in kernels.operators
        by_torch = kernels is not None and Torch.has(record) and record.binding and record.binding.takes(call)
        with told((dtype, layout)):
            assert watched.entries == [timings.backend or watched.backend.name]
            # Kernels take float64 where the documents have it.
            takes &= dtype != "float64" or dtype in record.inputs[0].dtypes[Product.ATLAS_A2]
            assert watched.entries == ["cpu" if takes else "cpu-torch" if by_torch else "cpu-reference"]


def made(
    record: OpRecord, call: CallMeta, inputs: Mapping[str, Any], pattern: int = 0xA5, **changes: Any
) -> tuple[DeviceCall, dict[str, npt.NDArray[Any]]]:
    """A call as a worker makes it, and its outputs, filled with a pattern."""
    outputs = outputs_for(record, call, pattern)
    return DeviceCall(call, inputs, outputs, CallOptions(), 0, **changes), outputs


@contextmanager
def opened(device: str = "cpu:0") -> Iterator[CpuBackend]:
    """Give a backend whose device is open."""
    with closing(CpuBackend()) as backend:
        backend.open(parse_device(device), Product.ATLAS_A2, 1)
        yield backend


def test_operands_between_elements_are_copied_first() -> None:
    record = OPERATORS["group_norm_backward"]
    call = record.build(n=2, c=6, hxw=40, group=2)
    inputs = dict(record.make_inputs(call, np.random.default_rng(0)))
    array = inputs["input"]
    assert array is not None
    moved = shifted(array)
    assert not moved.flags.aligned
    found = []
    with opened() as backend:
        for one in (inputs, {**inputs, "input": moved}):
            device_call, outputs = made(record, call, one)
            backend.run(record, device_call)
            found.append(contents(outputs))
    assert found[0] == found[1]


def shifted(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array between the elements of its memory."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_what_is_kept_between_calls_changes_no_bit(record: OpRecord) -> None:
    call = smaller(record, 2).call()
    layouts: list[list[Callable[..., Any]]] = [[np.copy, np.copy, shifted, np.copy], [every_second] * 4]
    with opened() as backend:
        for moves in layouts:
            memo: dict[Any, Any] = {}
            for turn, move in enumerate(moves):
                arrays = record.make_inputs(call, np.random.default_rng(turn))
                inputs = {name: None if array is None else move(array) for name, array in arrays.items()}
                found = []
                for kept in (memo, {}):
                    device_call, outputs = made(record, call, inputs, memo=kept)
                    backend.run(record, device_call)
                    found.append(contents(outputs))
                assert found[0] == found[1], (turn, move)


@pytest.mark.slow
@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_writes_every_element_of_its_outputs(record: OpRecord) -> None:
    call = next(iter(record.samples(Product.ATLAS_A2))).call
    inputs = record.make_inputs(call, np.random.default_rng(1))
    found = []
    with opened() as backend:
        for pattern in (0x00, 0xA5):
            device_call, outputs = made(record, call, inputs, pattern)
            assert backend.run(record, device_call).run_s > 0
            found.append(contents(outputs))
    assert found[0] == found[1]
    assert_right(record, call, inputs, outputs)


@pytest.mark.parametrize("variant", ["kernels", "none"])
@pytest.mark.parametrize("setting", ["float32", "float64"])
@pytest.mark.parametrize("name", [name for name, record in OPERATORS.items() if record.references_by_rule])
def test_coordinates_follow_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str, setting: str, variant: str
) -> None:
    """On pixels' edges the rule that is asked for explains the result, and the other one does not."""
    if variant == "none":
        monkeypatch.setenv(SETTING, "none")
    record = OPERATORS[name]
    call, inputs = on_edges(record)
    device_call, outputs = made(record, call, inputs)
    with opened(f"cpu:0?coordinates={setting}") as backend:
        backend.run(record, device_call)
        assert ("coordinates in float64" in backend.description) == (setting == "float64")
    agrees = {}
    for rule in (next(iter(record.references_by_rule)), CoordinateRule.FLOAT64):
        golden = {key: np.empty(array.shape) for key, array in outputs.items()}
        record.references_by_rule[rule](inputs, call.attrs, golden)
        agrees[rule is CoordinateRule.FLOAT64] = all(compare(golden[key], outputs[key]).ok for key in golden)
    assert agrees == {setting == "float64": True, setting != "float64": False}


def on_edges(record: OpRecord) -> tuple[CallMeta, dict[str, Any]]:
    """A call whose sampling points all lie where a float32 says that a pixel's centre is."""
    size = 49
    centres = (2 * np.arange(size) + 1) / size
    if record is OPERATORS["multi_scale_deformable_attention_grad"]:
        call = record.build(bs=1, nq=size, nh=1, levels=((1, size),), points=1)
        inputs = dict(record.make_inputs(call, np.random.default_rng(3)))
        cast("npt.NDArray[Any]", inputs["location"])[0, :, 0, 0, 0] = np.stack(
            (centres / 2, np.full(size, 0.5)), -1
        )
        return call, inputs
    depth = {"d": 1, "od": 1} if "3d" in record.name else {}
    call = record.build(n=1, c=4, h=1, w=size, oh=1, ow=size, **depth)
    inputs = dict(record.make_inputs(call, np.random.default_rng(3)))
    grid = cast("npt.NDArray[Any]", inputs["grid"])
    grid[...] = 0
    grid[..., 0] = centres - 1
    return call, inputs


@pytest.mark.parametrize("factor", [1.0, 1.125])
def test_sums_of_large_terms_that_cancel_each_other_are_judged_by_what_float32_can_do(factor: float) -> None:
    record = get_operator("grid_sampler_3d_backward")
    call = record.build(n=1, c=8, d=5, h=6, w=7, od=4, oh=4, ow=4)
    inputs = dict(record.make_inputs(call, np.random.default_rng(0)))
    inputs["input"] = np.asarray(inputs["input"]) + np.float32(1e4)
    inputs["grid"] = np.zeros_like(np.asarray(inputs["grid"]))
    results = cpu_results(record, call, inputs, record.infer(call))
    results["grid_grad"] *= np.float32(factor)
    assert agreement(record, inputs, call.attrs, results).ok == (factor == 1.0)
