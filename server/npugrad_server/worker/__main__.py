"""Entry point of a worker process: ``python -m npugrad_server.worker DEVICE CONTROL_FD [CANN]``.

DEVICE identifies the process in process lists; the device to open comes over the socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from npugrad.ops import OPERATORS
from npugrad.profiles import records_at
from npugrad.releases import CannRelease
from npugrad_server.worker.descendants import keep_from_programs, leave
from npugrad_server.worker.loop import Worker
from npugrad_server.worker.memory import keep_freed_memory
from npugrad_server.worker.verifier import NAME, Verifier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.operator import OpRecord


def main(arguments: list[str], records: Mapping[str, OpRecord] = OPERATORS) -> int:
    """Runs a worker until its socket is closed.

    Args:
        arguments: Name of the device, or `verifier.NAME`; number of the inherited socket; release of CANN
            whose pages the records follow, if not their own.
        records: The operators by name.

    Returns:
        Exit status.
    """
    faulthandler.enable()
    keep_from_programs()
    # A terminal or a service manager signals the whole group, but accepted calls must finish while the
    # server drains: only the server ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # When memory runs out, a worker should be killed rather than the server: its calls are run again.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    control = socket.socket(fileno=int(arguments[1]))
    records = records_at(records, next(map(CannRelease.parse, arguments[2:]), None))
    if arguments[0] == NAME:
        return Verifier(control, records).serve()
    keep_freed_memory()
    return Worker(control, records).serve()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Not sys.exit: threads of vendor libraries may still run and must not delay the exit.
    sys.stderr.flush()
    leave(status)
