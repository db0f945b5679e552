"""A verifier on a thread of this process: what it answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from npugrad import get_operator
from npugrad.call import CallOptions
from npugrad_server.pool.arena import InputArena, OutputArena
from npugrad_server.pool.regions import Region
from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode
from npugrad_server.worker.protocol import CallDone, CallFailed, OpenDevice, RunCall
from npugrad_server.worker.verifier import NAME, Verifier

SIZE = 1 << 16
RECORD = get_operator("group_norm_backward")
META = RECORD.build(n=2, c=6, hxw=6)
OUTPUTS = RECORD.infer(META)
INPUTS = RECORD.make_inputs(META, np.random.default_rng(0))


def order(**changes: Any) -> RunCall:
    offsets = [{name: 1024 * (i + 1) for i, name in enumerate(names)} for names in (META.inputs, OUTPUTS)]
    return replace(RunCall(7, RECORD.name, META, OUTPUTS, CallOptions(), offsets[0], offsets[1]), **changes)


@pytest.fixture
def ask() -> Iterator[Callable[[RunCall, float], Any]]:
    """Has a call compared, whose results are the reference's times a factor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, closing(InputArena(SIZE)) as inputs, closing(OutputArena(1)) as nothing:
        ours.settimeout(30)
        served = threading.Thread(target=Verifier(theirs).serve)
        served.start()

        def compare(run: RunCall, factor: float) -> Any:
            for name, array in INPUTS.items():
                if array is not None:
                    place = inputs.view(Region(0, SIZE), run.input_offsets[name], array.nbytes)
                    place[:] = array.tobytes()
            with closing(OutputArena(SIZE)) as outputs:
                golden = {name: np.empty(meta.shape) for name, meta in OUTPUTS.items() if meta is not None}
                RECORD.reference(INPUTS, META.attrs, golden)
                written = np.memmap(f"/proc/self/fd/{outputs.fd}", np.uint8, "r+")
                for name, values in golden.items():
                    found = np.frombuffer((values * factor).astype(np.float32).tobytes(), np.uint8)
                    written[run.output_offsets[name] :][: found.size] = found
                socket.send_fds(ours, [encode(run)], [outputs.fd])
            return decode(ours.recv(MAX_MESSAGE_BYTES))

        ours.send(
            encode(OpenDevice(NAME, "atlas-a2", 1, inputs.worker_fd, SIZE, nothing.fd, nothing.nbytes, 0))
        )
        try:
            yield compare
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            served.join()


def test_results_within_the_tolerance_are_right_and_only_wanted_ones_are_looked_at(ask: Any) -> None:
    done = ask(order(), 1.0)
    assert isinstance(done, CallDone)
    assert (done.call, done.verification) == (7, "")
    assert done.verify_s > 0
    assert [*done.verified] == [*OUTPUTS]
    assert all(0 <= used <= 1 for _, _, used in done.verified.values())
    fewer = {**OUTPUTS, "grad_input": None, "grad_beta": None}
    for outputs, name in ((OUTPUTS, "grad_input"), (fewer, "grad_gamma")):
        failed = ask(order(outputs=outputs), 1.1)
        assert isinstance(failed, CallFailed)
        assert (failed.call, failed.reason) == (7, "VERIFICATION_FAILED")
        assert f"{name}: found a result outside tolerance" in failed.message


def test_a_call_that_lies_beyond_its_arena_is_an_error_and_the_next_one_is_compared(ask: Any) -> None:
    beyond = ask(order(call=8, output_offsets=dict.fromkeys(OUTPUTS, SIZE - 2048)), 1.0)
    assert isinstance(beyond, CallFailed | CallDone)
    run = order()
    far = replace(run, meta=RECORD.build(n=2, c=6, hxw=6000))
    failed = ask(far, 1.0)
    assert isinstance(failed, CallFailed)
    assert failed.reason == "INTERNAL"
    assert isinstance(ask(run, 1.0), CallDone)
