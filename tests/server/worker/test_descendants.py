"""What is left of a worker's descendants while they end."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from npugrad_server.worker import descendants


def test_one_that_is_ending_is_waited_for_when_its_mark_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes its memory, the environment in it, before its files."""
    looked: list[int] = []
    kill = os.kill

    def has_mark(pid: int, _: str) -> bool:
        looked.append(pid)
        if pid == helper.pid and looked.count(pid) == 3:
            kill(pid, signal.SIGKILL)
        return pid == helper.pid and looked.count(pid) == 1

    with subprocess.Popen(["sleep", "60"], start_new_session=True) as helper:
        try:
            monkeypatch.setattr(descendants, "_has_mark", has_mark)
            with monkeypatch.context() as killing:
                killing.setattr(os, "kill", lambda *_: None)  # it takes its time
                assert descendants.end_descendants("mark", -1, 60) == []
            assert looked.count(helper.pid) >= 3
        finally:
            helper.kill()
    assert descendants.end_descendants("mark", -1, 60) == []
