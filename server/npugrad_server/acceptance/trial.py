"""Runs the trials of `npugrad_server.backends.npu.trials`: processes that reach a device without a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from npugrad_server.backends.npu.trials.exchange import (
    ANSWER,
    LINES,
    OPERANDS,
    ORDER,
    RESULTS,
    read_contents,
    write_contents,
)
from npugrad_server.worker.descendants import MARK, end_descendants

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from npugrad_server.backends.npu.trials.exchange import Contents

TIMEOUT_S = 900.0
_END_S = 5.0
"""Seconds the kernel has to end what a trial has left behind."""
_MOST_WORDS = 600
_WORDS = "words.txt"


class TrialFailed(Exception):
    """A trial ended without its answer; the message says how, with its last output."""


class Trial:
    """One trial and its folder; made by `Rig.trial`."""

    def __init__(self, name: str, folder: Path) -> None:
        """Runs nothing yet.

        Args:
            name: Module of the trials.
            folder: Folder for order and answer.
        """
        self._name, self._folder = name, folder

    def run(self, order: Any, operands: Contents | None = None, timeout_s: float = TIMEOUT_S) -> Any:
        """Runs the trial on an order and returns its answer; may be called again.

        Args:
            order: As the module describes it.
            operands: Bytes that go with it.
            timeout_s: Seconds it may take.

        Raises:
            TrialFailed: It ended without an answer, or took longer.
        """
        for name in (ANSWER, LINES, RESULTS):
            (self._folder / name).unlink(missing_ok=True)
        (self._folder / ORDER).write_text(json.dumps(order))
        write_contents(self._folder / OPERANDS, operands or {})
        command = [
            sys.executable,
            "-m",
            f"npugrad_server.backends.npu.trials.{self._name}",
            str(self._folder),
        ]
        status = self._run(command, timeout_s)
        said = (self._folder / _WORDS).read_bytes()
        os.write(2, said)
        if status is None:
            raise TrialFailed(f"{self._name}: took more than {timeout_s:g} s")
        if status:
            words = " ".join(said.decode("utf-8", "replace").split())[-_MOST_WORDS:]
            raise TrialFailed(f"{self._name}: ended with status {status}: {words}")
        return json.loads((self._folder / ANSWER).read_text())

    def _run(self, command: list[str], timeout_s: float) -> int | None:
        """Runs the process, then ends what vendor libraries forked there, which would keep the device open.

        Returns:
            Its exit status; None if it took longer.
        """
        mark = uuid.uuid4().hex
        with (self._folder / _WORDS).open("wb") as words:  # forked processes would keep a pipe open
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # libraries print to the log
                stderr=words,
                env={"OMP_NUM_THREADS": "1"} | dict(os.environ) | {MARK: mark},
            )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
            end_descendants(mark, process.pid, _END_S)
            process.wait()

    @property
    def lines(self) -> list[Any]:
        """The lines that it wrote while it ran, even if it failed."""
        path = self._folder / LINES
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def results(self) -> dict[str, npt.NDArray[Any]]:
        """Bytes that came with the answer."""
        return read_contents(self._folder / RESULTS)


@contextmanager
def open_trial(name: str) -> Iterator[Trial]:
    """Yields a trial with a temporary folder."""
    with TemporaryDirectory(prefix="npugrad-trial-") as folder:
        yield Trial(name, Path(folder))
