"""Sick NPUs seen from a caller: the right error or the right result from another device. All is SIMULATED."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from tests.calls import Sample, call_unary, failure_of, sample
from tests.e2e.harness import eventually

from npugrad.layout import view
from npugrad.tolerance import compare
from npugrad.v1 import server_pb2

if TYPE_CHECKING:
    from tests.fix_npu import NpuServer, StartNpuServer

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]

TWO = ("npu:0,npu:1", "ndev=2;")
READY, DOWN = server_pb2.DEVICE_STATE_READY, server_pb2.DEVICE_STATE_DOWN
QUICK = ("--respawn-backoff-s", "0.05", "--respawn-backoff-max-s", "0.2")


def good_call(running: NpuServer, given: Sample | None = None, **kwargs: Any) -> Any:
    """A call whose results are within tolerance; what produced them."""
    made = given or sample()
    with running.process.channel() as channel:
        result = call_unary(channel, made.spec, made.message(), **kwargs)
    golden = {name: np.zeros(meta.shape) for name, meta in made.outputs.items()}
    made.spec.reference(made.arrays, made.call.attrs, golden)
    for name, meta in made.outputs.items():
        data = result.contents[name].data
        assert data is not None
        extra = made.spec.extra_tolerance(made.arrays, made.call.attrs, name)
        comparison = compare(golden[name], view(meta, data), extra)
        assert comparison.ok, f"{name}: {comparison}"
    return result.info


def failing_call(running: NpuServer, **kwargs: Any) -> Any:
    made = sample()
    with running.process.channel() as channel:
        return failure_of(lambda: call_unary(channel, made.spec, made.message(), **kwargs))


def states(running: NpuServer) -> list[int]:
    return [device.state for device in running.process.info().devices]


def all_ready(running: NpuServer) -> bool:
    return set(states(running)) == {READY}


def test_a_call_under_which_a_device_fails_gets_its_result_from_the_other(
    start_npu_server: StartNpuServer,
) -> None:
    running = start_npu_server(devices=TWO[0], plan=TWO[1], lost_workers=True)
    running.plan("ndev=2;kernel:1:507015:total")
    info = good_call(running)
    assert info.attempts == 2
    assert good_call(running).attempts == 1
    eventually(lambda: all_ready(running), "both devices serve again", running.process)
    assert sum(device.restarts for device in running.process.info().devices) == 1
    assert "returned 507015" in running.process.log_text()


def test_a_call_under_which_every_device_fails_is_given_up_with_the_number(
    start_npu_server: StartNpuServer,
) -> None:
    running = start_npu_server(devices=TWO[0], plan=TWO[1], lost_workers=True)
    running.plan("ndev=2;kernel:1-2:507018:total")
    failure = failing_call(running)
    assert (failure.error.reason, failure.error.code) == ("WORKER_LOST", 507018)
    assert failure.status is grpc.StatusCode.UNAVAILABLE
    # What was queued behind the operator may meet the failure before the wait does.
    assert re.search(r"aclrt\w+ returned 507018", str(failure.error))
    assert "since a task failed on device" in str(failure.error), "CANN's own words are missing"
    good_call(running)
    eventually(lambda: all_ready(running), "both devices serve again", running.process)


def test_a_device_that_never_comes_back_is_marked_down_and_the_other_serves(
    start_npu_server: StartNpuServer,
) -> None:
    running = start_npu_server(*QUICK, "--max-respawns", "2", devices=TWO[0], plan=TWO[1], lost_workers=True)
    running.plan("ndev=2;kernel:*:507015:dev=0")
    for _ in range(4):
        assert good_call(running).device == "npu:1"
    eventually(lambda: states(running) == [DOWN, READY], "npu:0 is down", running.process, 60)
    good_call(running)
    (down, _) = running.process.info().devices
    assert "returned 507015" in down.reason


def test_damaged_memory_quarantines_its_device(start_npu_server: StartNpuServer) -> None:
    running = start_npu_server(devices=TWO[0], plan=TWO[1], lost_workers=True)
    running.plan("ndev=2;kernel:1:507054:total")
    assert good_call(running).attempts == 2
    assert sorted(states(running)) == sorted([DOWN, READY])
    (down,) = [device for device in running.process.info().devices if device.state == DOWN]
    assert down.reason.startswith("quarantined: ")
    assert down.restarts == 0
    good_call(running)


def test_a_hang_ends_at_the_deadline_and_the_other_device_serves_on(
    start_npu_server: StartNpuServer,
) -> None:
    running = start_npu_server("--hang-grace-s", "1", devices=TWO[0], plan=TWO[1], lost_workers=True)
    running.plan("ndev=2;kernel:1:hang:total")
    codes: list[grpc.StatusCode] = []

    def hang() -> None:
        # The client's own clock ends the call, perhaps before the server's words arrive.
        with pytest.raises(grpc.RpcError) as caught:
            good_call(running, timeout=1.0)
        codes.append(caught.value.code())

    start = time.monotonic()
    hung = threading.Thread(target=hang)
    hung.start()
    eventually(lambda: running.report.counters()["hangs"], "a kernel hangs", running.process)
    while hung.is_alive():
        good_call(running)
    hung.join()
    assert time.monotonic() - start < 3
    assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED]
    eventually(
        lambda: all_ready(running) and sum(d.restarts for d in running.process.info().devices) == 1,
        "the device that hung was replaced",
        running.process,
    )
    assert "returned 507046" in running.process.log_text()


def test_no_memory_once_is_not_noticed_and_for_ever_is_told(start_npu_server: StartNpuServer) -> None:
    running = start_npu_server()
    phase_1 = "aclnnGroupNormBackwardGetWorkspaceSize"
    running.plan(f"{phase_1}:1:207001")
    assert good_call(running).attempts == 1
    running.plan(f"{phase_1}:*:207001:msg=no room")
    failure = failing_call(running)
    assert (failure.error.reason, failure.error.code) == ("DEVICE_OUT_OF_MEMORY", 207001)
    assert failure.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{phase_1} returned 207001" in str(failure.error)
    assert "no room" in str(failure.error)
    running.plan("")
    good_call(running)
    assert running.process.info().devices[0].restarts == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (161002, grpc.StatusCode.INTERNAL),
        (561103, grpc.StatusCode.INTERNAL),
        (561112, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_what_a_device_refuses_after_our_validator_passed_is_not_the_callers_fault(
    start_npu_server: StartNpuServer, code: int, status: grpc.StatusCode
) -> None:
    running = start_npu_server()
    running.plan(f"aclnnGroupNormBackwardGetWorkspaceSize:1:{code}")
    failure = failing_call(running)
    assert (failure.error.code, failure.error.source, failure.status) == (code, "device", status)
    good_call(running)
