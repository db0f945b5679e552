"""A server to be hurt and what it must still be able to do; what was counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import grpc
import pytest
from tests.calls import TIMEOUT_S, Sample, fill, sample
from tests.e2e.harness import Wire, assert_unharmed, run_victim
from tests.fix_server import ServerProcess
from tests.summary import Tally, tally_of

from npugrad.ops import OPERATORS
from npugrad_client import Client


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    return tally_of(pytestconfig, "end to end")


@pytest.fixture(scope="session")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with run_victim(tmp_path_factory.mktemp("victim")) as running:
        yield running


@pytest.fixture(scope="session")
def normal() -> Sample:
    """A call that the victim must always answer right."""
    return sample()


@pytest.fixture(scope="module")
def channel(victim: ServerProcess) -> Iterator[grpc.Channel]:
    with victim.channel() as opened:
        yield opened


@pytest.fixture(scope="module")
def server_channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    """A channel to the server of the whole run, which is not hurt."""
    with server.channel() as opened:
        yield opened


@pytest.fixture(scope="module")
def wire(channel: grpc.Channel) -> Wire:
    return Wire.of(channel)


@pytest.fixture(scope="module")
def client(victim: ServerProcess) -> Iterator[Client]:
    with Client(victim.address, timeout_s=TIMEOUT_S, retry=None) as opened:
        yield opened


@pytest.fixture(scope="session")
def legal() -> Mapping[str, Sample]:
    """One legal call of each operator, with data; not to be changed."""
    return {record.name: fill(record, record.build()) for record in OPERATORS.values()}


@pytest.fixture(scope="module")
def watch(victim: ServerProcess) -> Iterator[grpc.Channel]:
    """A channel that only `unharmed` uses."""
    with victim.channel() as channel:
        yield channel


@pytest.fixture
def unharmed(victim: ServerProcess, watch: grpc.Channel, normal: Sample) -> Iterator[None]:
    """After the test the server is the same, healthy, holds nothing, and answers a normal call right."""
    yield
    assert_unharmed(victim, watch, normal)
