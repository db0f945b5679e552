"""Runs a case of the fault matrix against a real server, and judges what callers, devices and memory came to."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.e2e.harness import GROUP_NORM, Wire, eventually
from tests.e2e.npu_cases import PLAN
from tests.e2e.npu_load import Load, spread, works
from tests.fix_npu import HOST_OBJECTS

from npugrad.ops import OPERATORS
from npugrad.v1 import server_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from tests.e2e.npu_cases import Expected, FaultCase, Server
    from tests.e2e.npu_load import Answer, Work
    from tests.fix_npu import NpuServer
    from tests.fix_server import ServerProcess

CALLS, THREADS = 64, 4
READY, DOWN = server_pb2.DEVICE_STATE_READY, server_pb2.DEVICE_STATE_DOWN
_COUNTED = re.compile(r"^npugrad_(\w+?)(?:_total)?\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_METHODS = {"Execute", *(spec.rpc for spec in OPERATORS.values())}


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


class Watch:
    """Listens to the health of a server as a load balancer would.

    Attributes:
        heard: Every status, in order.
    """

    def __init__(self, running: ServerProcess) -> None:
        """Starts to listen when it is entered."""
        self.heard: list[int] = []
        self._channel = running.channel()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._thread.join()

    def _listen(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel)
        with suppress(grpc.RpcError):  # the channel was closed
            for answer in stub.Watch(health_pb2.HealthCheckRequest()):  # type: ignore[attr-defined]
                self.heard.append(answer.status)


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
        down: Devices that are out of service, since this case or an earlier one.
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
        """Devices that were ill."""
        restarted = self.later.restarts.items()
        return self.case.sick or tuple(n for n, count in restarted if count > self.before.restarts[n])

    @property
    def replaced(self) -> int:
        """Workers that were started anew."""
        return sum(self.later.restarts.values()) - sum(self.before.restarts.values())

    @property
    def lost(self) -> int:
        """Calls without an answer, by us and by the server's own count."""
        counted = self.later.ends.total() - self.before.ends.total()
        return max(self.sent - len(self.answers), self.sent + len(self.afterwards) - counted)

    def right(self, *, elsewhere: bool) -> int:
        """Right answers at the first try, or at a later one."""
        return sum(
            answer.right and (answer.info is not None and answer.info.attempts > 1) is elsewhere
            for answer in self.answers
        )

    @property
    def beside(self) -> int:
        """Calls that healthy devices answered while the fault was there."""
        return sum(_is_beside(answer, self.told_s, self.sick) for answer in self.answers)

    @property
    def wrong(self) -> int:
        """Results outside the tolerance."""
        return sum(not answer.right for answer in self.answers if answer.info is not None)

    def line(self) -> str:
        """The counts, for the summary of the run."""
        failed = {expected.reason: self.failed[expected.reason] for expected in self.case.errors}
        return (
            f"sent={self.sent} right={self.right(elsewhere=False)} "
            f"right-elsewhere={self.right(elsewhere=True)} wrong={self.wrong} failed={failed} "
            f"lost={self.lost} replaced-workers={self.replaced} other-device-calls={self.beside} "
            f"afterwards={len(self.afterwards)} leaks=none (SIMULATED)"
        )


class Site:
    """A server of the matrix: looked at, loaded, made ill and watched until it is well.

    Attributes:
        npu: The server.
    """

    def __init__(self, running: NpuServer, kind: Server, stack: ExitStack) -> None:
        """Opens a channel, and looks at every worker before its first call.

        Args:
            running: The server.
            kind: What it was started as.
            stack: Closes the channel.
        """
        self.npu, self._server, self._kind = running, running.process, kind
        self._wire = Wire.of(stack.enter_context(self._server.channel()))
        self._down: set[str] = set()
        self._await_states()
        self._idle_bytes = self._drained()

    def run(self, case: FaultCase) -> Finding:
        """Everything that belongs to a case, except for the judgement."""
        before = self._look()
        load = Load(
            self._server,
            spread(case.operators),
            threads=THREADS,
            calls=CALLS,
            timeout_s=case.timeout_s,
            more=True,
        )
        with Watch(self._server) as watch:
            with load:
                load.wait(CALLS // 4)
                told_s = time.monotonic()
                self._plan(case.plan)
                for name in case.extra:
                    load.send(works()[name][0])
                self._await_injected(case, before)
                if self._down | {*case.down} < {*self._kind.devices}:
                    load.wait_until(lambda answer: _is_beside(answer, told_s, case.sick))
                load.enough()
                load.join()
                self._await_end(case, before)
            self._plan()
            last = self._wire.info()
            afterwards = self._calls(spread(case.works), CALLS // 2) if case.works else []
        later = self._look()
        drained = self._drained() if case.works else {}
        return Finding(
            case,
            before,
            later,
            load.answers,
            afterwards,
            load.sent,
            told_s,
            watch.heard,
            last,
            self._down,
            drained,
            max(self._idle_bytes.values()),
        )

    # ------------------------------------------------------------------------------------------- what is done

    def _plan(self, text: str = "") -> None:
        if not text:
            # Entries that count over all processes begin anew.
            self.npu.plan_path.with_name("plan.state").unlink(missing_ok=True)
        self.npu.plan(f"ndev={self._kind.count};{text}")

    def _calls(self, mix: Sequence[Work], calls: int) -> list[Answer]:
        """Calls that more threads send than there are streams."""
        with Load(self._server, mix, threads=8, calls=calls, timeout_s=60) as load:
            load.join()
        return load.answers

    def _drained(self) -> dict[int, int]:
        """Device memory of each worker that has no cache: what a worker still holds for a call shows.

        Each is told once that there is no memory, gives back all that torch_npu cached, and tries again with
        one small call.
        """
        workers = self.npu.workers()
        done = dict.fromkeys(workers, False)
        self._plan(f"{PLAN}:1:207001")
        earlier = {pid: counters["faults.injected"] for pid, counters in workers.items()}
        with self._server.channel() as channel:
            while not all(done.values()):
                works()[GROUP_NORM.name][0].send(channel, 60)
                now = self.npu.workers()
                done = {pid: now[pid]["faults.injected"] > earlier[pid] for pid in done}
        self._plan()
        return {pid: counters["device_bytes"] for pid, counters in self.npu.workers().items()}

    # -------------------------------------------------------------------------------------- what is waited for

    def _await_states(self) -> None:
        """Waits until every device is ready, but for those that are out of service."""
        wanted = [DOWN if name in self._down else READY for name in self._kind.devices]
        eventually(
            lambda: [device.state for device in self._wire.info().devices] == wanted,
            f"devices are {wanted}",
            self._server,
            60,
        )

    def _await_injected(self, case: FaultCase, before: Look) -> None:
        goal = before.simulator["faults.injected"] + case.injected
        eventually(
            lambda: self.npu.report.counters()["faults.injected"] >= goal,
            f"{case.plan} happened {case.injected} times",
            self._server,
            60,
        )

    def _await_end(self, case: FaultCase, before: Look) -> None:
        least = sum(before.restarts.values()) + case.replaced.start
        eventually(
            lambda: sum(device.restarts for device in self._wire.info().devices) >= least,
            f"{case.replaced.start} workers are started anew",
            self._server,
            60,
        )
        self._down.update(case.down)
        self._await_states()

    # ------------------------------------------------------------------------------------------- what is seen

    def _look(self) -> Look:
        """The server once nothing runs."""
        eventually(self._is_idle, "nothing runs and no arena byte is in use", self._server)
        info = self._wire.info()
        text = self._page()
        return Look(
            objects={
                pid: sum(counters[name] for name in HOST_OBJECTS)
                for pid, counters in self.npu.workers().items()
            },
            restarts={device.name: device.restarts for device in info.devices},
            ends=_calls_by_reason(text),
            moves=Counter(
                {
                    (labels["device"], labels["state"]): int(value)
                    for name, labels, value in _samples(text)
                    if name == "device_transitions"
                }
            ),
            simulator=self.npu.report.counters(),
        )

    def _is_idle(self) -> bool:
        info = self._wire.info()
        used = info.input_arena_used_bytes + info.output_arena_used_bytes + info.queue_depth
        figures = {name: value for name, _, value in _samples(self._page(), unlabelled=True)}
        return not used and not figures["running_calls"] and not figures["uploads"]

    def _page(self) -> str:
        with urllib.request.urlopen(self._server.metrics_url, timeout=30) as page:
            return str(page.read().decode())


def _samples(page: str, *, unlabelled: bool = False) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each figure of a metrics page."""
    if unlabelled:
        found = re.findall(r"^npugrad_(\w+) (\S+)$", page, re.MULTILINE)
        return [(name, {}, float(value)) for name, value in found]
    return [
        (name, dict(_LABEL.findall(labels)), float(value)) for name, labels, value in _COUNTED.findall(page)
    ]


def _calls_by_reason(page: str) -> Counter[str]:
    ends: Counter[str] = Counter()
    for name, labels, value in _samples(page):
        if name == "calls" and labels["method"] in _METHODS:
            ends[labels["reason"]] += int(value)
    return ends


def _is_beside(answer: Answer, since_s: float, sick: Sequence[str]) -> bool:
    """Whether a device that was well answered while others were not."""
    return answer.right and answer.sent_s >= since_s and bool(answer.info) and answer.info.device not in sick


# ------------------------------------------------------------------------------------------- the judgement


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
        matching = [e for e in case.errors if _is(answer, e)]
        assert matching, f"nobody was to be told this: {answer.told}"
        assert case.unsaid not in answer.told.text
        found.failed[matching[0].reason] += 1
    assert (found.wrong, found.lost) == (0, 0)
    for expected in case.errors:
        assert found.failed[expected.reason] in expected.calls, (found.failed, expected)
    assert found.right(elsewhere=True) in case.elsewhere, found.line()
    if found.down < {device.name for device in found.last.devices}:
        assert found.beside > 0, "no other device served"


def _is(answer: Answer, expected: Expected) -> bool:
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
    ends = [_SERVING, _NOT_SERVING] if len(found.down) == len(found.last.devices) else [_SERVING]
    assert found.health == ends


def _went(found: Finding, device: str, state: str) -> int:
    """How often a device went into a state."""
    return found.later.moves[device, state] - found.before.moves[device, state]


def _judge_memory(found: Finding) -> None:
    """Survivors hold what they held before; nobody holds anything of a call."""
    case, before, later = found.case, found.before.objects, found.later.objects
    assert sum(count - before.get(pid, 0) for pid, count in later.items()) == case.kept
    assert set(found.drained.values()) <= {found.idle_bytes}, "device memory was not given back"
    for name in case.counters:
        assert found.later.simulator[name] > found.before.simulator[name]
