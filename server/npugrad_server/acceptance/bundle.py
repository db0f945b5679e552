"""One file to send when an acceptance did not go well: the report, and everything that explains it.

The file is complete at any time: at the start and after every stage, a new one is written next to it and then
replaces it. However the process ends, everything known until then is there. All contents are bounded in size.

    report.json, report.html, report.log   as written for `--report`
    node/                                  what `node` collects: driver, CANN, kernels, libraries, packages
    logs/                                  the vendor's logs, newest first
    failures/                              operands and results of calls that failed, one .npz for each
    seconds.json                           how long each stage took
    crash.txt                              the traceback, if the acceptance itself failed
"""

from __future__ import annotations

import json
import os
import re
import tarfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy.typing as npt

SUFFIXES = (".tar.gz", ".tgz")
_MIB = 2**20
_FILE_BYTES = 4 * _MIB
"""Bytes kept of the end of each file."""
_LOG_BYTES, _LOG_FILES, _ONE_LOG_BYTES = 16 * _MIB, 200, 1 * _MIB
"""Limits on the vendor's logs: bytes in total, number of files, bytes of the end of each."""
_FAILURES, _FAILURE_BYTES, _ALL_FAILURE_BYTES = 12, 16 * _MIB, 64 * _MIB
"""Limits on failed calls: their number, bytes of each, bytes of all."""
_NAME = re.compile(r"[^\w.-]+")
_NAME_CHARACTERS = 80


class Bundle:
    """The file as it grows; a context manager that writes it a last time on exit."""

    def __init__(self, path: Path, logs: Iterable[Path] = ()) -> None:
        """Creates the folder in which the contents are collected.

        Args:
            path: File to write, with one of `SUFFIXES`.
            logs: Folders with the vendor's logs.
        """
        self.path = path
        self._collected = TemporaryDirectory(prefix="npugrad-bundle-")
        self._folder = Path(self._collected.name)
        self._logs = tuple(logs)
        self._seconds: list[dict[str, Any]] = []
        self._kept_count = self._kept_bytes = 0

    def add_text(self, name: str, text: str) -> None:
        """Adds a file with this text, or as much of its end as fits."""
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode("utf-8", "replace")[-_FILE_BYTES:])

    def add_file(self, name: str, path: Path, most_bytes: int = _FILE_BYTES) -> int:
        """Adds the end of a file, unless it cannot be read; returns the number of bytes added."""
        try:
            content = _end_of(path, most_bytes)
        except OSError:
            return 0
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return len(content)

    def keep(self, name: str, arrays: Mapping[str, npt.NDArray[Any] | None]) -> None:
        """Keeps arrays of a failure, as a `Keeper`; only lists them in the index if there is no room left."""
        there = {key: np.asarray(array) for key, array in arrays.items() if array is not None}
        nbytes = sum(array.nbytes for array in there.values())
        room = nbytes <= min(_FAILURE_BYTES, _ALL_FAILURE_BYTES - self._kept_bytes)
        self._kept_count += 1
        with self._open("failures/index.txt", "a") as index:
            index.write(f"{self._kept_count} {name}: {nbytes} bytes\n")
            for key, array in there.items():
                index.write(f"    {key} {array.dtype} {array.shape}\n")
        if room and self._kept_count <= _FAILURES:
            self._kept_bytes += nbytes
            file = f"failures/{self._kept_count:02}-{_NAME.sub('_', name)[:_NAME_CHARACTERS]}.npz"
            # Types unknown to NumPy, such as bfloat16, are stored as bits; the index has their names.
            bits = {key: _bits(array) for key, array in there.items()}
            np.savez_compressed(self._folder / file, allow_pickle=False, **bits)

    def _open(self, name: str, mode: str) -> Any:
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.open(mode, encoding="utf-8")

    def took(self, stage: str, seconds: float, note: str = "") -> None:
        """Notes how long a stage took."""
        self._seconds.append({"stage": stage, "seconds": round(seconds, 3), "note": note})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Runs a stage in a block: notes its seconds and writes the file, even if it fails."""
        start, note = time.monotonic(), ""
        try:
            yield
        except BaseException as error:
            note = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.took(name, time.monotonic() - start, note)
            self.write()

    def write(self) -> None:
        """Writes the file as it stands.

        Raises:
            OSError: It cannot be written.
        """
        self.add_text("seconds.json", json.dumps(self._seconds, indent=1) + "\n")
        self._add_logs()
        part = self.path.with_name(self.path.name + ".part")
        top = self.path.name.partition(".")[0]
        with tarfile.open(part, "w:gz", compresslevel=6) as archive:
            archive.add(self._folder, arcname=top)
        os.replace(part, self.path)

    def _add_logs(self) -> None:
        room = _LOG_BYTES
        for folder, path in newest_files(self._logs)[:_LOG_FILES]:
            if room <= 0:
                break
            name = f"logs/{self._logs.index(folder)}/{path.relative_to(folder)}"
            room -= self.add_file(name, path, min(room, _ONE_LOG_BYTES))

    def __enter__(self) -> Bundle:
        """Writes the file for the first time, so that an unwritable path fails at once."""
        try:
            self.write()
        except OSError:
            self._collected.cleanup()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Writes it for the last time."""
        if error is not None:
            words = traceback.format_exception(type(error), error, error.__traceback__)
            self.add_text("crash.txt", "".join(words))
        self.write()
        self._collected.cleanup()


def newest_files(folders: Iterable[Path], most: int = 20_000) -> list[tuple[Path, Path]]:
    """Returns the files below folders, each with its folder, newest first; links are not followed.

    Args:
        folders: Where to look; a missing folder has no files.
        most: Maximum number of files to look at in total.
    """
    found: list[tuple[float, Path, Path]] = []
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                path = Path(place) / name
                if len(found) >= most:
                    break
                if path.is_file() and not path.is_symlink():
                    found.append((path.stat().st_mtime, folder, path))
    return [(folder, path) for _, folder, path in sorted(found, key=lambda one: -one[0])]


def _end_of(path: Path, most_bytes: int) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most_bytes))
        return file.read(most_bytes)


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind in "biufc":
        return array
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
