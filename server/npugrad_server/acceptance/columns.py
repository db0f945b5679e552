"""Names of columns that the page knows how to draw, whichever step made the table."""

from __future__ import annotations

TIME = "time [s]"
"""As the first column: every other column of numbers becomes a line over time."""
STAGES = ("copy in [ms]", "run [ms]", "copy out [ms]")
"""All three: each row becomes a bar of three parts."""
P90 = "p90 [ms]"
"""Beside `STAGES`: marked on the bar."""
CALLS_PER_S = "calls/s"
"""A column whose name begins so becomes a chart of bars."""
