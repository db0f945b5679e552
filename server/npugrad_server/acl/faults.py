"""What each error code of CANN means for the call and for the worker, as data.

Sources: the vendor's page "aclnn return codes", `acl/error_codes/rt_error_codes.h`, and how public callers of
the runtime handle them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What follows from a code.

    Attributes:
        ends_worker: Whether the process that hit it must exit: the device, or the process's view of it,
            cannot be trusted any more.
        retries: Whether the same process may try the call once more.
    """

    ends_worker: bool
    retries: bool

    def __new__(cls, name: str, ends_worker: bool, retries: bool) -> Action:
        """Builds one row of the table."""
        member = object.__new__(cls)
        member._value_ = name
        member.ends_worker, member.retries = ends_worker, retries
        return member

    REFUSE = ("refuse", False, False)
    """The operator refuses the call; the worker is fine."""
    OPERATOR_MISSING = ("operator missing", False, False)
    """The node lacks the operator's kernels."""
    INTERNAL = ("internal", False, False)
    """The operator library failed; the runtime's last error tells whether the device did."""
    OWN_FAULT = ("own fault", False, False)
    """We called the runtime wrongly; never to be tried again."""
    OUT_OF_MEMORY = ("out of memory", False, True)
    """Cached memory is released and the call tried once more."""
    OUT_OF_RESOURCES = ("out of resources", False, True)
    """Streams, events or tasks ran out; tried once more, then the caller may retry."""
    RESUBMIT = ("resubmit", False, True)
    """The vendor asks to submit again."""
    TIMED_OUT = ("timed out", True, False)
    """The work still runs, and its progress is unknown: nothing it may touch can be released."""
    END_WORKER = ("end worker", True, False)
    """The device or its context failed; a new process usually works."""
    BACK_OFF = ("back off", True, False)
    """Driver or device connection failed; a new process needs time."""
    UNAVAILABLE = ("unavailable", True, False)
    """The device cannot be taken now; tried again slowly."""
    QUARANTINE = ("quarantine", True, False)
    """The device's memory or links are damaged; it must not be used."""


@dataclass(frozen=True)
class FaultRow:
    """Codes with one meaning.

    Attributes:
        codes: Ranges of numbers, both ends included.
        action: What follows.
        meaning: In a few words.
    """

    codes: tuple[tuple[int, int], ...]
    action: Action
    meaning: str

    def matches(self, code: int) -> bool:
        """Whether a code is one of these."""
        return any(first <= code <= last for first, last in self.codes)


def _one(*codes: int) -> tuple[tuple[int, int], ...]:
    return tuple((code, code) for code in codes)


FAULTS: tuple[FaultRow, ...] = (
    FaultRow(_one(0), Action.INTERNAL, "no handle, or an error of torch_npu's own"),
    FaultRow(((161000, 161999),), Action.REFUSE, "parameter null or invalid"),
    FaultRow(
        _one(561003, 561107, 561108, 561112),
        Action.OPERATOR_MISSING,
        "kernel binary, operator package path, operator description or kernel package missing",
    ),
    FaultRow(_one(361001), Action.INTERNAL, "a call of the runtime failed"),
    FaultRow(((561000, 561999),), Action.INTERNAL, "the operator library failed internally"),
    FaultRow(_one(207001, 207018, 200000), Action.OUT_OF_MEMORY, "out of memory"),
    FaultRow(_one(207005, 207007, 207008), Action.OUT_OF_RESOURCES, "out of streams, events or tasks"),
    FaultRow(_one(107019), Action.RESUBMIT, "wait timed out, submit again"),
    FaultRow(
        (*_one(100000, 100001, 107008, 107017), (107000, 107003)),
        Action.OWN_FAULT,
        "bad parameter, device, context, stream, alignment or handle",
    ),
    FaultRow(_one(507046, 507047), Action.TIMED_OUT, "stream or event wait timed out"),
    FaultRow(_one(107020, 107022, 107023), Action.END_WORKER, "task timeout, or device or stream aborted"),
    FaultRow(
        (
            (507000, 507001),
            (507010, 507018),
            (507034, 507036),
            (507042, 507045),
            (507048, 507050),
        ),
        Action.END_WORKER,
        "runtime or scheduler error, heartbeat lost, or exception, timeout or trap of a core",
    ),
    FaultRow(((507053, 507057),), Action.QUARANTINE, "memory error, suspect memory or link error"),
    FaultRow(((507899, 507902),), Action.BACK_OFF, "driver error or lost connection to the device"),
    FaultRow(_one(507008, 507033, 207004), Action.UNAVAILABLE, "device unknown, not started or absent"),
)
"""The table; the first row that matches a code counts."""

_BY_CLASS = {
    1: FaultRow((), Action.OWN_FAULT, "caller or environment error"),
    2: FaultRow((), Action.OUT_OF_RESOURCES, "resource error"),
    3: FaultRow((), Action.INTERNAL, "state error"),
    5: FaultRow((), Action.END_WORKER, "internal error of runtime or device"),
}
"""For codes not in the table, by the vendor's rule for the first digit."""
_UNKNOWN = FaultRow((), Action.END_WORKER, "error of unknown class")


def fault_of(code: int, last_error: int = 0) -> FaultRow:
    """The row of a code.

    Args:
        code: What a function returned; 0 if it gave no number.
        last_error: What `aclrtPeekAtLastError` says: it reveals what an operator library's own code hides.
    """
    row = next((row for row in FAULTS if row.matches(code)), None)
    if row is None:
        row = _BY_CLASS.get(code // 100000, _UNKNOWN)
    if row.action is Action.INTERNAL and last_error and last_error // 100000 in (2, 5):
        hidden = fault_of(last_error)
        if hidden.action.ends_worker or hidden.action is Action.OUT_OF_MEMORY:
            return hidden
    return row
