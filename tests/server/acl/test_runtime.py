"""Copies, waits, texts and the option of determinism on the simulator."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from npugrad_server.acl.faults import Action
from npugrad_server.acl.libraries import Functions, Missing
from npugrad_server.acl.runtime import AclError, Runtime, concerning
from npugrad_server.acl.symbols import RUNTIME

if TYPE_CHECKING:
    from tests.server.acl.conftest import Testbed

pytestmark = pytest.mark.npu_sim


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


def test_bytes_go_down_and_come_back(testbed: Testbed) -> None:
    source, target = testbed.sim.pinned(1000), testbed.sim.pinned(1000)
    source[:] = np.arange(1000) % 251
    address = testbed.upload(b"\xff" * 1000)
    testbed.runtime.copy_in(address, source.ctypes.data, 900, testbed.stream)
    testbed.runtime.zero(address + 900, 100, testbed.stream)
    testbed.runtime.copy_out(target.ctypes.data, address, 1000, testbed.stream)
    testbed.runtime.wait(testbed.stream, soon())
    assert (target[:900] == source[:900]).all()
    assert not target[900:].any()
    for pinned in (source, target):
        testbed.sim.call("aclrtFreeHost", pinned.ctypes.data)


def test_events_tell_how_long_a_stream_took(testbed: Testbed) -> None:
    """Whichever call records them, again and again."""
    address = testbed.upload(bytes(64))
    first, last = testbed.runtime.make_event(), testbed.runtime.make_event()
    for ms in (60, 20):
        testbed.sim.set_plan(f"memset:1:slow={ms}")
        testbed.runtime.record(first, testbed.stream)
        testbed.runtime.zero(address, 64, testbed.stream)
        testbed.runtime.record(last, testbed.stream)
        testbed.runtime.wait(testbed.stream, soon())
        assert ms / 1000 <= testbed.runtime.elapsed_s(first, last) < 2
    assert testbed.runtime.elapsed_s(first, first) == 0
    with pytest.raises(AclError, match="107007"):
        testbed.runtime.elapsed_s(last, first)
    for event in (first, last):
        testbed.runtime.destroy_event(event)


def test_an_event_that_was_never_recorded_has_no_time(testbed: Testbed) -> None:
    event = testbed.runtime.make_event()
    with pytest.raises(AclError, match="107006"):
        testbed.runtime.elapsed_s(event, event)
    testbed.runtime.destroy_event(event)


def test_whether_cann_can_time_by_events(testbed: Testbed) -> None:
    assert testbed.runtime.has_events
    symbol = next(symbol for symbol in RUNTIME if symbol.name == "aclrtRecordEvent")
    functions = {**testbed.cann.runtime.by_name, symbol.name: Missing(symbol, ())}
    assert not Runtime(Functions(functions)).has_events


def test_a_wait_ends_at_its_time_with_the_number_of_the_vendor(testbed: Testbed) -> None:
    address = testbed.upload(bytes(64))
    testbed.sim.set_plan("memset:1:slow=700")
    testbed.runtime.zero(address, 64, testbed.stream)
    start = time.monotonic()
    with pytest.raises(AclError) as caught:
        testbed.runtime.wait(testbed.stream, soon(0.2))
    assert 0.15 < time.monotonic() - start < 0.6
    assert (caught.value.code, caught.value.fault.action) == (507046, Action.TIMED_OUT)
    testbed.runtime.wait(testbed.stream, soon())


@pytest.mark.parametrize("until_s", [0.0, float("-inf")])
def test_a_time_that_has_passed_is_the_shortest_wait_and_never_for_ever(
    testbed: Testbed, until_s: float
) -> None:
    address = testbed.upload(bytes(64))
    testbed.sim.set_plan("memset:1:slow=300")
    testbed.runtime.zero(address, 64, testbed.stream)
    with pytest.raises(AclError, match="507046"):
        testbed.runtime.wait(testbed.stream, until_s)
    testbed.sim.set_plan("")
    testbed.runtime.wait(testbed.stream, float("inf"))


def test_texts_of_earlier_failures_are_not_blamed_on_later_ones(testbed: Testbed) -> None:
    testbed.sim.set_plan(
        "aclrtMemsetAsync:1:107000:msg=the first text;aclrtMemsetAsync:2:107019:msg=the second"
    )
    address = testbed.upload(bytes(64))
    with pytest.raises(AclError, match="the first text"):
        testbed.runtime.zero(address, 64, testbed.stream)
    testbed.runtime.forget_errors()
    with pytest.raises(AclError) as caught:
        testbed.runtime.zero(address, 64, testbed.stream)
    assert caught.value.fault.action is Action.RESUBMIT
    assert "the second" in caught.value.text
    assert "the first text" not in str(caught.value)


def test_a_stale_text_is_forgotten(testbed: Testbed) -> None:
    """CANN leaves texts behind calls that succeed."""
    testbed.sim.set_plan("aclrtMemsetAsync:1:stale")
    address = testbed.upload(bytes(64))
    testbed.runtime.zero(address, 64, testbed.stream)
    testbed.runtime.wait(testbed.stream, soon())
    assert testbed.runtime.fetch_texts()
    assert testbed.runtime.fetch_texts() == ""


def test_the_last_error_of_the_runtime_tells_what_a_library_hides(testbed: Testbed) -> None:
    testbed.sim.set_plan("aclrtMemsetAsync:1:361001:last=507015")
    with pytest.raises(AclError) as caught:
        testbed.runtime.zero(testbed.upload(bytes(64)), 64, testbed.stream)
    assert (caught.value.code, caught.value.last_error) == (361001, 507015)
    assert caught.value.fault.action is Action.END_WORKER
    assert "the runtime's last error is 507015" in str(caught.value)


def test_an_error_reads_as_one_line() -> None:
    assert str(AclError(507015, "aclrtX", "words")) == (
        "aclrtX returned 507015 (runtime or scheduler error, heartbeat lost, or exception, timeout or trap "
        "of a core): words"
    )
    assert str(AclError(0, "aclCreateTensor")).startswith("aclCreateTensor failed without a number (")


def test_an_error_tells_what_it_is_about_by_the_innermost_name() -> None:
    with pytest.raises(AclError) as caught, concerning("outer"), concerning("rstd"):
        raise AclError(107000, "aclrtX")
    assert str(caught.value).startswith("rstd: aclrtX returned 107000 (")


def test_what_the_device_is(testbed: Testbed) -> None:
    free, total = testbed.runtime.memory_bytes()
    assert 0 < free <= total
    assert testbed.runtime.soc_name() == "Ascend910B2"
    assert testbed.runtime.device_count() == 1
    assert list(testbed.runtime.versions()) == ["9.1.0", "9.1.0"]


def test_the_option_of_determinism_is_set_and_taken_back(testbed: Testbed) -> None:
    import ctypes

    def options() -> list[int]:
        names = ("aclrtCtxGetSysParamOpt", "aclrtGetSysParamOpt")
        return [int(testbed.sim.number(name, ctypes.c_int64, 0)) for name in names]

    testbed.runtime.set_deterministic(True)
    assert options() == [1, 1]
    testbed.runtime.set_deterministic(False)
    assert options() == [0, 0]


def test_where_cann_has_no_option_of_the_process_that_of_the_context_is_set(testbed: Testbed) -> None:
    symbol = next(symbol for symbol in RUNTIME if symbol.name == "aclrtSetSysParamOpt")
    functions = {**testbed.cann.runtime.by_name, symbol.name: Missing(symbol, ())}
    before = testbed.sim.counter("calls.aclrtCtxSetSysParamOpt")
    Runtime(Functions(functions)).set_deterministic(False)
    assert testbed.sim.counter("calls.aclrtCtxSetSysParamOpt") == before + 1
