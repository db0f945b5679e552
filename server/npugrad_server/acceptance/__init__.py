"""The acceptance on hardware: steps that check on a node what no test without an NPU can check.

    report   the findings, as data and JSON
    step     the definition of a step, and the log it writes to
    steps    the steps
    job      one call with its data
    rig      a real worker process below the validator, driven call by call
    shapes   calls of realistic sizes
    runner   runs the steps in order, however each of them ends
    limits   ends a step from outside: by a signal or a time limit
    bundle   one file to send, with what `node` collects

This process never imports torch and never touches the device: workers and short-lived processes do.
"""

from __future__ import annotations
