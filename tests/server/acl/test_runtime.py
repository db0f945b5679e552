"""Copies, waits, texts and the option of determinism on the simulator."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.server.acl.conftest import Rig

from npugrad_server.acl.faults import Action
from npugrad_server.acl.libraries import Functions, Missing
from npugrad_server.acl.runtime import AclError, Runtime, concerning
from npugrad_server.acl.symbols import RUNTIME

pytestmark = pytest.mark.npu_sim


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


def test_bytes_go_down_and_come_back(rig: Rig) -> None:
    source, target = rig.sim.pinned(1000), rig.sim.pinned(1000)
    source[:] = np.arange(1000) % 251
    address = rig.upload(b"\xff" * 1000)
    rig.runtime.copy_in(address, source.ctypes.data, 900, rig.stream)
    rig.runtime.zero(address + 900, 100, rig.stream)
    rig.runtime.copy_out(target.ctypes.data, address, 1000, rig.stream)
    rig.runtime.wait(rig.stream, soon())
    assert (target[:900] == source[:900]).all()
    assert not target[900:].any()
    for pinned in (source, target):
        rig.sim.call("aclrtFreeHost", pinned.ctypes.data)


def test_events_tell_how_long_a_stream_took(rig: Rig) -> None:
    """Whichever call records them, again and again."""
    address = rig.upload(bytes(64))
    first, last = rig.runtime.make_event(), rig.runtime.make_event()
    for ms in (60, 20):
        rig.sim.set_plan(f"memset:1:slow={ms}")
        rig.runtime.record(first, rig.stream)
        rig.runtime.zero(address, 64, rig.stream)
        rig.runtime.record(last, rig.stream)
        rig.runtime.wait(rig.stream, soon())
        assert ms / 1000 <= rig.runtime.elapsed_s(first, last) < 10
    assert rig.runtime.elapsed_s(first, first) == 0
    with pytest.raises(AclError, match="107007"):
        rig.runtime.elapsed_s(last, first)
    for event in (first, last):
        rig.runtime.destroy_event(event)


def test_an_event_that_was_never_recorded_has_no_time(rig: Rig) -> None:
    event = rig.runtime.make_event()
    with pytest.raises(AclError, match="107006"):
        rig.runtime.elapsed_s(event, event)
    rig.runtime.destroy_event(event)


def test_whether_cann_can_time_by_events(rig: Rig) -> None:
    assert rig.runtime.has_events
    symbol = next(symbol for symbol in RUNTIME if symbol.name == "aclrtRecordEvent")
    functions = {**rig.cann.runtime.by_name, symbol.name: Missing(symbol, ())}
    assert not Runtime(Functions(functions)).has_events


def test_a_wait_ends_at_its_time_with_the_number_of_the_vendor(rig: Rig) -> None:
    """A time that has passed is the shortest wait, and never one for ever."""
    address = rig.upload(bytes(64))
    rig.sim.set_plan("memset:1:slow=60000")
    rig.runtime.zero(address, 64, rig.stream)
    start = time.monotonic()
    with pytest.raises(AclError) as caught:
        rig.runtime.wait(rig.stream, soon(0.2))
    assert 0.15 < time.monotonic() - start < 4
    assert (caught.value.code, caught.value.fault.action) == (507046, Action.TIMED_OUT)
    for until_s in (0.0, float("-inf")):
        with pytest.raises(AclError, match="507046"):
            rig.runtime.wait(rig.stream, until_s)
    rig.sim.set_plan("")  # it is over now
    rig.runtime.wait(rig.stream, float("inf"))


def test_texts_of_earlier_failures_are_not_blamed_on_later_ones(rig: Rig) -> None:
    rig.sim.set_plan("aclrtMemsetAsync:1:107000:msg=the first text;aclrtMemsetAsync:2:107019:msg=the second")
    address = rig.upload(bytes(64))
    with pytest.raises(AclError, match="the first text"):
        rig.runtime.zero(address, 64, rig.stream)
    rig.runtime.forget_errors()
    with pytest.raises(AclError) as caught:
        rig.runtime.zero(address, 64, rig.stream)
    assert caught.value.fault.action is Action.RESUBMIT
    assert "the second" in caught.value.text
    assert "the first text" not in str(caught.value)


def test_a_stale_text_is_forgotten(rig: Rig) -> None:
    """CANN leaves texts behind calls that succeed."""
    rig.sim.set_plan("aclrtMemsetAsync:1:stale")
    address = rig.upload(bytes(64))
    rig.runtime.zero(address, 64, rig.stream)
    rig.runtime.wait(rig.stream, soon())
    assert rig.runtime.fetch_texts()
    assert rig.runtime.fetch_texts() == ""


def test_the_last_error_of_the_runtime_tells_what_a_library_hides(rig: Rig) -> None:
    rig.sim.set_plan("aclrtMemsetAsync:1:361001:last=507015")
    with pytest.raises(AclError) as caught:
        rig.runtime.zero(rig.upload(bytes(64)), 64, rig.stream)
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


def test_what_the_device_is(rig: Rig) -> None:
    free, total = rig.runtime.memory_bytes()
    assert 0 < free <= total
    assert rig.runtime.soc_name() == "Ascend910B2"
    assert rig.runtime.device_count() == 1
    assert list(rig.runtime.versions()) == ["9.1.0", "9.1.0"]


def test_the_option_of_determinism_is_set_and_taken_back(rig: Rig) -> None:
    import ctypes

    def options() -> list[int]:
        names = ("aclrtCtxGetSysParamOpt", "aclrtGetSysParamOpt")
        return [int(rig.sim.number(name, ctypes.c_int64, 0)) for name in names]

    rig.runtime.set_deterministic(True)
    assert options() == [1, 1]
    rig.runtime.set_deterministic(False)
    assert options() == [0, 0]


def test_where_cann_has_no_option_of_the_process_that_of_the_context_is_set(rig: Rig) -> None:
    symbol = next(symbol for symbol in RUNTIME if symbol.name == "aclrtSetSysParamOpt")
    functions = {**rig.cann.runtime.by_name, symbol.name: Missing(symbol, ())}
    before = rig.sim.counter("calls.aclrtCtxSetSysParamOpt")
    Runtime(Functions(functions)).set_deterministic(False)
    assert rig.sim.counter("calls.aclrtCtxSetSysParamOpt") == before + 1
