"""Starts a server for the demo on a free loopback port, and stops it."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
_READY = "listening on "


class ServiceMissing(RuntimeError):
    """The service is not installed; the message says what to install."""


class ServiceFailed(RuntimeError):
    """The service did not start; the message contains its output."""


def require_service() -> None:
    """Checks that a service can be started here.

    Raises:
        ServiceMissing: It is not installed.
    """
    if find_spec("npugrad_server") is None:
        raise ServiceMissing("the service is not installed: pip install ./server in a checkout of npugrad")


@contextmanager
def local_service(*arguments: str) -> Iterator[str]:
    """Runs `npugrad-server serve` on a free loopback port; yields its address.

    Args:
        arguments: Further flags of `npugrad-server serve`.

    Raises:
        ServiceFailed: The service did not start.
    """
    command = [sys.executable, "-m", "npugrad_server", "serve", "--listen", "127.0.0.1:0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        yield _address(process, reader, errors)
    finally:
        _stop(process)


def _address(process: subprocess.Popen[str], reader: threading.Thread, errors: list[str]) -> str:
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        for line in process.stdout or ():
            if line.startswith(_READY):
                return line.removeprefix(_READY).strip()
    finally:
        timer.cancel()
    process.wait()
    reader.join(timeout=5)
    raise ServiceFailed("the service did not start; it said:\n" + "".join(errors[-20:]).rstrip())


def _stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
