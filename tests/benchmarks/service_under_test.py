"""Our server as the benchmarks run it: a process of its own, with production defaults."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.processes import import_path
from tests.fix_server import SERVER_PROGRAM, ServerProcess, run_server

# Arenas that hold the largest case some times over; what they are filled with at start is the default.
_FLAGS = ("--input-arena-bytes", "1GiB", "--output-arena-bytes", "512MiB", "--prefault-bytes", "64MiB")


@contextmanager
def running_service(
    devices: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = SERVER_PROGRAM,
) -> Iterator[ServerProcess]:
    """A server on loopback, which fails when its end was not clean; see `tests.fix_server.run_server`."""
    # As many threads for linear algebra as its peers take by default.
    threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    # Where it may be a fork of a process that has imported it, as in tests, the path would forbid it.
    more = (
        {} if program == SERVER_PROGRAM and environment is None else {**import_path(), **(environment or {})}
    )
    with (
        tempfile.TemporaryDirectory(prefix="npugrad-bench-") as folder,
        run_server(
            Path(folder) / "server.log",
            *_FLAGS,
            *flags,
            devices=devices,
            env={"OMP_NUM_THREADS": threads, **more},
            program=program,
        ) as running,
    ):
        yield running


@contextmanager
def service(
    devices: str, environment: Mapping[str, str] | None = None, program: Sequence[str] = SERVER_PROGRAM
) -> Iterator[str]:
    with running_service(devices, environment=environment, program=program) as running:
        yield running.address
