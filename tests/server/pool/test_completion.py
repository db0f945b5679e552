from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from tests.server.pool.pools import altered, make_job

from npugrad import OPERATORS
from npugrad.errors import (
    CallTooLarge,
    DeadlineExceeded,
    DeviceError,
    DeviceOutOfMemory,
    NpugradError,
    OperatorError,
    ServerBusy,
    UnsafeLevels,
    UnsupportedOperator,
    WorkerLost,
)
from npugrad.status import MAX_MESSAGE_BYTES, ascii_message
from npugrad_server.pool import DeviceState, DeviceStatus
from npugrad_server.pool.completion import error_from_answer, error_without_answer, error_without_device
from npugrad_server.worker.protocol import CallFailed

PLANNED = make_job().planned


@pytest.mark.parametrize(
    ("reason", "metadata", "expected"),
    [
        ("INTERNAL", {}, DeviceError),
        ("DEVICE_OUT_OF_MEMORY", {}, DeviceOutOfMemory),
        ("UNSAFE_LEVELS", {"operand": "spatial_shape"}, UnsafeLevels),
        ("DETERMINISM_UNSUPPORTED", {}, OperatorError),
        ("VERIFICATION_FAILED", {}, DeviceError),
        ("ACLNN_ERR_PARAM_INVALID", {"code": "161002"}, DeviceError),
    ],
)
def test_a_workers_answer_becomes_the_exception_of_its_reason(
    reason: str, metadata: dict[str, str], expected: type[NpugradError]
) -> None:
    error = error_from_answer(PLANNED, CallFailed(1, reason, "words", metadata))
    assert type(error) is expected
    assert (str(error), error.reason) == ("words", reason)
    assert (error.operator, error.request_id) == ("group_norm_backward", "request-0")
    if isinstance(error, OperatorError):
        assert error.source == "device"
        assert error.code == (161002 if metadata else None)
    if isinstance(error, UnsafeLevels):
        assert error.operand == "spatial_shape"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("CALL_TOO_LARGE", CallTooLarge),
        ("DEADLINE_EXCEEDED", DeadlineExceeded),
        ("OPERATOR_UNSUPPORTED", UnsupportedOperator),
        ("WORKER_LOST", WorkerLost),
    ],
)
def test_a_verdict_becomes_an_exception(reason: str, expected: type[NpugradError]) -> None:
    error = error_without_answer(PLANNED, reason, "it happened")
    assert type(error) is expected
    assert (str(error), error.reason) == ("group_norm_backward: it happened", reason)
    assert error.request_id == "request-0"


def down(index: int, reason: str, **changes: Any) -> DeviceStatus:
    return replace(DeviceStatus(f"npu:{index}", "npu", "", True, DeviceState.DOWN, 0, reason), **changes)


def test_without_a_device_the_caller_is_told_why_device_by_device_and_when_the_next_one_is_tried() -> None:
    devices = [down(0, "quarantined"), down(1, "no driver"), down(2, "quarantined")]
    error = error_without_device(devices, PLANNED)
    assert type(error) is ServerBusy
    assert str(error) == (
        "group_norm_backward: no device is ready: npu:0, npu:2: down, quarantined; npu:1: down, no driver"
    )
    assert (error.reason, error.operator) == ("NO_DEVICE", "group_norm_backward")
    assert error.request_id == "request-0"
    assert error.retry_after_s
    starting = [down(0, "its first worker is starting", state=DeviceState.STARTING)]
    assert str(error_without_device(starting)) == (
        "no device is ready: npu:0: starting, its first worker is starting"
    )
    waiting = [down(index, "no driver", next_try_s=wait) for index, wait in enumerate((40.0, 7.5, None))]
    assert error_without_device(waiting, PLANNED).retry_after_s == 7.5
    assert error_without_device([*waiting, down(3, "", next_try_s=0.0)], PLANNED).retry_after_s == 1
    ready = down(4, "", state=DeviceState.READY)
    assert str(error_without_device([waiting[0], ready], PLANNED)) == (
        "group_norm_backward: no device that may run it is ready: npu:0: down, no driver"
    )


def test_the_reasons_always_fit_a_status_and_a_long_one_does_not_hide_that_of_another() -> None:
    devices = [down(0, "a" * 1000), down(1, "no driver"), down(2, "b" * 1000)]
    words = str(error_without_device(devices, PLANNED))
    assert len(words) <= MAX_MESSAGE_BYTES
    assert ascii_message(words) == words
    for part in ("npu:0: down, aaaa", "...; npu:1: down, no driver; ", "npu:2: down, bbbb"):
        assert part in words
    planned = altered(PLANNED, record=OPERATORS["multi_scale_deformable_attention_grad"])
    for count, length in product((0, 1, 7, 64, 500), (0, 1, 60, 600)):
        devices = [down(index, f"{index}" + "x" * length) for index in range(count)]
        words = str(error_without_device(devices, planned))
        assert words.startswith("multi_scale_deformable_attention_grad: no device is ready: ")
        assert len(words) <= MAX_MESSAGE_BYTES, (count, length)
        whole = sum(len(f"npu:{index}: down, {device.reason}; ") for index, device in enumerate(devices))
        assert ("..." in words or count == 500) == (whole > MAX_MESSAGE_BYTES - 59), (count, length)
