"""Runs a case of the fault matrix on a real server: load, fault, recovery, calls again."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.cann_sim.report import HOST_OBJECTS
from tests.e2e.harness import Wire, eventually
from tests.e2e.load import Answer
from tests.e2e.npu_cases import PLAN, FaultCase, Server
from tests.e2e.npu_load import NpuLoad, send, spread, works
from tests.e2e.npu_verdict import DOWN, READY, Finding, Look, is_beside, is_elsewhere, is_told
from tests.fix_npu import NpuServer
from tests.fix_server import ServerProcess
from tests.operators import GROUP_NORM

from npugrad.ops import OPERATORS

CALLS, THREADS = 32, 4
_AWAKE_S = 240.0
"""Within this time a device must be ready again: up to four processes in turn import torch for it."""
_COUNTED = re.compile(r"^npugrad_(\w+?)(?:_total)?\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_METHODS = {"Execute", *(record.rpc for record in OPERATORS.values())}


class Watch:
    """Listens to the health of a server as a load balancer would.

    Attributes:
        heard: Every status, in order.
    """

    def __init__(self, running: ServerProcess) -> None:
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
        self._damaged: set[str] = set()
        self._await_states(set())
        self._idle_bytes = self._drained()

    def run(self, case: FaultCase) -> Finding:
        """Everything that belongs to a case, except for the judgement."""
        before = self._look()
        load = NpuLoad(
            self._server,
            spread(case.operators),
            threads=THREADS,
            calls=CALLS,
            timeout_s=case.timeout_s,
        )
        with Watch(self._server) as watch:
            with load:
                load.wait(lambda: len(load.answers) >= CALLS // 4, f"{CALLS // 4} answers")
                # None of them meets the fault with nothing cached.
                for name in {*self._kind.devices} - self._damaged:
                    load.wait_until(partial(_is_from, name))
                told_s = time.monotonic()
                self._plan(case.plan)
                self._meet(case, load, before)
                if self._damaged | {*case.down} < {*self._kind.devices}:
                    load.wait_until(lambda answer: is_beside(answer, told_s, case.sick))
                load.stop()
                self._await_end(case, before)
            self._plan()
            self._await_states(self._damaged)
            last = self._wire.info()
            afterwards = self._calls(case.works) if case.works else []
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
            {*self._damaged},
            drained,
            max(self._idle_bytes.values()),
        )

    # ------------------------------------------------------------------------------------------- what is done

    def _plan(self, text: str = "") -> None:
        if not text:
            # Entries that count over all processes begin anew.
            self.npu.plan_path.with_name("plan.state").unlink(missing_ok=True)
        self.npu.plan(f"ndev={self._kind.count};{text}")

    def _calls(self, operators: Sequence[str]) -> list[Answer]:
        """Calls that more threads send than there are streams, until every device has had some.

        A device that could not take a call comes last until it has done one well.
        """
        mix = spread(operators)
        with NpuLoad(self._server, mix, threads=8, calls=CALLS // 2, timeout_s=60) as load:
            for name in {*self._kind.devices} - self._damaged:
                load.wait_until(partial(_is_from, name))
            load.stop()
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
                send(works()[GROUP_NORM.name][0], channel, 60)
                now = self.npu.workers()
                done = {pid: now[pid]["faults.injected"] > earlier[pid] for pid in done}
        self._plan()
        return {pid: counters["device_bytes"] for pid, counters in self.npu.workers().items()}

    # ------------------------------------------------------------------------------------- what is waited for

    def _await_states(self, down: set[str]) -> None:
        wanted = [DOWN if name in down else READY for name in self._kind.devices]
        eventually(
            lambda: [device.state for device in self._wire.info().devices] == wanted,
            f"devices are {wanted}",
            self._server,
            _AWAKE_S,
        )

    def _meet(self, case: FaultCase, load: NpuLoad, before: Look) -> None:
        """Waits until the fault has happened, a call has moved if one must, and callers were told.

        Until then, sends the case's own calls.
        """
        goal = before.simulator["faults.injected"] + case.injected
        moves = ", and a call moved" if case.elsewhere.start else ""
        what = f"{case.plan} happened {case.injected} times{moves}"
        self._send_extra(case, load)

        def has_happened() -> bool:
            # A device that has no memory may yet serve some calls, from what another stream gave back.
            moved = not case.elsewhere.start or any(map(is_elsewhere, load.answers))
            if moved and self.npu.report.counters()["faults.injected"] >= goal:
                return True
            self._send_extra(case, load)
            return False

        eventually(has_happened, what, self._server)
        # One of several faults may be met later than the rest: it waits for a call of its operator.
        for expected in case.errors:
            if expected.calls.start:
                load.wait_until(partial(is_told, expected=expected))

    @staticmethod
    def _send_extra(case: FaultCase, load: NpuLoad) -> None:
        for name in case.extra:
            load.send(works()[name][0], case.extra_timeout_s)

    def _await_end(self, case: FaultCase, before: Look) -> None:
        least = sum(before.restarts.values()) + case.replaced.start
        eventually(
            lambda: sum(device.restarts for device in self._wire.info().devices) >= least,
            f"{case.replaced.start} workers are started anew",
            self._server,
            _AWAKE_S,
        )
        self._damaged.update(case.damaged)
        self._await_states(self._damaged | {*case.down})

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
        return self._server.page("/metrics")[1]


def _is_from(device: str, answer: Answer) -> bool:
    return answer.info is not None and answer.info.device == device


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
