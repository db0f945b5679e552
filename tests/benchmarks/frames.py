"""How many Python frames a call enters on its way: what the interpreter has to do for it, in numbers.

One GroupNorm call of 1 KiB after another, warm, by `Client`, to a simulated device, which leaves the operator
itself out. Every event ``call`` of `sys.setprofile` counts, resumptions of coroutines and generators
included, in all threads of client, front process and worker. A frame belongs to the call that was the latest
to start, so what is done after an answer counts for the next call; what is done for many calls at once, such
as writing the log, is in the mean and hardly in the median.

``python -m tests.benchmarks.frames`` prints where the frames are, ``--by function`` in more detail.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.benchmarks.contestant import tell
from tests.benchmarks.counting.sitecustomize import DONE, FOLDER
from tests.benchmarks.goals import Figure, at_most, figure
from tests.benchmarks.harness import Effort
from tests.benchmarks.processes import ROOT, LineProcess, import_path
from tests.benchmarks.service_under_test import service

from npugrad.ops import get_operator
from npugrad_client import Client

TITLE = "Python frames of a call"
SUBTITLE = "GroupNorm of 1 KiB, warm, one call after another, simulated device; all threads and processes"
GOAL = at_most(500, 300)
CLIENT, FRONT, WORKER = "client", "front process", "worker"
_DEVICES = "test:1?ms=0"
_SIZES = {"n": 2, "c": 8, "hxw": 16, "group": 2}
_WARM_UP_CALLS, _CALLS = 300, 100
_PLACE = ("GroupNorm, 1 KiB", "float32")


@dataclass(frozen=True)
class Frames:
    """What was counted: frames by process, file and function, of each call."""

    calls: tuple[Counter[tuple[str, str, str]], ...]

    def of(self, process: str = "") -> list[int]:
        return [
            sum(count for place, count in call.items() if process in ("", place[0])) for call in self.calls
        ]

    def places(self, depth: int) -> list[tuple[float, str]]:
        """Mean of a call and place, the most first; 1 deep processes, 2 files as well, 3 functions, too."""
        found: Counter[str] = Counter()
        for call in self.calls:
            for place, count in call.items():
                found["  ".join(place[:depth])] += count
        return [(count / len(self.calls), place) for place, count in found.most_common()]


def run(effort: Effort) -> Iterator[Figure]:
    found = count_frames(_CALLS // 4, _WARM_UP_CALLS // 4) if effort.quick else count_frames()
    peers = {name: statistics.median(found.of(name)) for name in (CLIENT, FRONT, WORKER)}
    yield figure(_PLACE, f"frames, median of {len(found.calls)} calls", found.of(), GOAL, peers=peers)
    yield figure(_PLACE, f"frames, mean of {len(found.calls)} calls", [statistics.mean(found.of())], None)


def count_frames(calls: int = _CALLS, warm_up_calls: int = _WARM_UP_CALLS) -> Frames:
    """Runs a server and a client, and counts the frames of so many calls after others."""
    with tempfile.TemporaryDirectory(prefix="npugrad-frames-") as name:
        folder = Path(name)
        (folder / "switch").write_bytes(b"\0")
        environment = _environment(folder)
        with service(_DEVICES, environment) as address:
            told = "--calls-to", address, f"--calls={calls}", f"--warm-up-calls={warm_up_calls}"
            with LineProcess("tests.benchmarks.frames", *told, environment=environment) as client:
                client.read()
        # Each has written what it counted by now: the first frame after the last call makes it.
        return _read(folder, calls)


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).with_name("counting")), import_path()["PYTHONPATH"]])
    return {"PYTHONPATH": path, FOLDER: str(folder)}


def _read(folder: Path, count: int) -> Frames:
    calls: tuple[Counter[tuple[str, str, str]], ...] = tuple(Counter() for _ in range(count))
    for file in folder.glob("*.json"):
        found = json.loads(file.read_text())
        process = _role(found["command"])
        for call, code_file, function, count in found["counts"]:
            if not code_file.startswith(str(Path(__file__).parent)):
                calls[call - 1][process, _short(code_file), function] += count
    return Frames(calls)


def _role(command: list[str]) -> str:
    if "npugrad_server.worker" in command:
        return WORKER
    return FRONT if "npugrad_server" in command else CLIENT


def _short(file: str) -> str:
    """The name of a file without where it is installed."""
    for parent in (ROOT, *map(Path, sorted(sys.path, key=len, reverse=True))):
        if parent.name and Path(file).is_relative_to(parent):
            found = str(Path(file).relative_to(parent))
            if "site-packages" not in found:
                return found
    return file


def _make_calls(address: str, calls: int, warm_up_calls: int) -> None:
    record = get_operator("group_norm_backward")
    call = record.build(dtype="float32", **_SIZES)
    operands = record.make_inputs(call, np.random.default_rng(11))
    method: Any = Client(address).group_norm_backward
    for _ in range(warm_up_calls):
        method(**operands, **call.attrs)
    with (Path(os.environ[FOLDER]) / "switch").open("r+b") as file, mmap.mmap(file.fileno(), 1) as switch:
        for number in range(calls):
            switch[0] = number + 1
            method(**operands, **call.attrs)
        switch[0] = DONE
    tell({})


def main() -> None:
    """Counts, and prints where the frames are."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.frames", description=__doc__)
    depths: Mapping[str, int] = {"process": 1, "file": 2, "function": 3}
    parser.add_argument("--by", choices=depths, default="file", help="how the frames are shown")
    parser.add_argument("--calls-to", help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, default=_CALLS, help="how many are counted")
    parser.add_argument("--warm-up-calls", type=int, default=_WARM_UP_CALLS, help="how many before them")
    options = parser.parse_args()
    if options.calls_to:
        _make_calls(options.calls_to, options.calls, options.warm_up_calls)
        return
    found = count_frames(options.calls, options.warm_up_calls)
    for mean, place in found.places(depths[options.by]):
        sys.stdout.write(f"{mean:8.2f}  {place}\n")
    for process in ("", CLIENT, FRONT, WORKER):
        sys.stdout.write(f"{process or 'all'}: {statistics.median(found.of(process)):g}, median\n")


if __name__ == "__main__":
    main()
