"""CANN from Python: which libraries, which functions, checked objects, the two-phase launch.

Three layers of ctypes, each knowing only the one below: `symbols` (names and types), `libraries` (where they
are), `runtime`, `tensor` and `launcher` (objects that check every code and give back what they took). Pure
are `layout` (what goes to the device) and `faults` (what a code means). Nothing here knows an operator's
name, allocates device memory or makes a stream; whoever calls brings addresses.
"""

from __future__ import annotations
