"""Planned calls that differ from others in their plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npugrad_server.pool import PlannedCall


def altered(planned: PlannedCall, **changes: Any) -> PlannedCall:
    """The call with a plan of its own, of which some attributes are others."""
    return replace(planned, plan=replace(planned.plan, **changes))
