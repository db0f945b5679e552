"""A small `make prove-mutations`, and that it notices a server which does not answer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.e2e.harness import run_victim
from tests.proofs.mutations import WAYS, tried
from tests.raw_calls import RawCall, RawCaller, Unanswered
from tests.summary import tally_of

from npugrad.ops import OPERATORS


@pytest.mark.slow
def test_damaged_messages_harm_nothing(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    with run_victim(tmp_path) as running:
        found = tried(2000, running, judged=50, seed_=1, drawn=60)
    assert not found.failure, found.failure
    assert found.sent.total() == 2000
    assert (set(found.sent), set(found.operators)) == (set(WAYS), set(OPERATORS))
    # Most messages are refused, but many get past every check.
    assert found.statuses["INVALID_ARGUMENT"] > found.statuses["OK"] > 200
    assert found.judged > 10
    tally_of(pytestconfig, "end to end")("mutations: messages", 2000)


@pytest.mark.parametrize("ends", [False, True], ids=["silent", "ends"])
def test_a_server_that_does_not_answer_is_told(ends: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with RawCaller(address, timeout_s=0.2) as caller:
            accepted, _ = server.accept()
            with accepted:
                if ends:
                    accepted.shutdown(socket.SHUT_WR)
                with pytest.raises(Unanswered, match="connection ended" if ends else "no answer within"):
                    list(caller.statuses([RawCall(b"/a/b", [b"x"])]))
