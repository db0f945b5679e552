"""Reads what simulated processes leave in their report folder (CANN_SIM_REPORT_DIR).

It works while they run and after any kind of death: counters lie in a mapped file, lines are written at once.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST_OBJECTS = (
    *("live.tensors", "live.bool_arrays", "live.int_arrays", "live.float_arrays", "live.scalars"),
    "live.executors",
)
"""Counters of what a call takes of CANN on the host, and has to give back whatever happens."""
_MAGIC = b"CANNSIM1"
_RECORD = struct.Struct("<120sq")


@dataclass(frozen=True)
class Report:
    """What the processes that shared a report folder did.

    Attributes:
        folder: The folder.
    """

    folder: Path

    def pids(self) -> list[int]:
        """Processes that used the simulator, in no order."""
        return [int(path.name.rpartition("-")[2]) for path in self.folder.glob("counters-*")]

    def counters(self, pid: int | None = None) -> Counter[str]:
        """Counters of one process, or summed over all of them."""
        total: Counter[str] = Counter()
        for path in self.folder.glob(f"counters-{'*' if pid is None else pid}"):
            total.update(_read_counters(path.read_bytes()))
        return total

    def violations(self) -> list[str]:
        """Every broken rule; an empty list is what a test of correct software asserts."""
        return [line for path in self.folder.glob("violations-*") for line in path.read_text().splitlines()]

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        """Records of the interface (plan entry `record=1`), each process in order."""
        found = [
            json.loads(line) for path in self.folder.glob("abi-*") for line in path.read_text().splitlines()
        ]
        return [record for record in found if event in (None, record["event"])]

    def trace(self) -> list[str]:
        """Names of the functions called (plan entry `trace=1`), each process in order."""
        return [
            line.split()[1] for path in self.folder.glob("trace-*") for line in path.read_text().splitlines()
        ]


def leaks(counters: Counter[str]) -> dict[str, int]:
    """What is still alive, for a process that should have cleaned up; empty when nothing is."""
    return {name: value for name, value in counters.items() if name.startswith("live.") and value}


def write_plan(path: Path, text: str) -> None:
    """Puts a plan into force for running processes that were started with this CANN_SIM_PLAN_FILE."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _read_counters(data: bytes) -> dict[str, int]:
    if data[: len(_MAGIC)] != _MAGIC:
        return {}
    found = {}
    for name, value in _RECORD.iter_unpack(data[_RECORD.size :]):
        text = name.rstrip(b"\0").decode()
        if not text:
            break
        found[text] = value
    return found
