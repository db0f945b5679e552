"""Counts the Python frames that the threads of this process enter while a switch says so.

Any interpreter that has this folder on its PYTHONPATH imports it before its program; see
`tests.benchmarks.frames`. It asks for nothing but the standard library, as workers start light.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

FOLDER = "FRAMES_FOLDER"
"""Variable that names the folder of the switch, where the counts go as well."""
OFF, DONE = 0, 255
"""What the switch says beside the number of the call that is counted, 1 to 254."""


def _watch(folder: Path) -> None:
    with (folder / "switch").open("rb") as file:
        switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    counts: dict[tuple[int, CodeType, str], int] = {}
    written = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal written
        call = switch[0]
        if event != "call" or call == OFF:
            return
        if call != DONE:
            key = (call, frame.f_code, _name(frame))
            counts[key] = counts.get(key, 0) + 1
        elif not written:
            written = True
            _write(folder, counts)

    threading.setprofile(profile)
    sys.setprofile(profile)


def _name(frame: FrameType) -> str:
    """Name of a function; of a constructor, that of the class whose object it makes."""
    code = frame.f_code
    is_record = code.co_name == "<lambda>" and code.co_varnames[:1] == ("_cls",)  # of a NamedTuple
    if not is_record and code.co_name not in ("__init__", "__new__"):
        return code.co_name
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
    made = first if isinstance(first, type) else type(first)
    return f"{made.__module__}.{made.__qualname__}()"


def _write(folder: Path, counts: dict[tuple[int, CodeType, str], int]) -> None:
    import json

    found = [(call, code.co_filename, name, count) for (call, code, name), count in counts.items()]
    (folder / f"{os.getpid()}.json").write_text(json.dumps({"command": sys.orig_argv, "counts": found}))


if FOLDER in os.environ:
    _watch(Path(os.environ[FOLDER]))
