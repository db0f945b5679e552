"""Programs that use the client, each in a process of its own: a fork of one that has imported it already.

Importing takes half a second of a processor. What is about imports, or about what libraries read of the
environment meanwhile, needs an interpreter.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
from functools import cache
from typing import IO

from tests.zygote import Process, Zygote

LIMIT_S = 300
"""A program that hangs ends by SIGALRM."""


@cache
def _zygote() -> Zygote:
    return Zygote(sys.executable, environment(), __name__, "tests.client.both")


def environment(**more: str) -> dict[str, str]:
    """The environment of this process, without what changes how gRPC forks, and what is given."""
    return {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"} | more


def start(code: str, *arguments: str, stderr: IO[str], **env: str) -> Process:
    """Starts Python code, or the module that ``"-m name"`` names."""
    return _zygote().fork([textwrap.dedent(code), *arguments], environment(**env), stderr)


def run(code: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as stderr:
        process = start(code, *map(str, arguments), stderr=stderr, **env)
        assert process.stdout is not None
        with process.stdout as stdout:
            output = stdout.read()
        status = process.wait(LIMIT_S)
        stderr.seek(0)
        return subprocess.CompletedProcess(code, status, output, stderr.read())


if __name__ == "__main__":
    signal.alarm(LIMIT_S)
    # Those of the zygote take what they were opened on for a file.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    given = sys.argv.pop(1)
    if given.startswith("-m "):
        runpy.run_module(given[3:], run_name="__main__", alter_sys=True)
    else:
        exec(compile(given, "<program>", "exec", dont_inherit=True), {"__name__": "__main__"})
