"""The acceptance on hardware: steps that show on a node what no test without an NPU can show.

    report   what was found, as data and JSON
    step     what a step is, and the log it writes to
    steps    the steps
    job      one call with its data
    rig    a real worker process below the validator, driven call by call
    shapes   calls of realistic sizes
    runner   steps one after the other, whatever becomes of each
    limits   what ends a step from outside: signals, and its time
    bundle   one file to send, with what `node` finds

This process never imports torch and never touches the device: workers and short-lived processes do.
"""

from __future__ import annotations
