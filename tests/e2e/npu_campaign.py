"""One fault of the vendor's table after another, on servers that are never left alone. All is SIMULATED."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.e2e.harness import Wire, eventually
from tests.e2e.load import Answer
from tests.e2e.npu_cases import SMALL
from tests.e2e.npu_load import NpuLoad, spread
from tests.e2e.npu_verdict import READY
from tests.fix_npu import NpuServer

from npugrad.ops import OPERATORS
from npugrad_server.acl.faults import FAULTS, Action

THREADS, TIMEOUT_S = 4, 120.0
_TARGETS = {
    Action.REFUSE: "{}GetWorkspaceSize",
    Action.OPERATOR_MISSING: "{}GetWorkspaceSize",
    Action.INTERNAL: "{}GetWorkspaceSize",
    Action.OUT_OF_MEMORY: "{}GetWorkspaceSize",
    Action.OUT_OF_RESOURCES: "{}",
    Action.RESUBMIT: "{}",
    Action.OWN_FAULT: "aclrtMemcpyAsync",
    Action.END_WORKER: "kernel.{}",
    Action.BACK_OFF: "kernel.{}",
    Action.UNAVAILABLE: "kernel.{}",
}
"""What fails, for each action. A call that is told to have taken too long is not tried again, and damage
takes a device out of service: the matrix has both."""
_WORKERS_IN = 4
"""Of so many faults one ends its worker, whose next process takes seconds to be there."""


@dataclass(frozen=True)
class Fault:
    """One fault: where it strikes, and with which number."""

    target: str
    code: int
    ends_worker: bool


@dataclass
class Campaign:
    """What came of the faults.

    Attributes:
        faults: How many were met, by action.
        answers: Every answer to the callers.
        sent: Calls that were sent.
        unexplained: Errors that have nothing to do with any of the faults.
        restarts: Workers that were started anew.
    """

    faults: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    sent: int = 0
    unexplained: list[Answer] = field(default_factory=list)
    restarts: int = 0

    @property
    def wrong(self) -> int:
        return sum(not answer.right for answer in self.answers if answer.info is not None)

    @property
    def lost(self) -> int:
        return self.sent - len(self.answers)

    def line(self) -> str:
        told = sum(answer.told is not None for answer in self.answers)
        return (
            f"{self.faults.total()} faults ({', '.join(f'{n} {a}' for a, n in self.faults.most_common())}), "
            f"{self.restarts} workers started anew, {self.sent} calls, {told} told of a fault, "
            f"{len(self.unexplained)} told anything else, {self.lost} lost, {self.wrong} wrong (SIMULATED)"
        )


def faults() -> Iterator[Fault]:
    """Every number of the table in turn, with every operator in turn but for one that takes long."""
    codes: dict[bool, list[tuple[Action, int]]] = {False: [], True: []}
    for row in FAULTS:
        ends = {code for pair in row.codes for code in pair if code}
        if row.action in _TARGETS:
            codes[row.action.ends_worker] += [(row.action, code) for code in sorted(ends)]
    names = itertools.cycle(OPERATORS[name].aclnn_name for name in SMALL)
    turns = {ends_worker: itertools.cycle(found) for ends_worker, found in codes.items()}
    for turn in itertools.count():
        action, code = next(turns[turn % _WORKERS_IN == 0])
        yield Fault(_TARGETS[action].format(next(names)), code, action.ends_worker)


def run(npu: NpuServer, devices: int, count: int) -> Campaign:
    """Has so many faults happen under load, each on one device in turn, and waits until all is well again."""
    found = Campaign()
    with npu.process.channel() as channel:
        wire = Wire.of(channel)
        load = NpuLoad(npu.process, spread(SMALL), threads=THREADS, timeout_s=TIMEOUT_S)
        with load:
            for turn, fault in enumerate(itertools.islice(faults(), count)):
                _meet(npu, wire, fault, turn % devices, devices)
                found.faults["worker ended" if fault.ends_worker else "worker lived"] += 1
            load.wait_for_each()
            load.stop()
        _await_ready(npu, wire)
        eventually(lambda: not _held_bytes(wire), "nothing is held", npu.process)
        found.restarts = sum(device.restarts for device in wire.info().devices)
    found.answers, found.sent = load.answers, load.sent
    codes = {str(fault.code) for fault in itertools.islice(faults(), count)}
    for answer in load.answers:
        if answer.told is not None and not any(code in answer.told.text for code in codes):
            found.unexplained.append(answer)
    return found


def _meet(npu: NpuServer, wire: Wire, fault: Fault, device: int, devices: int) -> None:
    """Has one fault happen once, on one device."""
    npu.plan_path.with_name("plan.state").unlink(missing_ok=True)
    before = npu.report.counters()["faults.injected"]
    npu.plan(f"ndev={devices};{fault.target}:1:{fault.code}:dev={device}:total:msg=CANN says so")
    eventually(
        lambda: npu.report.counters()["faults.injected"] > before, f"{fault} happened", npu.process, TIMEOUT_S
    )
    npu.plan(f"ndev={devices}")
    if fault.ends_worker:
        eventually(
            lambda: any(found.state != READY for found in wire.info().devices), "a worker ends", npu.process
        )
        _await_ready(npu, wire)


def _await_ready(npu: NpuServer, wire: Wire) -> None:
    eventually(
        lambda: all(device.state == READY for device in wire.info().devices),
        "every device is ready",
        npu.process,
        TIMEOUT_S,
    )


def _held_bytes(wire: Wire) -> int:
    info = wire.info()
    return info.input_arena_used_bytes + info.output_arena_used_bytes
