"""Devices, memory, streams, events and errors, as CANN has them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.cann_sim.rig import Rig, queue_upload
from tests.cann_sim.runtime import (
    AICORE_EXCEPTION,
    D2H,
    DEFAULT,
    DETERMINISTIC,
    EVENT_SYNC,
    EVENT_TIME_LINE,
    FOREIGN_STREAM,
    H2D,
    HBM,
    INVALID_DEVICE,
    NO_CONTEXT,
    OUT_OF_MEMORY,
    PARAM_INVALID,
    SUCCESS,
    SYNC_TIMEOUT,
    TIMESTAMP_INVALID,
    TIMESTAMP_REVERSAL,
    CannError,
    Runtime,
)

pytestmark = pytest.mark.npu_sim

MIB = 2**20


@pytest.fixture
def stream(runtime: Runtime) -> Iterator[int]:
    handle = runtime.stream()
    yield handle
    runtime.call("aclrtDestroyStream", handle)


@pytest.fixture
def rig(runtime: Runtime) -> Iterator[Rig]:
    made = Rig(runtime)
    yield made
    runtime.status("aclrtSynchronizeDevice")  # a test may have failed with work under way
    made.close()


def in_thread(act: Callable[[], Any]) -> Any:
    """What a function returns in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()))
    thread.start()
    thread.join()
    return results[0]


class TestDevices:
    def test_a_marker_tells_that_it_is_simulated(self, runtime: Runtime) -> None:
        assert runtime.marker == 1

    def test_count_name_and_version(self, runtime: Runtime) -> None:
        runtime.set_plan("ndev=3; soc=Ascend910_9391")
        assert runtime.number("aclrtGetDeviceCount", ctypes.c_uint32) == 3
        assert runtime.soc_name() == "Ascend910_9391"
        assert runtime.version() == "9.1.0"

    def test_a_device_is_set_for_one_thread(self, runtime: Runtime) -> None:
        runtime.set_plan("ndev=2")
        assert (
            in_thread(lambda: runtime.status("aclrtGetDevice", ctypes.byref(ctypes.c_int32()))) == NO_CONTEXT
        )

        def other() -> int:
            runtime.call("aclrtSetDevice", 1)
            device = runtime.number("aclrtGetDevice", ctypes.c_int32)
            runtime.call("aclrtResetDevice", 1)
            return int(device)

        assert in_thread(other) == 1
        assert runtime.number("aclrtGetDevice", ctypes.c_int32) == 0

    def test_there_is_no_other_device(self, runtime: Runtime) -> None:
        assert runtime.status("aclrtSetDevice", 1) == INVALID_DEVICE
        assert runtime.status("aclrtSetDevice", -1) == INVALID_DEVICE

    def test_threads_of_a_device_share_its_context(self, runtime: Runtime) -> None:
        def context() -> int:
            runtime.call("aclrtSetDevice", 0)
            handle = runtime.pointer("aclrtGetCurrentContext")
            runtime.call("aclrtResetDevice", 0)
            return handle

        assert context() == in_thread(context)

    def test_initialising_again_is_told(self, runtime: Runtime) -> None:
        assert runtime.status("aclInit", None) == 100002

    def test_a_reset_takes_what_was_left(self, runtime: Runtime) -> None:
        runtime.malloc(64)
        runtime.stream()
        runtime.call("aclrtResetDevice", 0)
        runtime.call("aclrtSetDevice", 0)
        assert runtime.counter("device_bytes.0") == 0
        assert runtime.counter("leaked.device_allocations_at_reset") >= 1
        assert runtime.counter("leaked.streams_at_reset") >= 1


class TestMemory:
    def test_is_counted_and_limited(self, runtime: Runtime) -> None:
        runtime.set_plan("hbm_mb=8")
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        address = runtime.malloc(MIB)
        runtime.call("aclrtGetMemInfo", HBM, ctypes.byref(free), ctypes.byref(total))
        assert total.value == 8 * MIB
        assert 0 < 7 * MIB - free.value < 1024  # 32 bytes more than asked for
        with pytest.raises(CannError) as caught:
            runtime.malloc(7 * MIB)
        assert caught.value.code == OUT_OF_MEMORY
        runtime.call("aclrtFree", address)
        runtime.call("aclrtFree", runtime.malloc(7 * MIB))

    def test_is_of_one_device(self, runtime: Runtime) -> None:
        runtime.set_plan("ndev=2; hbm_mb=8")
        first = runtime.malloc(6 * MIB)
        runtime.call("aclrtSetDevice", 1)
        runtime.call("aclrtFree", runtime.malloc(6 * MIB))
        runtime.call("aclrtResetDevice", 1)
        runtime.call("aclrtSetDevice", 0)
        runtime.call("aclrtFree", first)
        runtime.call("aclrtResetDevice", 0)

    def test_fresh_memory_is_poisoned(self, runtime: Runtime) -> None:
        address = runtime.malloc(100)
        assert runtime.download(address, 100) == b"\xff" * 100
        runtime.call("aclrtFree", address)
        pinned = runtime.pinned(100)
        assert pinned.tobytes() == b"\xff" * 100
        runtime.call("aclrtFreeHost", pinned.ctypes.data)

    def test_no_address_is_given_out_twice(self, runtime: Runtime) -> None:
        addresses = []
        for _ in range(50):
            addresses.append(runtime.malloc(64))
            runtime.call("aclrtFree", addresses[-1])
        assert len(set(addresses)) == 50
        assert all(address % 64 == 0 for address in addresses)

    def test_sets_and_copies(self, runtime: Runtime) -> None:
        address = runtime.upload(b"abcdefgh")
        runtime.call("aclrtMemset", address + 2, 6, ord("x"), 3)
        assert runtime.download(address, 8) == b"abxxxfgh"
        other = runtime.malloc(8)
        runtime.call("aclrtMemcpy", other, 8, address, 8, DEFAULT)
        assert runtime.download(other, 8) == b"abxxxfgh"
        assert runtime.status("aclrtMemset", address, 2, 0, 3) == PARAM_INVALID
        assert runtime.status("aclrtMemcpy", address, 2, other, 3, DEFAULT) == PARAM_INVALID
        runtime.call("aclrtFree", address)
        runtime.call("aclrtFree", other)

    def test_registered_memory_is_as_good_as_pinned(self, runtime: Runtime, stream: int) -> None:
        runtime.set_plan("pageable=abort")
        data = np.arange(64, dtype=np.uint8)
        address = runtime.malloc(64)
        runtime.call("aclrtHostRegisterV2", data.ctypes.data, 64, 0)
        runtime.call("aclrtMemcpyAsync", address, 64, data.ctypes.data, 64, H2D, stream)
        runtime.call("aclrtSynchronizeStream", stream)
        runtime.call("aclrtHostUnregister", data.ctypes.data)
        assert runtime.download(address, 64) == data.tobytes()
        runtime.call("aclrtFree", address)

    def test_a_queued_copy_of_pageable_memory_waits(self, runtime: Runtime, stream: int) -> None:
        before = runtime.counter("pageable_async_copies")
        data, address = np.arange(64, dtype=np.uint8), runtime.malloc(64)
        runtime.set_plan("copy_ms=30")
        runtime.call("aclrtMemcpyAsync", address, 64, data.ctypes.data, 64, H2D, stream)
        assert runtime.number("aclrtStreamQuery", ctypes.c_int, stream) == 0
        assert runtime.counter("pageable_async_copies") == before + 1
        runtime.call("aclrtFree", address)


class TestStreams:
    def test_work_in_order_and_apart_from_the_host(self, runtime: Runtime, stream: int) -> None:
        address, result = runtime.malloc(8), runtime.pinned(8)
        runtime.set_plan("copy_ms=1000")
        source = queue_upload(runtime, address, 8, stream)
        runtime.call("aclrtMemsetAsync", address, 4, 7, 4, stream)
        runtime.call("aclrtMemcpyAsync", result.ctypes.data, 8, address, 8, D2H, stream)
        assert runtime.number("aclrtStreamQuery", ctypes.c_int, stream) == 1
        runtime.call("aclrtSynchronizeStream", stream)
        assert runtime.number("aclrtStreamQuery", ctypes.c_int, stream) == 0
        assert result.tobytes() == b"\x07" * 4 + b"\xff" * 4
        runtime.call("aclrtFree", address)
        runtime.call("aclrtFreeHost", source)
        runtime.call("aclrtFreeHost", result.ctypes.data)

    def test_a_bounded_wait_ends_in_time(self, runtime: Runtime, stream: int, rig: Rig) -> None:
        runtime.set_plan("kernel_ms=2000")
        rig.launch(stream)
        assert runtime.status("aclrtSynchronizeStreamWithTimeout", stream, 20) == SYNC_TIMEOUT
        assert "was not done after 20 ms" in runtime.message()
        runtime.call("aclrtSynchronizeStreamWithTimeout", stream, -1)

    def test_a_copy_runs_beside_a_kernel_of_another_stream(
        self, runtime: Runtime, stream: int, rig: Rig
    ) -> None:
        other, address = runtime.stream(), runtime.malloc(64)
        before = runtime.counter("copies_beside_kernels")
        runtime.set_plan("kernel_ms=3000; copy_ms=1000")
        rig.launch(stream)
        source = queue_upload(runtime, address, 64, other)
        runtime.call("aclrtSynchronizeStream", other)
        assert runtime.counter("copies_beside_kernels") > before
        runtime.call("aclrtSynchronizeStream", stream)
        runtime.call("aclrtFreeHost", source)
        runtime.call("aclrtFree", address)
        runtime.call("aclrtDestroyStream", other)

    @pytest.mark.parametrize("ask", ["stream", "query", "device", "event", "event query", "awaited"])
    def test_the_host_may_use_a_result_once_told(self, runtime: Runtime, stream: int, ask: str) -> None:
        other, event = runtime.stream(), runtime.pointer("aclrtCreateEvent")
        address, result = runtime.upload(b"abcd"), runtime.pinned(4)
        runtime.call("aclrtMemcpyAsync", result.ctypes.data, 4, address, 4, D2H, stream)
        runtime.call("aclrtRecordEvent", event, stream)
        runtime.call("aclrtStreamWaitEvent", other, event)
        if ask == "stream":
            runtime.call("aclrtSynchronizeStream", stream)
        elif ask == "device":
            runtime.call("aclrtSynchronizeDevice")
        elif ask == "event":
            runtime.call("aclrtSynchronizeEvent", event)
        elif ask == "awaited":
            runtime.call("aclrtSynchronizeStream", other)
        elif ask == "query":
            while runtime.number("aclrtStreamQuery", ctypes.c_int, stream) == 1:
                pass
        else:
            while runtime.number("aclrtQueryEventStatus", ctypes.c_int, event) == 0:
                pass
        assert result.tobytes() == b"abcd"
        runtime.call("aclrtFree", address)
        runtime.call("aclrtFreeHost", result.ctypes.data)
        runtime.call("aclrtDestroyEvent", event)
        runtime.call("aclrtDestroyStream", other)

    def test_belong_to_a_context(self, runtime: Runtime, stream: int) -> None:
        own = runtime.pointer("aclrtGetCurrentContext")
        other = runtime.pointer("aclrtCreateContext", 0)
        assert runtime.status("aclrtSynchronizeStream", stream) == FOREIGN_STREAM
        runtime.call("aclrtSetCurrentContext", own)
        runtime.call("aclrtSynchronizeStream", stream)
        runtime.call("aclrtDestroyContext", other)

    def test_need_a_context(self, runtime: Runtime, stream: int) -> None:
        assert in_thread(lambda: runtime.status("aclrtSynchronizeStream", stream)) == NO_CONTEXT

    def test_an_event_orders_two_of_them(self, runtime: Runtime, stream: int) -> None:
        other, address = runtime.stream(), runtime.malloc(8)
        event, end = runtime.pointer("aclrtCreateEvent"), runtime.pointer("aclrtCreateEvent")
        runtime.set_plan("copy_ms=1000")
        first = queue_upload(runtime, address, 8, stream)
        runtime.call("aclrtRecordEvent", event, stream)
        assert runtime.number("aclrtQueryEventStatus", ctypes.c_int, event) == 0
        runtime.call("aclrtStreamWaitEvent", other, event)
        second = queue_upload(runtime, address, 8, other)  # without the wait, the simulator calls this a race
        runtime.call("aclrtRecordEvent", end, other)
        runtime.call("aclrtSynchronizeEvent", end)
        assert runtime.number("aclrtQueryEventStatus", ctypes.c_int, end) == 1
        passed = ctypes.c_float()
        runtime.call("aclrtEventElapsedTime", ctypes.byref(passed), event, end)
        assert passed.value >= 1000
        for handle in (event, end):
            runtime.call("aclrtDestroyEvent", handle)
        for pinned in (first, second):
            runtime.call("aclrtFreeHost", pinned)
        runtime.call("aclrtFree", address)
        runtime.call("aclrtDestroyStream", other)

    @pytest.mark.parametrize(
        ("flags", "recorded", "code"),
        [
            ((EVENT_TIME_LINE, EVENT_TIME_LINE), (0, 1), 0),
            ((EVENT_TIME_LINE | EVENT_SYNC, EVENT_TIME_LINE), (1, 0), TIMESTAMP_REVERSAL),
            ((EVENT_SYNC, EVENT_TIME_LINE), (0, 1), TIMESTAMP_INVALID),
            ((EVENT_TIME_LINE, EVENT_TIME_LINE), (0,), TIMESTAMP_INVALID),
        ],
        ids=["in order", "reversed", "not made for it", "not recorded"],
    )
    def test_only_recorded_timing_events_have_times(
        self, runtime: Runtime, stream: int, flags: tuple[int, int], recorded: tuple[int, ...], code: int
    ) -> None:
        events = [runtime.pointer("aclrtCreateEventExWithFlag", flag) for flag in flags]
        for index in recorded:
            runtime.call("aclrtRecordEvent", events[index], stream)
        runtime.call("aclrtSynchronizeStream", stream)
        passed = ctypes.c_float()
        assert runtime.status("aclrtEventElapsedTime", ctypes.byref(passed), *events) == code
        runtime.message()
        for event in events:
            runtime.call("aclrtDestroyEvent", event)

    def test_an_event_that_is_not_done_has_no_time_yet(self, runtime: Runtime, stream: int) -> None:
        event, address = runtime.pointer("aclrtCreateEventExWithFlag", EVENT_TIME_LINE), runtime.malloc(8)
        passed = ctypes.c_float()
        runtime.set_plan("copy_ms=1000")
        source = queue_upload(runtime, address, 8, stream)
        runtime.call("aclrtRecordEvent", event, stream)
        asked = ("aclrtEventElapsedTime", ctypes.byref(passed), event, event)
        assert runtime.status(*asked) == TIMESTAMP_INVALID
        runtime.call("aclrtSynchronizeStream", stream)
        runtime.call(*asked)
        runtime.message()
        runtime.call("aclrtDestroyEvent", event)
        runtime.call("aclrtFreeHost", source)
        runtime.call("aclrtFree", address)


class TestFailures:
    def test_one_task_fails_the_whole_context(self, runtime: Runtime, stream: int, rig: Rig) -> None:
        other, plain = runtime.stream(), runtime.malloc(8)
        rig.workspace = runtime.malloc(bench_size(rig))
        dropped = runtime.counter("tasks_dropped")
        runtime.set_plan(f"kernel_ms=1000; kernel:1:{AICORE_EXCEPTION}")
        rig.launch(stream)
        source = queue_upload(runtime, rig.addresses["mean"], 8, stream)
        assert runtime.status("aclrtSynchronizeStream", stream) == AICORE_EXCEPTION
        assert runtime.counter("tasks_dropped") == dropped + 1
        # Another thread, not told yet, gets the code as well, on whatever stream.
        assert in_thread(lambda: self._queue(runtime, plain, other)) == AICORE_EXCEPTION
        assert runtime.status("aclrtSynchronizeStream", other) == AICORE_EXCEPTION
        runtime.call("aclrtFreeHost", source)
        runtime.call("aclrtFree", plain)
        runtime.call("aclrtDestroyStream", other)

    def _queue(self, runtime: Runtime, address: int, stream: int) -> int:
        runtime.call("aclrtSetDevice", 0)
        code = runtime.status("aclrtMemsetAsync", address, 8, 0, 8, stream)
        runtime.call("aclrtResetDevice", 0)
        return code

    def test_but_no_other_device(self, runtime: Runtime, stream: int, rig: Rig) -> None:
        runtime.set_plan(f"ndev=2; kernel:1:{AICORE_EXCEPTION}")
        rig.launch(stream)
        assert runtime.status("aclrtSynchronizeStream", stream) == AICORE_EXCEPTION
        runtime.call("aclrtSetDevice", 1)
        healthy, elsewhere = runtime.stream(), Rig(runtime)
        elsewhere.launch(healthy)
        runtime.call("aclrtSynchronizeStream", healthy)
        elsewhere.close()
        runtime.call("aclrtDestroyStream", healthy)
        runtime.call("aclrtResetDevice", 1)
        runtime.call("aclrtSetDevice", 0)
        runtime.call("aclrtResetDevice", 0)

    def test_a_stream_may_go_on_after_failures(self, runtime: Runtime, rig: Rig) -> None:
        stream = runtime.stream(stops=False)
        runtime.set_plan(f"kernel:1:{AICORE_EXCEPTION}")
        rig.launch(stream)
        assert runtime.status("aclrtSynchronizeStream", stream) == AICORE_EXCEPTION
        rig.launch(stream)
        assert runtime.status("aclrtSynchronizeStream", stream) == SUCCESS
        runtime.call("aclrtDestroyStream", stream)

    def test_a_poisoned_context_may_just_return_the_code(
        self, runtime: Runtime, stream: int, rig: Rig
    ) -> None:
        runtime.set_plan(f"poisoned=code; kernel:1:{AICORE_EXCEPTION}")
        rig.launch(stream)
        for _ in range(2):
            assert runtime.status("aclrtSynchronizeStream", stream) == AICORE_EXCEPTION
            assert (
                runtime.status("aclrtMemsetAsync", rig.addresses["mean"], 8, 0, 8, stream) == AICORE_EXCEPTION
            )


class TestMessages:
    def test_are_of_one_thread_and_fetched_once(self, runtime: Runtime) -> None:
        runtime.status("aclrtSetDevice", 98)
        runtime.status("aclrtSetDevice", 99)
        assert in_thread(runtime.message) == ""
        text = runtime.message()
        assert text.index("no device 98") < text.index("no device 99")
        assert runtime.message() == ""

    def test_stale_ones_stay_after_a_success(self, runtime: Runtime) -> None:
        runtime.set_plan("aclrtMalloc:1:stale:msg=some tolerated failure")
        runtime.call("aclrtFree", runtime.malloc(64))
        assert "some tolerated failure" in runtime.message()

    def test_the_last_error_stays_until_it_is_taken(self, runtime: Runtime) -> None:
        runtime.status("aclrtSetDevice", 99)
        runtime.call("aclrtFree", runtime.malloc(64))
        assert runtime.status("aclrtPeekAtLastError", 0) == INVALID_DEVICE
        assert runtime.status("aclrtGetLastError", 0) == INVALID_DEVICE
        assert runtime.status("aclrtPeekAtLastError", 0) == SUCCESS


class TestDeterminism:
    def test_is_an_option_of_the_context(self, runtime: Runtime) -> None:
        own = runtime.pointer("aclrtGetCurrentContext")
        other = runtime.pointer("aclrtCreateContext", 0)
        runtime.call("aclrtCtxSetSysParamOpt", DETERMINISTIC, 1)
        assert runtime.number("aclrtCtxGetSysParamOpt", ctypes.c_int64, DETERMINISTIC) == 1
        runtime.call("aclrtSetCurrentContext", own)
        assert runtime.number("aclrtCtxGetSysParamOpt", ctypes.c_int64, DETERMINISTIC) == 0
        runtime.call("aclrtDestroyContext", other)


def bench_size(rig: Rig) -> int:
    """Size of the workspace of a rig."""
    size, executor = rig.plan()
    rig.runtime.call("aclDestroyAclOpExecutor", executor)
    return size
