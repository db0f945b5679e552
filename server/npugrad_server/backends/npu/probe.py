"""Finds this host's NPUs: ``python -m npugrad_server.backends.npu.probe``, run before workers are started.

It is a separate process, because the front process must not load CANN, nor hang or crash with the driver. It
writes one JSON object to standard output. It takes nothing: it sets no device and does not import torch.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from npugrad_server.acl.libraries import Cann, LibraryError
from npugrad_server.acl.release import installed_release, pairing
from npugrad_server.acl.runtime import AclError, Runtime
from npugrad_server.backends.base import DeviceUnusable
from npugrad_server.backends.npu.bringup import check_packages
from npugrad_server.npus import and_visibility, device_nodes, visibility


def probe() -> dict[str, Any]:
    """Number of devices, chip, versions, and every problem found on the way."""
    found: dict[str, Any] = {
        "count": 0,
        "soc": "",
        "cann": "",
        "simulated": False,
        "problems": [],
        "notes": [],
    }
    try:
        found["packages"] = check_packages()
    except DeviceUnusable as error:
        found["problems"].append(str(error))
    try:
        cann = Cann()
    except LibraryError as error:
        found["problems"].append(str(error))
        return found
    found["simulated"] = cann.simulated
    _ask(Runtime(cann.runtime), found)
    return found


def _ask(runtime: Runtime, found: dict[str, Any]) -> None:
    release = installed_release(runtime)
    found["cann"] = str(release or "")
    unpaired = pairing(found.get("packages", {}).get("torch_npu", ""), release)
    found["notes"] += filter(None, (unpaired, visibility()))
    try:
        runtime.initialize()
        found["count"] = runtime.device_count()
        found["soc"] = runtime.soc_name()
    except AclError as error:
        nodes = ", ".join(device_nodes()) or "none"
        found["problems"].append(
            and_visibility(
                f"{error}; expected the NPU driver to answer: device nodes /dev/davinci* found: {nodes}"
            )
        )
        return
    if not found["count"]:
        found["problems"].append(and_visibility("CANN finds no NPU on this host"))


if __name__ == "__main__":
    # CANN and the driver write their logs to standard output if the environment tells them to.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    json.dump(probe(), answer)
    answer.flush()
    # Without CANN's exit handlers: there is nothing to release, and a broken driver would make them hang.
    os._exit(0)
