"""Names of columns that the HTML report draws as charts, in tables of any step."""

from __future__ import annotations

TIME = "time [s]"
"""If it is the first column, every other column of numbers becomes a line over time."""
STAGES = ("copy in [ms]", "run [ms]", "copy out [ms]")
"""If all three are there, each row becomes a bar of three parts."""
P90 = "p90 [ms]"
"""Marked on the bar of `STAGES`."""
CALLS_PER_S = "calls/s"
"""A column whose name begins with this becomes a bar chart."""
