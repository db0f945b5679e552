"""CANN from Python: its libraries, its functions, checked objects, the two-phase launch.

Three layers of ctypes, each knowing only the one below: `symbols` (names and types), `libraries` (where they
are), `runtime`, `tensor` and `launcher` (objects that check every code and release what they took). `layout`
(what goes to the device) and `faults` (what a code means) are pure. Nothing here knows an operator's name,
and only `bare` allocates device memory or makes a stream: callers pass addresses.
"""

from __future__ import annotations
