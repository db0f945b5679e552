from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from npugrad import OPERATORS, Product
from npugrad.errors import DeviceError
from npugrad.operator import OpRecord
from npugrad.validation import validate_call
from npugrad_server.backends.base import DeviceCall, DeviceLost, Timings
from npugrad_server.backends.canary import Canaries, Canary, CanaryResult, canary_call
from npugrad_server.backends.test import TestBackend
from npugrad_server.devices import parse_device

A2 = Product.ATLAS_A2


@pytest.fixture
def opened() -> Iterator[list[TestBackend]]:
    """Gets the devices that a test opens, and closes them."""
    devices: list[TestBackend] = []
    yield devices
    for device in devices:
        with closing(device):
            pass


def device(opened: list[TestBackend], options: str) -> TestBackend:
    backend = TestBackend()
    backend.open(parse_device(f"test:0?{options}"), A2, 1)
    opened.append(backend)
    return backend


def run_reference(record: OpRecord, call: DeviceCall) -> Timings:
    record.reference(call.inputs, call.meta.attrs, call.outputs)
    return Timings()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("product", Product)
def test_a_device_with_limits_gets_a_legal_canary(name: str, product: Product) -> None:
    record = OPERATORS[name]
    if product in record.products:
        assert validate_call(record, canary_call(record, product, legal=True)).status == 0


@pytest.mark.parametrize("name", OPERATORS)
def test_a_canary_is_right_where_the_reference_computes_it_and_takes_little(name: str) -> None:
    canary = Canary(OPERATORS[name], A2, legal=False)
    assert canary.run(run_reference).result is CanaryResult.OK
    meta = canary_call(OPERATORS[name], A2, legal=False)
    assert sum(tensor.nbytes for tensor in meta.inputs.values() if tensor) < 64 * 1024


@pytest.mark.parametrize("name", OPERATORS)
def test_a_device_that_is_wrong_in_one_operator_is_wrong_in_its_canary_alone(
    opened: list[TestBackend], name: str
) -> None:
    canaries = Canaries(device(opened, f"compute=1&wrong={name}"), A2)
    found = [canaries.run(number) for number in range(len(canaries))]
    wrong = [each for each in found if each.result is not CanaryResult.OK]
    assert [(each.operator, each.result) for each in wrong] == [(name, CanaryResult.MISMATCH)]
    assert "outside tolerance: max relative error" in wrong[0].detail


def test_rounds_find_a_device_that_computes_wrongly_later(opened: list[TestBackend]) -> None:
    late = f"compute=1&wrong=any&right={2 * len(OPERATORS)}"
    assert Canaries(device(opened, late), A2).first_wrong(2) is None
    found = Canaries(device(opened, late), A2).first_wrong(3)
    assert found is not None
    assert found.operator == next(iter(OPERATORS))


def test_a_device_that_computes_nothing_has_no_canary(opened: list[TestBackend]) -> None:
    canaries = Canaries(device(opened, "ms=1"), A2)
    assert (len(canaries), canaries.first_wrong(1)) == (0, None)


def test_an_output_that_nobody_wrote_is_wrong() -> None:
    canary = Canary(OPERATORS["group_norm_backward"], A2, legal=False)
    assert canary.run(lambda record, call: Timings()).result is CanaryResult.MISMATCH


def test_a_device_that_says_that_it_failed_is_not_silently_wrong() -> None:
    canary = Canary(OPERATORS["group_norm_backward"], A2, legal=False)

    def fail(record: OpRecord, call: DeviceCall) -> Timings:
        raise DeviceError("no streams")

    found = canary.run(fail)
    assert (found.result, found.detail) == (CanaryResult.ERROR, "DeviceError: no streams")

    def end(record: OpRecord, call: DeviceCall) -> Timings:
        raise DeviceLost("gone", 507015)

    with pytest.raises(DeviceLost):
        canary.run(end)
