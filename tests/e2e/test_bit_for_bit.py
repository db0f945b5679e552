"""Results over the wire are the CPU backend's local results bit for bit, however the call travels.

Local means: the same backend, on C-contiguous operands, into arrays of the outputs' own types, in a process
with as many threads for linear algebra as the worker has. The wire may not change one bit of it:
neither TCP nor a Unix socket, one message nor a stream, chunks of any length, nor the layout of operands.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allpairspy import AllPairs
from tests.calls import cpu_run, header_frame
from tests.e2e.harness import (
    STREAMED,
    UNARY,
    Array,
    Operands,
    Wire,
    case,
    differences,
    each_operator,
    encode,
    expanded,
    interleaved,
    local_results,
    outputs_of,
    own_threads,
    wire_layout,
    workers_of,
)
from tests.fix_server import ServerProcess, StartServer, run_server
from tests.operators import FLOYD, GRID_SAMPLER, GRID_SAMPLER_3D, GROUP_NORM, MSDA
from tests.summary import Tally

from npugrad import codec
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad_client import Client
from npugrad_server.acceptance.shapes import float_dtypes

INDEX_OPERANDS = ("spatial_shape", "level_start_index")
CHUNKS = (1021, 64 * 1021)
"""Lengths of chunks, of which the first is a prime, so that they end inside elements."""
WAYS = (
    ("contiguous", "as it is"),
    ("offset", "transposed"),
    ("reversed", "every second"),
    ("gaps", "backwards"),
    ("expanded", "broadcast"),
    ("contiguous", "read only"),
)
"""How operands lie on the wire, as other clients may send them, and as NumPy users have them."""
LARGE_MESSAGES = ("--max-message-bytes", "64MiB")
"""So that unary calls may be as large as the streamed ones that they are compared with."""
LARGE: dict[OpRecord, dict[str, Any]] = {
    GROUP_NORM: {"c": 48, "hxw": 96 * 96, "group": 8},
    GRID_SAMPLER: {"dtype": "bfloat16", "c": 24, "h": 96, "w": 160, "oh": 64, "ow": 64},
    MSDA: {"dtype": "float16", "nq": 300, "nh": 8, "ch": 32, "levels": ((40, 40), (20, 20)), "points": 4},
    FLOYD: {"dtype": "bfloat16", "h": 2, "d": 64, "with_mask": True},
    GRID_SAMPLER_3D: {"dtype": "float64", "c": 8, "d": 32, "h": 28, "w": 36, "od": 12, "oh": 14, "ow": 18},
}
"""Sizes whose operands and results take several chunks of 1 MiB, none of them a whole number of chunks."""


# ------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True, eq=False)
class Call:
    """One call with its data, and what the CPU backend answers to it in this process."""

    record: OpRecord
    meta: CallMeta
    operands: Operands
    results: Operands
    backend: str

    @classmethod
    def of(cls, name: str, record: OpRecord, meta: CallMeta, *, is_expanded: bool = False) -> Call:
        made = record.make_inputs(meta, np.random.default_rng(zlib.crc32(name.encode())))
        if is_expanded:
            made = {n: a if a is None or n in INDEX_OPERANDS else expanded(a) for n, a in made.items()}
        outputs = record.infer(meta)
        wanted, backend = cpu_run(record, meta, made, outputs)
        return cls(record, meta, made, {output: wanted.get(output) for output in outputs}, backend)


def pairs(record: OpRecord) -> Iterator[tuple[str, Call, tuple[str, str], int, str]]:
    """Any two of an operator's types, modes and masks, of layouts, lengths of chunks and transports.

    Widths, each of which makes a call of megabytes larger, go round.
    """
    variants = dict(record.workloads.variants)
    widths = itertools.cycle(variants.pop("d", ()) if record is FLOYD else ())
    axes = [float_dtypes(record, Product.ATLAS_A2), *variants.values(), WAYS, CHUNKS, ("tcp", "unix")]
    for number, (dtype, *chosen, way, chunk_bytes, transport) in enumerate(AllPairs(axes)):
        values = dict(zip(variants, chosen, strict=True))
        if record is FLOYD and number % 4 == 0:
            values["d"] = next(widths)
        name = f"{dtype} {values} {way} {chunk_bytes} {transport}"
        meta = record.build(dtype=dtype, **values)
        yield name, Call.of(name, record, meta, is_expanded="expanded" in way), way, chunk_bytes, transport


def samples(record: OpRecord) -> Iterator[tuple[str, Call, tuple[str, str], int, str]]:
    for number, sample in enumerate(record.samples(Product.ATLAS_A2)):
        metas = {n: None if m is None else m.contiguous() for n, m in sample.call.inputs.items()}
        name = f"sample {sample.name}"
        call = Call.of(name, record, sample.call.with_inputs(**metas))
        yield name, call, WAYS[0], CHUNKS[number % 2], "unix" if number % 3 == 0 else "tcp"


# ----------------------------------------------------------------------------------------------- servers


@dataclass(frozen=True)
class Target:
    wire: Wire
    unary: Client
    streamed: Client


@contextmanager
def connected(running: ServerProcess) -> Iterator[Target]:
    with (
        running.channel() as channel,
        Client(running.address, timeout_s=60, stream_from_bytes=UNARY) as unary,
        Client(running.address, timeout_s=60, stream_from_bytes=STREAMED) as streamed,
    ):
        yield Target(Wire.of(channel), unary, streamed)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Target]]:
    """One server on a port and one on a Unix socket, with as many threads as this process."""
    folder, env = tmp_path_factory.mktemp("bits"), own_threads()
    with (
        run_server(folder / "tcp.log", *LARGE_MESSAGES, env=env) as tcp,
        run_server(folder / "unix.log", *LARGE_MESSAGES, env=env, listen=f"unix:{folder}/s") as unix,
        connected(tcp) as over_tcp,
        connected(unix) as over_unix,
    ):
        assert unix.address.startswith("unix:")
        yield {"tcp": over_tcp, "unix": over_unix}


def typed(client: Client, call: Call, view: str) -> dict[str, Any]:
    """Results of the client's typed method; what produced them is told truly."""
    operands = {name: None if a is None else _as_view(a, view) for name, a in call.operands.items()}
    result = getattr(client, call.record.name)(**operands, **call.meta.attrs, out=dict(call.meta.outputs))
    info = result.info
    assert (info.backend, info.device) == (call.backend, "cpu:0")
    assert (info.simulated, info.attempts) == (False, 1)
    assert info.product is Product.ATLAS_A2
    return outputs_of(call.record, result)


def _as_view(array: Array, kind: str) -> Any:
    if kind == "transposed":
        return np.asfortranarray(array)
    if kind == "every second":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)
        wide[..., 1::2] = array
        return wide[..., 1::2]
    if kind == "backwards":
        return np.ascontiguousarray(array[::-1])[::-1]
    if kind == "read only":
        frozen = array.copy()
        frozen.flags.writeable = False
        return frozen
    return array


# ------------------------------------------------------------------------------------------------- tests


@each_operator
def test_every_call_comes_back_bit_for_bit(
    record: OpRecord, targets: Mapping[str, Target], tally: Tally
) -> None:
    for name, call, (layout, view), chunk_bytes, transport in (*samples(record), *pairs(record)):
        target, rng = targets[transport], np.random.default_rng(7)
        packed = {n: wire_layout(a, layout, rng) for n, a in call.operands.items() if a is not None}
        with case(name):
            if layout != "contiguous":
                assert not all(meta.is_contiguous for meta, _ in packed.values())
            whole, _ = encode(record, call.meta, packed)
            message, follow = encode(record, call.meta, packed, chunk_from_bytes=1)
            pieces = chunk_bytes * (1 + max((len(d) for _, d in follow), default=0) // 2**17)
            pieces = min(pieces, codec.MAX_CHUNK_BYTES)
            found = {
                "unary": typed(target.unary, call, view),
                "streamed": typed(target.streamed, call, view),
                "whole": target.wire.unary(record, whole),
                "chunked": target.wire.execute([header_frame(record, message), *interleaved(follow, pieces)]),
            }
            problems = {way: differences(call.results, results) for way, results in found.items()}
            assert not any(problems.values()), problems
        tally("bit for bit: calls compared", len(found))
        tally("bit for bit: outputs compared", len(found) * sum(a is not None for a in call.results.values()))


@pytest.mark.parametrize("record", LARGE, ids=lambda record: record.name)
def test_calls_of_many_chunks_come_back_bit_for_bit(
    record: OpRecord, targets: Mapping[str, Target], tally: Tally
) -> None:
    transport = ("tcp", "unix")[[*LARGE].index(record) % 2]
    call, target = Call.of("large", record, record.build(**LARGE[record])), targets[transport]
    assert max(a.nbytes for a in call.results.values() if a is not None) > codec.CHUNK_BYTES
    assert differences(call.results, typed(target.unary, call, "as it is")) == []
    assert differences(call.results, typed(target.streamed, call, "as it is")) == []
    rng = np.random.default_rng(0)
    packed = {n: wire_layout(a, "reversed", rng) for n, a in call.operands.items() if a is not None}
    message, follow = encode(record, call.meta, packed, chunk_from_bytes=1)
    frames = [header_frame(record, message), *interleaved(follow, codec.MAX_CHUNK_BYTES)]
    assert differences(call.results, target.wire.execute(frames)) == []
    tally("bit for bit: calls compared", 3)


def test_one_variable_sets_the_threads_of_every_library_and_one_option_the_pages(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries differ in which variable they follow first, and results in the number of threads.

    By the pages of 9.1.0, and not by those that the record is written from, the grid may be float64.
    """
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    running = start_server("--cann", "9.1.0", env={"OMP_NUM_THREADS": "3"})
    call = GRID_SAMPLER.build(dtype="float64")
    operands = GRID_SAMPLER.make_inputs(call, np.random.default_rng(0))
    with Client(running.address) as client:
        method: Any = client.grid_sampler_2d_backward
        found = outputs_of(GRID_SAMPLER, method(**operands, **call.attrs))
        assert client.server_info().cann == "9.1.0"
    assert differences(local_results(GRID_SAMPLER, call, operands), found) == []
    [worker] = workers_of(running.process.pid)
    entries = Path(f"/proc/{worker}/environ").read_text().split("\0")
    found = dict(entry.partition("=")[::2] for entry in entries)
    assert (found["OMP_NUM_THREADS"], found["OPENBLAS_NUM_THREADS"]) == ("3", "3")
    assert "3 threads" in running.info().devices[0].description
