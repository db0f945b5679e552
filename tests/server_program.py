"""`npugrad-server` whose workers, and an acceptance's trials, are forks of what has imported their programs.

Run in a fork itself, as `tests.fix_server` and `tests.fix_npu` start it: before it has threads, it divides
into the command and the template of what the command starts.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from tests.worker_forks import Template, forked_workers, serve

from npugrad_server.acceptance import trial


class OwnTemplate(Template):
    """A fork of this process, to fork; ends with this one."""

    def __init__(self) -> None:
        with self.prepare() as theirs:
            if os.fork():
                return
            self._control.close()
            serve(theirs)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        sys.exit()


@contextmanager
def forked_trials(template: Template) -> Iterator[None]:
    """The trials of an acceptance are forked for a block."""

    def start(command: list[str], stdin: int, stdout: int, stderr: IO[bytes], env: Mapping[str, str]) -> Any:
        return template.fork(command[2:], (), stdout, stderr.fileno(), env)

    with mock.patch.object(trial, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start})):
        yield


def main() -> None:
    """Divides, and runs the command."""
    template = OwnTemplate()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with forked_workers(template), forked_trials(template):
        runpy.run_module("npugrad_server", run_name="__main__")


if __name__ == "__main__":
    main()
