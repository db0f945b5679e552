"""Clients of several servers: turns, lost and draining servers under load, hedges; no call may be lost."""

from __future__ import annotations

import itertools
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.calls import TIMEOUT_S, UPLOAD_HXW, Sample, gated, sample
from tests.client.both import WAYS, Looped, Make, caught
from tests.client.fake_service import (
    STREAMED,
    UNARY,
    Context,
    Gate,
    Seen,
    abort_with,
    fake_service,
    group_norm,
    read_header,
    stream_zeros,
    zeros,
)
from tests.e2e.harness import eventually
from tests.e2e.service_address import service_address
from tests.fix_server import StartServer
from tests.proofs.callers import Load, arguments, plain_calls, sdk
from tests.proofs.restarts import prove

from npugrad.errors import ServerBusy
from npugrad.operator import OpRecord
from npugrad.v1 import backward_pb2_grpc
from npugrad_client import (
    AsyncClient,
    Client,
    ConnectError,
    DeadlineExceeded,
    RetryPolicy,
    ServerDraining,
    _picker,
)


def is_right(call: Sample, grads: Any) -> bool:
    return {name: getattr(grads, name).tobytes() for name in call.outputs} == call.reference()


# ------------------------------------------------------------------------------------------- real servers


@pytest.mark.slow
def test_no_call_is_lost_when_one_of_two_servers_is_killed_under_load(start_server: StartServer) -> None:
    """Neither of a client in threads nor of an asynchronous one, unary and streamed, each with own data."""
    victim, survivor = start_server(check_end=False), start_server()
    targets = [victim.address, survivor.address]
    with ExitStack() as stack:
        loads = []
        for seed, (make, way) in enumerate(itertools.product((Client, Looped), (UNARY, STREAMED))):
            made = sample(n=2, c=8, hxw=64 if way == UNARY else 5_000, group=2, seed=seed)
            call = stack.enter_context(sdk(targets, made, make, stream_from_bytes=way))
            loads.append(stack.enter_context(Load(call, callers=2, pace_s=0.05)))
        for load in loads:
            load.wait_for(15)
        victim.signal(signal.SIGKILL)
        for load in loads:
            load.wait_for(load.calls + 30)
    assert [load.failed for load in loads] == [{}] * 4
    tries = [each.answer.tries for load in loads for each in load.ended]
    assert max(tries) > 1, "no call met the killed server"
    survivor.assert_nothing_leaked()


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_rolling_restarts_lose_no_call(restarts: int, tmp_path: Path) -> None:
    """What `make prove-restarts` shows with many more: every kind of caller."""
    found = prove(tmp_path, restarts=restarts, calls=5 * restarts, held_s=restarts, pace_s=0.1)
    assert not found.lost, found
    assert len(found.loads) == 8
    assert max(found.tries) > 1, "no call met a restart"


def test_a_server_that_stands_still_costs_the_calls_that_wait_for_it_and_no_others(
    start_server: StartServer,
) -> None:
    """A stopped process: its connections stay open, and nothing is ever answered."""
    first, second = start_server(check_end=False), start_server()
    call = sample(seed=1)
    with Client([first.address, second.address], timeout_s=2, retry=None) as client:
        for _ in range(4):
            client.group_norm_backward(**arguments(call), timeout_s=60)
        first.signal(signal.SIGSTOP)
        late = 0
        for _ in range(40):
            try:
                assert is_right(call, client.group_norm_backward(**arguments(call)))
            except DeadlineExceeded:
                late += 1
        assert 1 <= late <= 4
        first.signal(signal.SIGCONT)
        before = first.info().accepted_calls
        for _ in range(3000):
            client.group_norm_backward(**arguments(call), timeout_s=60)
            if first.info().accepted_calls > before:
                return
        pytest.fail("the server got no calls again")


def test_addresses_behind_one_target_share_the_calls_and_a_lost_one_loses_none(
    start_server: StartServer,
) -> None:
    """What a name with several addresses is to grpc, without a name server: round robin by grpc itself."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        port = taken.getsockname()[1]
    servers = [start_server(listen=f"127.0.0.{n}:{port}", check_end=n == 3) for n in (2, 3)]
    with Client(f"ipv4:127.0.0.2:{port},127.0.0.3:{port}", timeout_s=60) as client:
        client.server_info()
        call = sample(seed=1)
        while not all(server.info().accepted_calls for server in servers):
            client.group_norm_backward(**arguments(call))
        servers[0].signal(signal.SIGKILL)
        assert all(is_right(call, client.group_norm_backward(**arguments(call))) for _ in range(30))


@pytest.mark.slow
def test_a_new_server_gets_calls_once_connections_reach_their_age(start_server: StartServer) -> None:
    """And none is lost: not those in progress when a connection is closed, however long they take."""
    flags = ("--max-connection-age-s", "1", "--streams-per-device", "8")
    first, gate = start_server(*flags, devices="test:1?ms=2&compute=1"), threading.Event()
    local = [("grpc.use_local_subchannel_pool", 1)]
    with service_address(first.address) as front, grpc.insecure_channel(front.address, local) as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        held = stub.Execute(gated(sample(hxw=UPLOAD_HXW).frames(), gate, 2), timeout=TIMEOUT_S)
        with Load(plain_calls(channel)) as load:
            eventually(lambda: first.info().accepted_calls > 20, "the first server gets calls", first)
            second = start_server(*flags, devices="test:1?ms=2&compute=1")
            front.servers = (second.address, first.address)
            eventually(lambda: second.info().accepted_calls > 50, "the new server gets calls", second)
            gate.set()
            header, *_ = held
            assert header.WhichOneof("frame") == "header"
    assert not load.failed


# ---------------------------------------------------------------------------------- servers that are made up


def test_an_address_that_says_it_does_not_serve_gets_no_calls() -> None:
    with fake_service(is_serving=False) as ill, fake_service(is_serving=True) as well:
        target = f"ipv4:{ill.address},{well.address}"
        for answers in both([target], None, UNARY, 10):
            assert [answer.info.tries for answer in answers] == [1] * 10
    assert (len(ill.methods), len(well.methods)) == (0, 20)


def test_addresses_without_a_health_service_count_as_well() -> None:
    with fake_service() as one, fake_service() as two:
        both([f"ipv4:{one.address},{two.address}"], None, UNARY, 100)
    assert len(one.methods) + len(two.methods) == 200
    assert min(len(one.methods), len(two.methods)) >= 50


def refuse(error: Exception, seen: list[str] | None = None) -> Any:
    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        abort_with(context, error)  # type: ignore[arg-type]

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        abort_with(context, error)  # type: ignore[arg-type]
        yield

    return {"unary": unary, "execute": execute}


def both(targets: list[str], policy: RetryPolicy | None, way: int, number: int = 1) -> list[list[Any]]:
    def asked(make: Make) -> list[Any]:
        with make(targets, timeout_s=20, retry=policy, stream_from_bytes=way) as client:
            return [caught(lambda: client.group_norm_backward(**group_norm())) for _ in range(number)]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(asked, (Client, Looped)))


@pytest.fixture
def long_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was lost rests for longer than a test takes, on a busy machine too."""
    monkeypatch.setattr(_picker, "_FIRST_REST_S", 120)
    monkeypatch.setattr(_picker, "_LONGEST_REST_S", 120)


@WAYS
def test_a_busy_or_draining_server_is_left_for_another(way: int, long_rest: None) -> None:
    for error in (ServerBusy("full", retry_after_s=9), ServerDraining("ends")):
        with fake_service(**refuse(error)) as bad, fake_service() as good:
            for answers in both([bad.address, good.address], RetryPolicy(), way, 4):
                assert [answer.info.tries for answer in answers] == [2, 1, 1, 1]
        assert len(bad.methods) == 2


@WAYS
def test_retryable_errors_are_retried_on_one_server_until_tries_end(way: int) -> None:
    with fake_service(**refuse(ServerBusy("full"))) as seen:
        for found in both([seen.address], RetryPolicy(max_tries=3, initial_backoff_s=0.01), way):
            assert isinstance(found[0], ServerBusy)
            assert found[0].tries == 3
    assert len(seen.methods) == 6


def test_without_a_policy_nothing_is_sent_twice() -> None:
    with fake_service(**refuse(ServerBusy("full"))) as seen:
        for found in both([seen.address], None, UNARY):
            assert found[0].tries == 1
    assert len(seen.methods) == 2


def test_an_unreachable_server_costs_no_call(long_rest: None) -> None:
    with socket.socket() as taken, fake_service() as good:
        taken.bind(("127.0.0.1", 0))
        bad = f"127.0.0.1:{taken.getsockname()[1]}"
        for answers in both([bad, good.address], RetryPolicy(), UNARY, 3):
            assert [answer.info.tries for answer in answers] == [2, 1, 1]
        for found in both([bad], RetryPolicy(max_tries=2, retry_for_s=3, max_backoff_s=0.05), UNARY):
            assert isinstance(found[0], ConnectError)
            assert found[0].tries > 2, "tries at a lost server count against max_tries"


@WAYS
def test_a_slow_try_is_hedged_and_the_loser_is_cancelled(way: int) -> None:
    given_up: list[threading.Event] = []
    held = threading.Semaphore(0)

    def hold(context: Context) -> None:
        ended = threading.Event()
        context.add_callback(ended.set)
        given_up.append(ended)
        held.release()
        ended.wait(30)

    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        hold(context)
        return zeros(record, request, context)

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        hold(context)
        yield from stream_zeros(frames, context)

    # The other server answers once the slow one has the call: else it could be cancelled before it is there.
    def unary_after(record: OpRecord, request: Any, context: Context) -> Any:
        assert held.acquire(timeout=20)
        return zeros(record, request, context)

    def execute_after(frames: Any, context: Context) -> Iterator[Any]:
        assert held.acquire(timeout=20)
        yield from stream_zeros(frames, context)

    with fake_service(unary, execute) as slow, fake_service(unary_after, execute_after) as quick:
        targets = [slow.address, quick.address]
        for answers in both(targets, RetryPolicy(hedge_after_s=0.05, max_tries=2), way):
            assert answers[0].info.tries == 2
        assert [event.wait(20) for event in given_up] == [True, True], "a loser went on"


def test_a_hedged_call_fills_the_callers_array_once_and_at_its_end() -> None:
    gate, call = Gate(), group_norm()
    mine = call["input"] * 0 + 9
    with fake_service(gate.unary) as slow, fake_service() as quick:
        policy = RetryPolicy(hedge_after_s=0.02, max_tries=2)
        with Client([slow.address, quick.address], timeout_s=20, retry=policy) as client:
            grads = client.group_norm_backward(**call, out={"grad_input": mine})
            assert grads.grad_input is mine
            assert (mine == 0).all()
            mine[...] = 7
            gate.open()
    assert (mine == 7).all(), "the loser wrote into the result"


def test_a_try_that_passes_its_own_deadline_is_sent_elsewhere() -> None:
    gate = Gate()
    with fake_service(gate.unary) as stuck, fake_service() as good:
        for answers in both([stuck.address, good.address], RetryPolicy(try_timeout_s=3), UNARY):
            assert answers[0].info.tries == 2
        gate.open()


def test_a_server_that_comes_back_gets_calls_again(tmp_path: Any) -> None:
    def wait_for(seen: Seen) -> None:
        for _ in range(3000):
            client.group_norm_backward(**group_norm())
            if seen.methods:
                return
            threading.Event().wait(0.01)  # nothing tells that its rest is over
        pytest.fail("the server got no call again")

    address = f"unix:{tmp_path / 's'}"
    with fake_service() as other, Client([address, other.address], timeout_s=20) as client:
        for _ in range(2):
            with fake_service(address=address) as seen:
                wait_for(seen)
            client.group_norm_backward(**group_norm())


@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_what_is_no_list_of_targets_is_told_at_once(cls: Any) -> None:
    wrong: tuple[tuple[Any, type[Exception], str], ...] = (
        ([], ValueError, "target: found no targets; expected at least one"),
        (["a:1", ""], ValueError, "target: found empty text"),
        (["a:1", 2], TypeError, "target: found int; expected text"),
        ({"a:1"}, TypeError, "target: found set; expected text"),
    )
    for targets, error, message in wrong:
        with pytest.raises(error, match=message):
            cls(targets)


def test_a_client_names_its_targets() -> None:
    assert repr(Client(["a:1", "b:2", "a:1"])) == "Client('a:1, b:2')"
