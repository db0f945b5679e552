from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from npugrad import get_operator
from npugrad.call import CallOptions
from npugrad.errors import DeadlineExceeded, DeviceOutOfMemory
from npugrad_server.backends.base import CallAbandoned, CallPostponed
from npugrad_server.worker.call import WorkerCall
from npugrad_server.worker.protocol import (
    AbandonCall,
    Message,
    NeedWorkspace,
    RunCall,
    WorkspaceGranted,
    WorkspaceRefused,
)


def order(**changes: Any) -> RunCall:
    record = get_operator("group_norm_backward")
    meta = record.build()
    run = RunCall(7, record.name, meta, record.infer(meta), CallOptions(), {}, {}, workspace_bytes=0)
    return replace(run, **changes)


class Pool:
    """Answers every question, from another thread, as a worker's listening thread does."""

    def __init__(self, *replies: WorkspaceGranted | WorkspaceRefused) -> None:
        self.replies = list(replies)
        self.asked: list[Message] = []
        self.talk = WorkerCall(order(), self.send, timeout_s=30)
        self.threads: list[threading.Thread] = []

    def send(self, message: Message) -> None:
        self.asked.append(message)
        reply = self.replies.pop(0)
        self.threads.append(threading.Thread(target=lambda: self.talk.hear(reply)))
        self.threads[-1].start()

    def end(self) -> None:
        for thread in self.threads:
            thread.join()


def test_what_was_granted_is_asked_for_once() -> None:
    pool = Pool(WorkspaceGranted(7), WorkspaceGranted(7))
    pool.talk.reserve_workspace(100)
    pool.talk.reserve_workspace(100)  # as a second try after the device had no memory
    pool.talk.reserve_workspace(60)
    assert pool.asked == [NeedWorkspace(7, 100)]
    pool.talk.reserve_workspace(101)
    assert pool.asked[1:] == [NeedWorkspace(7, 101)]
    pool.end()


@pytest.mark.parametrize("set_aside", [None, 100, 5000])
def test_what_is_set_aside_or_not_counted_is_not_asked_for(set_aside: int | None) -> None:
    asked: list[Message] = []
    talk = WorkerCall(order(workspace_bytes=set_aside), asked.append)
    talk.reserve_workspace(100)
    assert asked == []


def test_no_room_now_postpones_the_call() -> None:
    pool = Pool(WorkspaceRefused(7, False, 5000))
    with pytest.raises(CallPostponed) as caught:
        pool.talk.reserve_workspace(100)
    assert caught.value.workspace_bytes == 100
    pool.end()


def test_room_never_is_an_error_with_numbers() -> None:
    pool = Pool(WorkspaceRefused(7, True, 5000))
    with pytest.raises(DeviceOutOfMemory) as caught:
        pool.talk.reserve_workspace(6000)
    assert str(caught.value) == (
        "group_norm_backward: found 6000 bytes of workspace needed by the device's operator; expected at "
        "most 5000 in addition to its tensors"
    )
    assert (caught.value.reason, caught.value.source) == ("DEVICE_OUT_OF_MEMORY", "device")
    pool.end()


def test_a_pool_that_does_not_answer_postpones_the_call() -> None:
    asked: list[Message] = []
    talk = WorkerCall(order(), asked.append, timeout_s=0.05)
    start = time.monotonic()
    with pytest.raises(CallPostponed):
        talk.reserve_workspace(100)
    assert 0.05 <= time.monotonic() - start < 10
    assert asked == [NeedWorkspace(7, 100)]


def test_whether_anybody_waits() -> None:
    talk = WorkerCall(order(deadline_s=time.monotonic() + 60), lambda _: None)
    talk.check_wanted()
    talk.hear(AbandonCall(7))
    with pytest.raises(CallAbandoned):
        talk.check_wanted()
    late = WorkerCall(order(deadline_s=time.monotonic()), lambda _: None)
    with pytest.raises(DeadlineExceeded, match="group_norm_backward: the deadline passed before the launch"):
        late.check_wanted()
    WorkerCall(order(), lambda _: None).check_wanted()
