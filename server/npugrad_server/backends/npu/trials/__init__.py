"""Short-lived processes of the acceptance that reach the device without a worker.

Each is run as ``python -m npugrad_server.backends.npu.trials.NAME FOLDER``, reads its order from files in the
folder, and writes its answer there (`exchange`).

    ladder         the device without torch, from loading CANN to a right result, one rung at a time
    surroundings   versions, libraries, functions
    copies         bytes to the device and back, through pinned memory
    phases         the two phases of an operator with tensors exactly as ordered, legal or not
    bindings       torch_npu's own bindings of the same operators: the only one that computes with torch
"""

from __future__ import annotations
