from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from tests.derived import every_second
from tests.server.kernels.compare import outputs_for

from npugrad import OPERATORS, OpRecord, Product
from npugrad.call import CallOptions
from npugrad.coordinates import CoordinateRule
from npugrad.meta import CallMeta
from npugrad.tolerance import compare
from npugrad_server.backends.base import DeviceCall
from npugrad_server.backends.cpu import CpuBackend
from npugrad_server.backends.cpu.kernels import SETTING
from npugrad_server.devices import parse_device


class Watched:
    """A CPU backend that notes what computes: each entry into a reference, each kernel that did not refuse.

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
    """Give a backend with compiled kernels, where there are some, and one without."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "none":
            patch.setenv(SETTING, "none")
        made = Watched()
        if request.param == "kernels" and made.backend.name != "cpu":
            pytest.skip("no compiled kernels here")
        yield made
        made.backend.close()


@pytest.mark.parametrize("layout", ["contiguous", "strided", "expanded"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_each_call_says_what_computed_it(watched: Watched, record: OpRecord, dtype: str, layout: str) -> None:
    """Also of a type that no kernel takes."""
    call, inputs = record.build(dtype=dtype), {}
    for name, array in record.make_inputs(call, np.random.default_rng(0)).items():
        inputs[name] = array
        if array is not None and layout != "contiguous":
            one = array[(slice(0, 1),) * array.ndim]
            inputs[name] = every_second(array) if layout == "strided" else np.broadcast_to(one, array.shape)
    watched.entries.clear()
    made = DeviceCall(call, inputs, outputs_for(record, call), CallOptions(), 0)
    timings = watched.backend.run(watched.record(record), made)
    assert watched.entries == [timings.backend or watched.backend.name]
    takes = watched.backend._kernels is not None and record.name in watched.backend._kernels.operators
    assert watched.entries == ["cpu" if takes and dtype != "float64" else "cpu-reference"]


def test_operands_between_elements_are_copied_first() -> None:
    record = OPERATORS["group_norm_backward"]
    call = record.build(n=2, c=6, hxw=40, group=2)
    inputs = dict(record.make_inputs(call, np.random.default_rng(0)))
    memory = np.zeros(4 * 2 * 6 * 40 + 1, np.uint8)
    moved = memory[1:].view(np.float32).reshape(call.tensor("input").shape)
    moved[...] = inputs["input"]
    assert not moved.flags.aligned
    backend = CpuBackend()
    backend.open(parse_device("cpu:0"), call.product, 1)
    found = []
    for one in (inputs, {**inputs, "input": moved}):
        outputs = {
            name: np.empty(wanted.shape, wanted.dtype.numpy)
            for name, wanted in record.infer(call).items()
            if wanted is not None
        }
        backend.run(record, DeviceCall(call, one, outputs, CallOptions(), 0))
        found.append({name: array.tobytes() for name, array in outputs.items()})
    backend.close()
    assert found[0] == found[1]


def shifted(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array between the elements of its memory."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_what_is_kept_between_calls_changes_no_bit(record: OpRecord, layout: str) -> None:
    call = record.build()
    backend = CpuBackend()
    backend.open(parse_device("cpu:0"), call.product, 1)
    memo: dict[Any, Any] = {}
    for turn in range(4):
        move = shifted if turn == 2 else np.copy
        inputs = {
            name: None if array is None else move(array) if layout == "contiguous" else every_second(array)
            for name, array in record.make_inputs(call, np.random.default_rng(turn)).items()
        }
        found = []
        for kept in (memo, {}):
            outputs = outputs_for(record, call)
            backend.run(record, DeviceCall(call, inputs, outputs, CallOptions(), 0, memo=kept))
            found.append({name: array.tobytes() for name, array in outputs.items()})
        assert found[0] == found[1]
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_writes_every_element_of_its_outputs(record: OpRecord) -> None:
    call = next(iter(record.samples(Product.ATLAS_A2))).call
    inputs = record.make_inputs(call, np.random.default_rng(1))
    found = []
    for pattern in (0x00, 0xA5):
        outputs = {
            name: np.frombuffer(bytearray([pattern]) * wanted.nbytes, wanted.dtype.numpy).reshape(
                wanted.shape
            )
            for name, wanted in record.infer(call).items()
            if wanted is not None
        }
        backend = CpuBackend()
        backend.open(parse_device("cpu:0"), call.product, 1)
        timings = backend.run(record, DeviceCall(call, inputs, outputs, CallOptions(), 0))
        backend.close()
        assert timings.run_s > 0
        found.append({name: array.tobytes() for name, array in outputs.items()})
    assert found[0] == found[1]
    for name, array in outputs.items():
        golden = {name: np.empty(array.shape, np.float64)}
        record.reference(inputs, call.attrs, golden)
        assert compare(golden[name], array, record.extra_tolerance(inputs, call.attrs, name)).ok


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
    backend = CpuBackend()
    backend.open(parse_device(f"cpu:0?coordinates={setting}"), call.product, 1)
    outputs = outputs_for(record, call)
    backend.run(record, DeviceCall(call, inputs, outputs, CallOptions(), 0))
    backend.close()
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
