"""Holds up one stage of every call, in any interpreter that has this folder on its PYTHONPATH.

Which stage, a file says, so that one server does for all of them.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

DELAY_S = 0.05
VARIABLE = "DELAYED_STAGE_FILE"
"""Names the file with the stage that is held up in the server."""
SERVER: Mapping[str, Sequence[str]] = {
    "decode": ["npugrad.signature:SignatureReader.read"],
    "validate": ["npugrad_server.plans:validate_call"],
    "receive": ["npugrad_server.dispatch:write_inline"],
    "queued": ["npugrad_server.worker.loop:execute"],
    "copy_in": ["npugrad_server.worker.execute:arrays"],
    "run": ["npugrad_server.backends.test:TestBackend.run"],
    "copy_out": ["npugrad_server.backends.test:TestBackend.run"],
    "verify": ["npugrad_server.worker.verifier:Verifier._compare"],
    "encode": ["npugrad.codec:encode_info", "npugrad_server.dispatch:encode_info"],
    "send_back": ["npugrad_server.rpc.streaming:Frames.write"],
}
"""What has a part in each stage of the server: a delay before it is one of the stage."""
_TOLD = ("run", "copy_out")
"""Stages of which a backend says itself how long they took."""


def hold_up(place: str, stage: str, is_held: Callable[[], bool]) -> Callable[[], None]:
    """Puts a delay before a function.

    Args:
        place: Module and name of the function.
        stage: The stage that it is part of.
        is_held: Tells of each call of the function whether it is held up.

    Returns:
        What takes the delay away.
    """
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    work = getattr(owner, name)

    @wraps(work)
    def slow(*args: Any, **kwargs: Any) -> Any:
        if not is_held():
            return work(*args, **kwargs)
        time.sleep(DELAY_S)
        result = work(*args, **kwargs)
        if stage in _TOLD:
            field = f"{stage}_s"
            result = replace(result, **{field: getattr(result, field) + DELAY_S})
        return result

    setattr(owner, name, slow)
    return lambda: setattr(owner, name, work)


def _hold_up_server(file: Path) -> None:
    for stage, places in SERVER.items():
        for place in places:
            hold_up(place, stage, lambda stage=stage: file.read_text() == stage)  # type: ignore[misc]


if VARIABLE in os.environ:
    _hold_up_server(Path(os.environ[VARIABLE]))
