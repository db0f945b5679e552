"""The fault matrix as data: what happens to simulated NPUs, and what callers and devices must come to.

An entry of a plan is `target:when:action[:option]...`; `total` counts over all processes, so that the worker
which replaces a lost one does not meet the fault again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import grpc
from tests.e2e.harness import RECORDS
from tests.e2e.npu_load import LARGE, WIDE
from tests.operators import FLOYD, GROUP_NORM

NONE, ONE, TWO = range(1), range(1, 2), range(2, 3)
ONE_OR_TWO, SOME = range(1, 3), range(1, sys.maxsize)
UP_TO_ONE, UP_TO_TWO, UP_TO_FOUR = range(2), range(3), range(5)
"""How many; up to so many may be none, and some are one or more."""

PLAN, RUN = f"{GROUP_NORM.aclnn_name}GetWorkspaceSize", GROUP_NORM.aclnn_name
WAIT = "aclrtSynchronizeStreamWithTimeout"
ALL = tuple(record.name for record in RECORDS)
SMALL = tuple(name for name in ALL if name != FLOYD.name)
QUICK = (
    *("--streams-per-device", "2", "--hang-grace-s", "8", "--run-limit-s", "10"),
    *("--respawn-backoff-s", "0.05", "--respawn-backoff-max-s", "0.2"),
    *("--circuit-deaths", "0"),  # it is the device that is at fault, in calls that are legal
    *("--metrics-listen", "127.0.0.1:0"),
)
"""Flags of every server of the matrix."""


@dataclass(frozen=True)
class Expected:
    """An error that callers get.

    Attributes:
        reason: Row of the error table.
        status: gRPC status.
        code: The vendor's number; None when the error carries none.
        words: What the message has to say.
        calls: How many calls get it.
    """

    reason: str
    status: grpc.StatusCode
    code: int | None = None
    words: tuple[str, ...] = ()
    calls: range = ONE


@dataclass(frozen=True)
class Server:
    """A server of the matrix; cases that name the same one share it.

    Attributes:
        name: For its folder.
        count: Devices.
        max_respawns: Failures in a row after which a device is marked down.
        cann: Version of CANN; empty for the newest.
    """

    name: str
    count: int
    max_respawns: int
    cann: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(f"npu:{index}" for index in range(self.count))


CLINIC = Server("clinic", 3, 6)
"""Where devices get well again."""
SINGLE = Server("single", 1, 6)
"""Where there is no other device to go to."""
HOSPICE = Server("hospice", 5, 1)
"""Where each case takes a device of its own out of service."""


@dataclass(frozen=True)
class FaultCase:
    """One row of the matrix.

    Attributes:
        name: Printed with the counts.
        plan: What is injected while calls run.
        errors: What callers may be told.
        elsewhere: Right answers that needed a second try, as the device of the first failed or had no room.
        replaced: Workers started anew until the end.
        sick: Devices that are ill; the others may never stop to serve. Empty: those that restart.
        down: Devices that are out of service as long as the fault is there.
        damaged: Those of them that stay so.
        server: Where it happens.
        operators: What the callers call.
        works: What of it works when the fault is over.
        extra: Further calls, sent one after the other once the fault is there, until it has happened and a
            call has moved, if one must.
        timeout_s: Deadline of every call of the load; None for none.
        extra_timeout_s: Deadline of the further calls.
        injected: Times that the simulator must have done what the plan says.
        log: What the server's log has to say.
        kept: Host objects that CANN itself refuses to give back.
        counters: Counters of the simulator that must have grown.
        unsaid: What no caller may ever be told.
    """

    name: str
    plan: str = ""
    errors: tuple[Expected, ...] = ()
    elsewhere: range = NONE
    replaced: range = NONE
    sick: tuple[str, ...] = ("npu:0",)
    down: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    server: Server = CLINIC
    operators: tuple[str, ...] = ALL
    works: tuple[str, ...] = ALL
    extra: tuple[str, ...] = ()
    timeout_s: float | None = 60.0
    extra_timeout_s: float = 60.0
    injected: int = 1
    log: tuple[str, ...] = ()
    kept: int = 0
    counters: tuple[str, ...] = ()
    unsaid: str = "\n"

    def __str__(self) -> str:
        return self.name


_INTERNAL, _BUSY = grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED
_UNAVAILABLE, _LATE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
_LACKS = grpc.StatusCode.FAILED_PRECONDITION
_SAID = "CANN says so"
_NO_MEMORY = f"{PLAN}:*:207001:dev=0:msg={_SAID}"
_NO_STREAMS = f"{RUN}:*:207008:dev=0:msg={_SAID}"


def _refused(name: str, code: int, reason: str, status: grpc.StatusCode, function: str = PLAN) -> FaultCase:
    """A function of CANN returns a number that ends nothing but the call."""
    words = (f"{function} returned {code}", _SAID)
    told = Expected(reason, status, code, words)
    return FaultCase(name, f"{function}:1:{code}:dev=0:msg={_SAID}", (told,))


def _lost(name: str, plan: str, code: int) -> FaultCase:
    """A device fails once: whoever was on it is answered from another one, and it comes back."""
    # Which function tells depends on what the other stream does at that moment.
    return FaultCase(name, plan, elsewhere=ONE_OR_TWO, replaced=ONE, log=(f"returned {code}",))


SURVIVED = (
    FaultCase("no-fault", sick=(), injected=0),
    # No cache has room for a workspace of this size; a smaller one might fit into what the other stream
    # gives back.
    FaultCase(
        "out-of-memory-once",
        f"workspace_mb=64; {PLAN}:1:207001:dev=0; malloc:1:207001:dev=0",
        injected=2,
    ),
    # The worker tries twice, and then another device has the result.
    FaultCase("out-of-memory-for-ever", _NO_MEMORY, elsewhere=SOME, injected=2),
    FaultCase(
        "out-of-memory-nowhere-else",
        _NO_MEMORY,
        (Expected("DEVICE_OUT_OF_MEMORY", _BUSY, 207001, (f"{PLAN} returned 207001", _SAID), calls=SOME),),
        sick=(),
        server=SINGLE,
        injected=8,
    ),
    FaultCase(
        "no-device-memory-for-ever",
        f"{PLAN}:1:207001:dev=0; malloc:*:207001:dev=0",
        elsewhere=SOME,
        extra=(LARGE,),
        injected=2,
    ),
    FaultCase("out-of-streams-for-ever", _NO_STREAMS, elsewhere=SOME, injected=2),
    FaultCase(
        "out-of-streams-nowhere-else",
        _NO_STREAMS,
        (Expected("DEVICE_BUSY", _UNAVAILABLE, 207008, (f"{RUN} returned 207008", _SAID), calls=SOME),),
        sick=(),
        server=SINGLE,
        injected=8,
    ),
    _refused("phase-1-invalid", 161002, "ACLNN_ERR_PARAM_INVALID", _INTERNAL),
    _refused("phase-1-internal", 561103, "ACLNN_ERR_INNER_NULLPTR", _INTERNAL),
    _refused("phase-1-no-kernels", 561112, "ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND", _LACKS),
    _refused("launch-error", 361001, "ACLNN_ERR_RUNTIME_ERROR", _INTERNAL, RUN),
    _refused("copy-refused", 107000, "DEVICE_ERROR", _INTERNAL, "aclrtMemcpyAsync"),
    _refused("memset-refused", 107000, "DEVICE_ERROR", _INTERNAL, "aclrtMemsetAsync"),
    FaultCase("out-of-streams-once", f"{RUN}:1:207008:dev=0"),
    FaultCase(
        "null-tensor",
        "aclCreateTensor:1:null:dev=0",
        (Expected("DEVICE_ERROR", _INTERNAL, None, ("aclCreateTensor failed without a number",)),),
    ),
    FaultCase(
        "stale-text",
        f"{WAIT}:*:stale:dev=0:msg=an old story; aclrtMemcpyAsync:*:stale:dev=0:msg=an old story; "
        f"{PLAN}:1:561103:dev=0:msg={_SAID}; {RUN}:2:361001:dev=0:msg={_SAID}",
        (
            Expected("ACLNN_ERR_INNER_NULLPTR", _INTERNAL, 561103, (f"{PLAN} returned 561103", _SAID)),
            Expected("ACLNN_ERR_RUNTIME_ERROR", _INTERNAL, 361001, (f"{RUN} returned 361001", _SAID)),
        ),
        injected=100,
        unsaid="an old story",
    ),
    FaultCase(
        "no-pinned-memory",
        "aclrtMallocHost:*:207001:dev=0",
        elsewhere=SOME,
        extra=(WIDE,),
    ),
    FaultCase(
        "no-workspace",
        "workspace_mb=64; malloc:*:207001:dev=0",
        elsewhere=SOME,
        injected=2,
        counters=("calls.aclDestroyAclOpExecutor",),
    ),
    FaultCase(
        "handle-not-destroyed",
        f"aclDestroyTensor:1:561103:dev=0:msg={_SAID}",
        (
            Expected(
                "ACLNN_ERR_INNER_NULLPTR", _INTERNAL, 561103, ("aclDestroyTensor returned 561103", _SAID)
            ),
        ),
        kept=1,
    ),
)
"""The worker keeps running."""

REPLACED = (
    _lost("device-exception", "kernel:1:507015:dev=0:total", 507015),
    _lost("copy-fault", "copy:1:507013:dev=0:total", 507013),
    _lost("memset-fault", "memset:1:507001:dev=0:total", 507001),
    _lost("launch-fatal", f"{RUN}:1:361001:last=507015:poison:dev=0:total", 361001),
    FaultCase(
        "killed-in-kernel", "kernel:1:kill:dev=0:total", elsewhere=ONE_OR_TWO, replaced=ONE, log=("SIGKILL",)
    ),
    FaultCase(
        "hang-past-deadline",
        f"kernel.{FLOYD.aclnn_name}:1:hang:total",
        (Expected("DEADLINE_EXCEEDED", _LATE),),
        elsewhere=UP_TO_ONE,
        replaced=ONE,
        sick=(),
        operators=SMALL,
        extra=(FLOYD.name,),
        extra_timeout_s=8.0,  # of this call alone: with so short a time, others may be late as well
        log=(f"{WAIT} returned 507046",),
    ),
    FaultCase(
        "hang-without-deadline",
        "kernel:1:hang:dev=0:total",
        (Expected("DEADLINE_EXCEEDED", _LATE, None, (f"{WAIT} returned 507046",)),),
        elsewhere=UP_TO_ONE,
        replaced=ONE,
        timeout_s=None,
    ),
    FaultCase(
        "away-for-three-starts",
        "kernel:1:507015:dev=1:total; aclrtSetDevice:1-3:507033:dev=1:total",
        elsewhere=ONE_OR_TWO,
        replaced=range(4, 5),
        sick=("npu:1",),
        log=("npu:1: restarting, cannot be taken: ", "507033"),
    ),
    FaultCase(
        "exception-always",
        # A worker that starts anew tries every operator. It must not meet the fault before the call's second
        # try does.
        f"kernel.{FLOYD.aclnn_name}:1-2:507015:total; aclrtSetDevice:*:slow=5000",
        (Expected("WORKER_LOST", _UNAVAILABLE, 507015, ("returned 507015", "a task failed on device")),),
        elsewhere=UP_TO_FOUR,
        replaced=TWO,
        sick=(),
        operators=SMALL,
        extra=(FLOYD.name,),
    ),
)
"""The worker is lost, and another one takes its device."""

GONE = (
    FaultCase(
        "fails-at-every-start",
        "kernel:*:507015:dev=1",
        elsewhere=ONE_OR_TWO,
        replaced=SOME,
        sick=("npu:1",),
        down=("npu:1",),
        server=HOSPICE,
        log=("npu:1: down", "returned 507015"),
    ),
    FaultCase(
        "crash-loop-at-start",
        "kernel:1:kill:dev=2:total; aclrtSetDevice:*:kill:dev=2",
        elsewhere=ONE_OR_TWO,
        replaced=SOME,
        sick=("npu:2",),
        down=("npu:2",),
        server=HOSPICE,
        log=("npu:2: down", "SIGKILL"),
    ),
    FaultCase(
        "crash-loop-in-kernel",
        "kernel:*:kill:dev=3",
        elsewhere=ONE_OR_TWO,
        replaced=SOME,
        sick=("npu:3",),
        down=("npu:3",),
        server=HOSPICE,
        log=("npu:3: down", "SIGKILL"),
    ),
    FaultCase(
        "damaged-memory",
        "kernel:1:507054:dev=4:total",
        elsewhere=ONE_OR_TWO,
        sick=("npu:4",),
        down=("npu:4",),
        damaged=("npu:4",),
        server=HOSPICE,
        log=("npu:4: down, damaged, not tried again: ", "returned 507054"),
    ),
    FaultCase(
        "all-devices-down",
        "kernel:*:507015",
        (
            Expected("NO_DEVICE", _UNAVAILABLE, None, ("returned 507015",), SOME),
            # If the second device has nothing else to do when the first one's call comes to it.
            Expected("WORKER_LOST", _UNAVAILABLE, 507015, ("returned 507015",), UP_TO_TWO),
        ),
        elsewhere=UP_TO_FOUR,
        replaced=SOME,
        sick=("npu:0", "npu:1"),
        down=("npu:0", "npu:1"),
        server=Server("alone", 2, 0),
        log=("npu:0: down", "npu:1: down", "returned 507015"),
    ),
)
"""Devices are out of service while the fault is there, or for good where it is damage."""

ABSENT = (
    FaultCase(
        "missing-symbol",
        errors=(
            Expected(
                "OPERATOR_UNSUPPORTED",
                grpc.StatusCode.UNIMPLEMENTED,
                None,
                (
                    f"{FLOYD.aclnn_name}GetWorkspaceSize is not in libopapi_nn.so",
                    "expected CANN 9.0 or newer",
                ),
                SOME,
            ),
        ),
        sick=(),
        server=Server("old", 1, 1, "8.5.0"),
        works=SMALL,
        injected=0,
    ),
)
"""An operator that was never there."""

CASES = (*SURVIVED, *REPLACED, *GONE, *ABSENT)
