"""Unary calls of a real server: what an answer says, deadlines, cancellation, overload, failing devices.

That every sample of every operator has the right result is the matter of `test_bit_for_bit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.calls import TIMEOUT_S, call_unary, cpu_backend, failure_of, fill, repeated, sample
from tests.e2e.harness import case, eventually, idle
from tests.fix_server import ServerProcess, StartServer, run_quick_server
from tests.operators import GRID_SAMPLER, GRID_SAMPLER_3D, GROUP_NORM

from npugrad import TensorMeta, codec
from npugrad.errors import CallTooLarge
from npugrad.layout import content, view
from npugrad.v1 import backward_pb2_grpc


def test_info_says_who_made_the_result_and_carries_the_request_id(server_channel: grpc.Channel) -> None:
    """A deadline beyond need changes nothing of it."""
    made, named = sample(), (("x-request-id", "my-call.7"),)
    info = call_unary(server_channel, made.record, made.message(), metadata=named, timeout=50).info
    assert (info.device, info.product, info.simulated, info.attempts) == ("cpu:0", "atlas-a2", False, 1)
    assert info.backend.startswith("cpu")
    assert info.request_id == "my-call.7"
    assert info.run_s > 0


def test_request_id_comes_back_in_the_trailers_and_is_made_when_missing(server_channel: grpc.Channel) -> None:
    made = sample()
    method = backward_pb2_grpc.BackwardServiceStub(server_channel).GroupNormBackward
    response, call = method.with_call(made.message(), timeout=TIMEOUT_S)
    trailers = {key: value for key, value in call.trailing_metadata()}
    assert trailers["x-request-id"] == response.info.request_id != ""


WITHOUT_ONE = """
from npugrad_server.backends.cpu.kernels import Kernels

made = Kernels.__init__


def without_one(self, *given, **options):
    made(self, *given, **options)
    self.operators = tuple(name for name in self.operators if name != "grid_sampler_2d_backward")


Kernels.__init__ = without_one
"""


def test_each_call_says_what_computed_it_where_kernels_are_not_for_all(
    start_server: StartServer, tmp_path: Path
) -> None:
    if cpu_backend().name != "cpu":
        pytest.skip("no compiled kernels here")
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_ONE)
    running = start_server(env={"PYTHONPATH": str(tmp_path), "NPUGRAD_KERNELS_TORCH": "auto"})
    with running.channel() as channel:
        for record, backend in ((GROUP_NORM, "cpu"), (GRID_SAMPLER, "cpu-reference")):
            made = fill(record, record.build())
            info = call_unary(channel, record, made.message()).info
            assert (info.backend, info.device) == (backend, "cpu:0")
            assert running.find_log("call", operator=record.name)["backend"] == backend
    (device,) = running.info().devices
    assert device.backend == "cpu"
    assert device.description.endswith("NumPy reference in float64 for grid_sampler_2d_backward")


def test_channels_come_back_where_the_format_has_them(server_channel: grpc.Channel) -> None:
    plain = fill(GRID_SAMPLER_3D, GRID_SAMPLER_3D.build())
    expected = call_unary(server_channel, GRID_SAMPLER_3D, plain.message()).contents
    metas, contents = dict(plain.call.inputs), dict(plain.contents)
    for name in ("input", "grad_output"):
        array = plain.arrays[name]
        assert array is not None
        metas[name], contents[name] = content(np.moveaxis(array, 1, -1).copy(), "NDHWC")
    message, _ = codec.encode_request(metas, contents, GRID_SAMPLER_3D, plain.call.attrs)
    found = call_unary(server_channel, GRID_SAMPLER_3D, message)
    last = TensorMeta("float32", (2, 3, 4, 5, 3), "NDHWC")
    assert found.metas["input_grad"] == last
    first = view(plain.call.tensor("input"), expected["input_grad"].data or b"")
    moved = view(last, found.contents["input_grad"].data or b"")
    np.testing.assert_array_equal(np.moveaxis(moved, -1, 1), first)
    assert found.contents["grid_grad"].data == expected["grid_grad"].data


def test_reply_that_no_message_can_hold_is_refused_before_it_is_run(server_channel: grpc.Channel) -> None:
    made = repeated(2**31 + 2**8)
    failure = failure_of(lambda: call_unary(server_channel, made.record, made.message()))
    assert failure.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(failure.error, CallTooLarge)
    assert "use Execute" in str(failure.error)


# ----------------------------------------------------------------- deadlines, overload and failing devices


def test_deadlines_pass_in_the_queue_until_run_times_are_known_and_are_then_refused(tmp_path: Path) -> None:
    made, log_path = sample(), tmp_path / "server.log"
    device = "test:1?ms=4000"
    with run_quick_server(log_path, devices=device, check_end=False) as slow, slow.channel() as channel:
        method = backward_pb2_grpc.BackwardServiceStub(channel).GroupNormBackward
        # Nothing has run yet: that the second call would come late cannot be known.
        first = method.future(made.message(), timeout=TIMEOUT_S)
        slow.wait_accepted(1)
        with pytest.raises(grpc.RpcError) as caught:
            method(made.message(), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        first.result()
        eventually(lambda: idle(slow.info()), "no arena byte in use", slow)
        assert slow.info().accepted_calls == 2
        again = method.future(made.message(), timeout=TIMEOUT_S)
        slow.wait_accepted(3)
        failure = failure_of(partial(method, made.message(), timeout=3))
        assert failure.error.reason == "WOULD_MISS_DEADLINE"
        again.cancel()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A device that takes its time and fails calls by their label, and room for two calls to wait."""
    log_path = tmp_path_factory.mktemp("busy") / "server.log"
    devices = "test:1?ms=300&compute=1&oom=oom&bug=bug&corrupt=corrupt"
    with run_quick_server(log_path, "--max-queue-depth", "2", devices=devices) as running:
        yield running


def test_overload_is_refused_with_a_time_to_retry(busy: ServerProcess) -> None:
    made = sample()
    with busy.channel() as channel:
        method = backward_pb2_grpc.BackwardServiceStub(channel).GroupNormBackward
        calls = [method.future(made.message(), timeout=TIMEOUT_S) for _ in range(6)]
        failures = [failure_of(call.result) for call in calls if call.exception() is not None]
        answered = sum(call.exception() is None for call in calls)
    assert failures, "six calls at once fitted into a queue of two"
    assert answered >= 1
    assert len(failures) + answered == 6
    for failure in failures:
        assert failure.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failure.error.reason == "QUEUE_FULL"
        assert failure.error.retryable
        assert failure.error.retry_after_s  # type: ignore[attr-defined]


def test_failure_of_a_device_reaches_the_caller_with_its_reason(busy: ServerProcess) -> None:
    made = sample()
    with busy.channel() as channel:
        for label, verify, status, reason in (
            ("oom", False, grpc.StatusCode.RESOURCE_EXHAUSTED, "DEVICE_OUT_OF_MEMORY"),
            ("bug", False, grpc.StatusCode.INTERNAL, "INTERNAL"),
            ("corrupt", True, grpc.StatusCode.DATA_LOSS, "VERIFICATION_FAILED"),
        ):
            with case(label):
                message = made.message(label=label, verify=verify)
                failure = failure_of(partial(call_unary, channel, made.record, message))
                assert (failure.status, failure.error.reason) == (status, reason)
                result = call_unary(channel, made.record, made.message(verify=True))
                found = {name: content.data for name, content in result.contents.items()}
                assert found == made.reference()
    busy.assert_nothing_leaked()
