"""Workers are killed and servers restarted under load: no accepted call is lost or wrong.

Accepted means: header validated and admitted. The server's own log is the judge of that: every call it
admitted has a line with its end. So what the clients got right is compared with what the servers say they
answered, over all their lives, and a reply that was made but never arrived would show.
"""

from __future__ import annotations

import os
import select
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import Wire, eventually, own_threads, workers_of
from tests.e2e.load import ClientLoad, Work, mixed_work
from tests.fix_server import ServerProcess, run_server
from tests.proofs.proof import told
from tests.summary import Tally

from npugrad.ops import OPERATORS
from npugrad.v1 import server_pb2
from npugrad_server.worker.descendants import processes

pytestmark = pytest.mark.slow

READY = server_pb2.DeviceState.DEVICE_STATE_READY
THREADS = 6
KILLS = int(os.environ.get("NPUGRAD_PROVE_KILLS", "4"))
"""Workers of four devices that are killed; `make prove-kills` has 200, under 20,000 calls."""
CALLS_PER_KILL = 100
ALONE = "127.0.0.13"
"""Where no other test listens: nobody takes the port while one server ends and the next one starts."""
REFUSED = {"DRAINING"}
"""Reasons with which a call is turned away before it is accepted in these tests."""


@pytest.fixture(scope="module")
def work() -> list[Work]:
    return mixed_work()


@dataclass
class Service:
    """One server after another on the same address, each with some CPU devices."""

    stack: ExitStack
    folder: Path
    listen: str
    devices: int = 2
    ended: list[ServerProcess] = field(default_factory=list)
    kills: int = 0

    def __post_init__(self) -> None:
        self.running = self._start(self.listen)

    def _start(self, listen: str) -> ServerProcess:
        running = run_server(
            self.folder / f"server{len(self.ended)}.log",
            *("--respawn-backoff-s", "0.05"),
            devices=",".join(f"cpu:{index}" for index in range(self.devices)),
            env={**own_threads(), "NPUGRAD_KERNELS_TORCH": "off"},
            listen=listen,
            check_end=False,  # some are asked to end under load
        )
        started = self.stack.enter_context(running)
        self.wire = Wire.of(self.stack.enter_context(started.channel()))
        return started

    def restart(self) -> None:
        """SIGTERM; when everything accepted is answered and the process has ended well, another one."""
        self.running.signal(signal.SIGTERM)
        code = self.running.wait()
        assert code == 0, self.running.log_text()[-4000:]
        self.ended.append(self.running)
        self.running = self._start(self.running.address)

    def kill_worker(self, load: ClientLoad, *, in_a_call: bool) -> None:
        """SIGKILL for one of the workers; returns when its device is ready again.

        To make sure that it dies in the middle of a call, it is stopped until a call is stuck in it.
        """
        restarts = sum(device.restarts for device in self._devices())
        victim = sorted(workers_of(self.running.process.pid))[self.kills % self.devices]
        if in_a_call:
            os.kill(victim, signal.SIGSTOP)
            load.wait_for_stuck(3 * THREADS)
        os.kill(victim, signal.SIGKILL)
        self.kills += 1
        eventually(
            lambda: sum(d.restarts for d in self._devices()) > restarts and self._all_ready(),
            "all devices are ready again",
            self.running,
        )

    def _devices(self) -> list[server_pb2.Device]:
        return list(self.wire.info().devices)

    def _all_ready(self) -> bool:
        return all(device.state == READY for device in self._devices())

    def stop(self) -> None:
        self.running.stop()
        self.ended.append(self.running)

    def calls(self) -> list[dict[str, Any]]:
        """Lines of the logs of all servers that are about calls of operators."""
        lines = [line for running in self.ended for line in running.log_lines("call")]
        unary = {record.rpc for record in OPERATORS.values()}
        return [line for line in lines if line["method"] in {*unary, "Execute"}]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize(
    ("listen", "kills", "restarts", "least_calls"),
    [
        pytest.param(f"{ALONE}:0", 8, 2, 800, marks=[pytest.mark.deep, pytest.mark.long]),
        ("unix", 1, 1, 100),
    ],
    ids=["tcp", "unix"],
)
def test_no_accepted_call_is_lost_or_wrong(
    listen: str,
    kills: int,
    restarts: int,
    least_calls: int,
    work: list[Work],
    stack: ExitStack,
    tmp_path: Path,
    tally: Tally,
) -> None:
    service = Service(stack, tmp_path, f"unix:{tmp_path}/s" if listen == "unix" else listen)
    load = stack.enter_context(ClientLoad(service.running.address, work, THREADS))
    for round_ in range(restarts):
        for kill in range(kills // restarts):
            # Every call that was there at the last kill has its answer, so none is hit twice.
            load.wait_for_each()
            service.kill_worker(load, in_a_call=kill % 2 == 0)
        load.wait_for_each()
        if round_ == restarts - 1:
            load.wait(lambda: len(load.right) >= least_calls, f"{least_calls} right answers")
        service.restart()
    load.wait_for_each()
    load.stop()
    service.stop()
    _judge(service, load, kills, restarts, least_calls)
    for title, value in _summary(service, load).items():
        tally(f"reliability over {'unix' if listen == 'unix' else 'tcp'}: {title}", value)


@pytest.mark.deep
@pytest.mark.timeout(300 + 30 * KILLS)
def test_killed_workers_of_four_devices_lose_no_call(
    work: list[Work], stack: ExitStack, tmp_path: Path, tally: Tally
) -> None:
    """All on one server: none of its callers' circuits opens, and it holds nothing in the end."""
    service = Service(stack, tmp_path, "127.0.0.1:0", devices=4)
    load = stack.enter_context(ClientLoad(service.running.address, work, THREADS))
    least_calls = KILLS * CALLS_PER_KILL
    for kill in range(KILLS):
        load.wait_for_each()
        service.kill_worker(load, in_a_call=kill % 2 == 0)
    load.wait_for_each()
    while len(load.right) < least_calls:
        load.wait_for_each(100)
    load.stop()
    service.stop()
    _judge(service, load, KILLS, 0, least_calls)
    tally(
        "reliability of four devices",
        f"{KILLS} workers killed, {load.sent} calls, {load.rerun} run again, "
        f"{len(load.failed)} lost, {load.sent - len(load.right)} wrong, 0 bytes held",
    )


def _judge(service: Service, load: ClientLoad, kills: int, restarts: int, least_calls: int) -> None:
    lines, right = service.calls(), load.right
    assert len(right) == len(load.answers) == load.sent
    assert (service.kills, len(service.ended)) == (kills, restarts + 1)
    answered = [line for line in lines if line["reason"] == "OK"]
    # Whatever the servers admitted they answered, and every one of these answers arrived, and was right.
    assert {line["reason"] for line in lines} <= {"OK", *REFUSED}
    assert len(right) == len(answered) >= least_calls
    assert load.rerun == sum(line["attempts"] > 1 for line in answered) >= kills // 2
    assert max(line["attempts"] for line in answered) == 2
    assert {answer.operator for answer in right} == set(OPERATORS)
    assert {line["device"] for line in answered} == {f"cpu:{index}" for index in range(service.devices)}


def _summary(service: Service, load: ClientLoad) -> dict[str, int | str]:
    lines = service.calls()
    refused = sum(line["reason"] in REFUSED for line in lines)
    return {
        "1 worker kills": service.kills,
        "2 server restarts": len(service.ended) - 1,
        "3 calls sent": load.sent + load.refused.total(),
        "4 accepted": len(lines) - refused,
        "5 answered": sum(line["reason"] == "OK" for line in lines),
        "6 right": len(load.right),
        "7 retried by the client": told(load.refused),
        "8 re-run on another worker": load.rerun,
        "9 lost or wrong": len(load.failed) + load.sent - len(load.right),
        "right by operator": told(Counter(answer.operator for answer in load.right)),
    }


def test_workers_and_what_they_started_end_with_their_server(tmp_path: Path) -> None:
    """However the server goes, by SIGTERM or by SIGKILL, no worker stays behind, nor a child of one."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        log_path = tmp_path / f"{number}.log"
        with run_server(log_path, devices="test:2?children=1", check_end=False) as running:
            workers = workers_of(running.process.pid)
            assert len(workers) == 2
            children = [process.pid for process in processes() if process.parent in workers]
            assert len(children) == 6
            watched = [os.pidfd_open(pid) for pid in (*workers, *children)]
            running.signal(number)
            running.wait()
            for watch in watched:
                ended, _, _ = select.select([watch], [], [], 30)
                os.close(watch)
                assert ended, "a worker outlived its server, or something that it started"
