"""What a case of the fault matrix came to, and whether that is what it had to come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpc_health.v1 import health_pb2
from tests.e2e.load import Answer
from tests.e2e.npu_cases import Expected, FaultCase

from npugrad.v1 import server_pb2

READY, DOWN = server_pb2.DEVICE_STATE_READY, server_pb2.DEVICE_STATE_DOWN
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True)
class Look:
    """A server at rest.

    Attributes:
        objects: Objects of CANN that each worker holds, by process.
        restarts: How often each device's worker was started anew.
        ends: Calls that the server says it answered, by reason.
        moves: How often each device went into each state.
        simulator: Counters of all processes that ever were.
    """

    objects: dict[int, int]
    restarts: dict[str, int]
    ends: Counter[str]
    moves: Counter[tuple[str, str]]
    simulator: Counter[str]


@dataclass
class Finding:
    """What a case came to.

    Attributes:
        case: The case.
        before: The server before it.
        later: The server after it, once it has answered other calls.
        answers: Answers of the run, in the order they came.
        afterwards: Answers of calls sent when it was over.
        sent: Calls sent in the run.
        told_s: When the fault was put into force, by `time.monotonic()`.
        health: What was heard of the server's health.
        last: Description of the server when it was over.
        down: Devices that are out of service for good, since this case or an earlier one.
        drained: Device memory of each worker without its cache, in the end.
        idle_bytes: The same before the first call.
        failed: Errors by reason.
    """

    case: FaultCase
    before: Look
    later: Look
    answers: list[Answer]
    afterwards: list[Answer]
    sent: int
    told_s: float
    health: list[int]
    last: server_pb2.GetServerInfoResponse
    down: set[str]
    drained: dict[int, int]
    idle_bytes: int
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def sick(self) -> tuple[str, ...]:
        restarted = self.later.restarts.items()
        return self.case.sick or tuple(n for n, count in restarted if count > self.before.restarts[n])

    @property
    def replaced(self) -> int:
        return sum(self.later.restarts.values()) - sum(self.before.restarts.values())

    @property
    def lost(self) -> int:
        counted = self.later.ends.total() - self.before.ends.total()
        return max(self.sent - len(self.answers), self.sent + len(self.afterwards) - counted)

    def right(self, *, elsewhere: bool) -> int:
        """Right answers at the first try, or at a later one."""
        return sum(answer.right and is_elsewhere(answer) is elsewhere for answer in self.answers)

    @property
    def beside(self) -> int:
        """Calls that healthy devices answered while the fault was there."""
        return sum(is_beside(answer, self.told_s, self.sick) for answer in self.answers)

    @property
    def wrong(self) -> int:
        return sum(not answer.right for answer in self.answers if answer.info is not None)

    def line(self) -> str:
        failed = {expected.reason: self.failed[expected.reason] for expected in self.case.errors}
        return (
            f"sent={self.sent} right={self.right(elsewhere=False)} "
            f"right-elsewhere={self.right(elsewhere=True)} wrong={self.wrong} failed={failed} "
            f"lost={self.lost} replaced-workers={self.replaced} other-device-calls={self.beside} "
            f"afterwards={len(self.afterwards)} leaks=none (SIMULATED)"
        )


def is_elsewhere(answer: Answer) -> bool:
    """Whether the answer needed more than one try."""
    return answer.info is not None and answer.info.attempts > 1


def is_beside(answer: Answer, since_s: float, sick: Sequence[str]) -> bool:
    """Whether a device that was well answered while others were not."""
    found = answer.info
    return found is not None and answer.right and answer.sent_s >= since_s and found.device not in sick


def judge(found: Finding) -> None:
    """Every claim of the case."""
    _judge_callers(found)
    _judge_devices(found)
    _judge_memory(found)
    after = found.afterwards
    assert all(answer.right and answer.info and answer.info.attempts == 1 for answer in after), after
    if found.case.works:
        serving = {device.name for device in found.last.devices} - found.down
        assert {answer.info.device for answer in after if answer.info} == serving


def _judge_callers(found: Finding) -> None:
    case = found.case
    for answer in found.answers:
        if answer.told is None:
            continue
        matching = [e for e in case.errors if is_told(answer, e)]
        assert matching, f"nobody was to be told this: {answer.told}"
        assert case.unsaid not in answer.told.text
        found.failed[matching[0].reason] += 1
    assert (found.wrong, found.lost) == (0, 0)
    for expected in case.errors:
        assert found.failed[expected.reason] in expected.calls, (found.failed, expected)
    assert found.right(elsewhere=True) in case.elsewhere, found.line()
    if found.down | {*case.down} < {device.name for device in found.last.devices}:
        assert found.beside > 0, "no other device served"


def is_told(answer: Answer, expected: Expected) -> bool:
    told = answer.told
    if told is None or told.status is not expected.status:
        return False
    if told.reason == "DEADLINE_EXCEEDED" == expected.reason and not expected.words:
        return True  # the client's clock may be faster than the server's words
    same = (told.reason, told.code) == (expected.reason, expected.code)
    return same and all(words in told.text for words in expected.words)


def _judge_devices(found: Finding) -> None:
    case, before, later = found.case, found.before, found.later
    assert found.replaced in case.replaced, found.line()
    for device in found.last.devices:
        is_down = device.name in found.down
        assert device.state == (DOWN if is_down else READY)
        assert bool(device.reason) is is_down, device
        gone = _went(found, device.name, "restarting") + _went(found, device.name, "down")
        back = _went(found, device.name, "ready")
        if device.name not in found.sick:
            assert later.restarts[device.name] == before.restarts[device.name], "a healthy worker ended"
            assert (gone, back) == (0, 0), "a healthy device left the pool"
        elif case.replaced.start or device.name in case.down:
            assert gone >= 1, "the sick device did not leave the pool"
            assert back == (not is_down), "the sick device did not come back, or more than once"
    all_down = len(case.down) == len(found.last.devices)
    assert found.health == ([_SERVING, _NOT_SERVING, _SERVING] if all_down else [_SERVING])


def _went(found: Finding, device: str, state: str) -> int:
    return found.later.moves[device, state] - found.before.moves[device, state]


def _judge_memory(found: Finding) -> None:
    """Survivors hold what they held before; nobody holds anything of a call."""
    case, before, later = found.case, found.before.objects, found.later.objects
    assert sum(count - before.get(pid, 0) for pid, count in later.items()) == case.kept
    assert set(found.drained.values()) <= {found.idle_bytes}, "device memory was not given back"
    for name in case.counters:
        assert found.later.simulator[name] > found.before.simulator[name]
