from __future__ import annotations

from typing import Any

import pytest

from npugrad.errors import (
    DeadlineExceeded,
    DeviceError,
    DeviceOutOfMemory,
    NpugradError,
    OperatorError,
    ServerBusy,
    UnsafeLevels,
    WorkerLost,
)
from npugrad_server.pool.answers import error_from_answer, error_from_verdict
from npugrad_server.worker.protocol import CallFailed


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
    job: Any, reason: str, metadata: dict[str, str], expected: type[NpugradError]
) -> None:
    error = error_from_answer(job().planned, CallFailed(1, reason, "words", metadata))
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
    [("DEADLINE_EXCEEDED", DeadlineExceeded), ("NO_DEVICE", ServerBusy), ("WORKER_LOST", WorkerLost)],
)
def test_a_verdict_becomes_an_exception(job: Any, reason: str, expected: type[NpugradError]) -> None:
    error = error_from_verdict(job().planned, reason, "it happened")
    assert type(error) is expected
    assert (str(error), error.reason) == ("group_norm_backward: it happened", reason)
    assert error.request_id == "request-0"
    if isinstance(error, ServerBusy):
        assert error.retry_after_s
