"""How often a call is tried, and after which answers: limits and reasons as data, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npugrad_server.pool.ledger import CallRecord

SUSPECT_ATTEMPTS = 2
"""Tries of a call that end with a worker once a device failed under it: what it makes devices fail with, it
would do everywhere."""

ELSEWHERE = frozenset({"DEVICE_OUT_OF_MEMORY", "DEVICE_BUSY"})
"""Rows of the error table that tell of this device at this moment, and of nothing else: its memory, or its
streams, events and tasks, ran out. The operators are pure, so that another device may well have the result.
Every other answer of a worker is about the call, and would be the same elsewhere."""


def may_go_elsewhere(call: CallRecord, most: int) -> bool:
    """Whether a call that its device could not take may be tried on another one: once, and no suspect.

    Args:
        call: The call.
        most: Tries that a call has at most.
    """
    wanted = not call.void and not call.suspect
    return wanted and call.declined_by is None and call.attempts < most


def may_run_again(call: CallRecord, most: int) -> bool:
    """Whether a call whose worker died under it may be tried again.

    Args:
        call: The call.
        most: Tries that a call has at most.
    """
    return call.attempts < most and not (call.suspect and call.deaths >= SUSPECT_ATTEMPTS)


def words_of_loss(call: CallRecord, last: str) -> str:
    """What the caller of a call is told that is given up because workers died under it.

    Args:
        call: The call.
        last: How the last of them ended.
    """
    tries = "each" if call.deaths == call.attempts else str(call.deaths)
    return f"its worker died at {tries} of {call.attempts} tries; last: {last}"
