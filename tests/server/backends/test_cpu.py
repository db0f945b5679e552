from __future__ import annotations

import numpy as np
import pytest

from npugrad import OPERATORS, OpRecord, Product
from npugrad.call import CallOptions
from npugrad.tolerance import compare
from npugrad_server.backends.base import DeviceCall
from npugrad_server.backends.cpu import CpuBackend
from npugrad_server.devices import parse_device


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
