"""Files that do not answer: read by those who must not wait for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from npugrad_server import watched_files
from npugrad_server.watched_files import FileWatch, read_file, read_files


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads of files named ``hangs`` wait for it, as on a file system that is gone."""
    read, event = watched_files._contents, threading.Event()

    def hanging(path: str) -> bytes | OSError:
        if path.endswith("hangs"):
            event.wait()
        return read(path)

    monkeypatch.setattr(watched_files, "_contents", hanging)
    monkeypatch.setattr(watched_files, "ANSWER_S", 0.05)
    yield event
    event.set()


@pytest.mark.parametrize("kind", ["none", "folder", "pipe"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(OSError, match=r"No such file|Is a directory|not a regular file"):
        read_file(str(path))


def test_a_file_that_hangs_takes_one_thread_and_is_read_once_it_answers(
    tmp_path: Path, released: threading.Event
) -> None:
    good, bad = tmp_path / "good", tmp_path / "hangs"
    good.write_bytes(b"1")
    bad.write_bytes(b"2")
    threads = threading.active_count()
    for _ in range(3):
        found, late = read_files([str(good), str(bad)])
        assert found == b"1"
        assert isinstance(late, TimeoutError)
        assert late.strerror == "no answer within 0.05 s"
        assert threading.active_count() <= threads + 1
    released.set()
    watched_files._unanswered[str(bad)].result(60)
    assert read_file(str(bad)) == b"2"
    good.write_bytes(b"3")
    assert read_file(str(good)) == b"3"


async def test_what_changes_is_not_taken_until_it_stays_the_same() -> None:
    values = iter([1, 2, 3, 3, 4, 4, 4, 4])
    watch = FileWatch(lambda: next(values), 0.0)
    found = watch.settled()
    assert [await anext(found), await anext(found)] == [4, 4]
    assert watch.look_count == 7
    await found.aclose()  # type: ignore[attr-defined]
