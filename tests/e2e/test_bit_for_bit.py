"""Results over the wire are the CPU backend's local results bit for bit, however the call travels.

Local means: the same backend, on C-contiguous operands, into arrays of the outputs' own types, in a process
with as many threads for linear algebra as the worker has. The wire may not change one bit of it:
neither TCP nor a Unix socket, one message nor a stream, chunks of any length, nor the layout of operands.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.calls import cpu_backend_name, header_frame
from tests.e2e.harness import (
    STREAMED,
    UNARY,
    Array,
    Wire,
    differences,
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
from npugrad.dtypes import DType
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_client import Client
from npugrad_server.acceptance.cases import small_calls

FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
INDICES = (DType.INT32, DType.INT64)
TCP, UNIX = "tcp", "unix"
LAYOUTS = ("contiguous", "offset", "reversed", "gaps", "expanded")
INDEX_OPERANDS = ("spatial_shape", "level_start_index")
ODD_CHUNK_BYTES = 1021
"""A prime, so that chunks end inside elements."""
LARGE_MESSAGES = ("--max-message-bytes", "64MiB")
"""So that unary calls may be as large as the streamed ones that they are compared with."""


# ------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True, eq=False)
class Case:
    """One call.

    Attributes:
        id: For the test's name; begins with the operator.
        record: Its operator.
        call: Its metas, contiguous, and attributes.
    """

    id: str
    record: OpRecord
    call: CallMeta

    def operands(self) -> dict[str, Array | None]:
        """Data of its own, the same in every run; not to be written."""
        return dict(_operands_and_results(self)[0])

    def results(self) -> dict[str, Array | None]:
        """What the CPU backend computes of it locally."""
        return _operands_and_results(self)[1]

    def backend(self) -> str:
        """What a CPU device names as having computed it."""
        return cpu_backend_name(self.record, self.call, self.operands())


@lru_cache(maxsize=64)
def _operands_and_results(case: Case) -> tuple[dict[str, Array | None], dict[str, Array | None]]:
    operands = case.record.make_inputs(case.call, np.random.default_rng(zlib.crc32(case.id.encode())))
    return operands, local_results(case.record, case.call, operands)


def _bits(mask: tuple[bool, ...] | None) -> str:
    return "null" if mask is None else "".join("01"[bit] for bit in mask)


def group_norm_cases() -> Iterator[Case]:
    masks = list(combinations((True, False), repeat=3))
    for dtype, with_gamma, mask in combinations(FLOATS, (True, False), masks):
        call = GROUP_NORM.build(dtype=dtype, with_gamma=with_gamma, output_mask=mask)
        gamma = "gamma" if with_gamma else "no_gamma"
        yield Case(f"{GROUP_NORM.name}-{dtype}-{gamma}-mask{_bits(mask)}", GROUP_NORM, call)


def grid_sampler_cases() -> Iterator[Case]:
    masks = ((True, True), (True, False), (False, True), (False, False), None)
    for dtype, mode, padding, aligned, mask in combinations(FLOATS, range(2), range(3), (False, True), masks):
        call = GRID_SAMPLER.build(
            dtype=dtype,
            interpolation_mode=mode,
            padding_mode=padding,
            align_corners=aligned,
            output_mask=mask,
        )
        text = f"mode{mode}-padding{padding}-{'aligned' if aligned else 'edges'}-mask{_bits(mask)}"
        yield Case(f"{GRID_SAMPLER.name}-{dtype}-{text}", GRID_SAMPLER, call)


def grid_sampler_3d_cases() -> Iterator[Case]:
    for dtype, mode, padding in combinations((*FLOATS, DType.FLOAT64), range(2), range(3)):
        call = GRID_SAMPLER_3D.build(dtype=dtype, interpolation_mode=mode, padding_mode=padding)
        yield Case(f"{GRID_SAMPLER_3D.name}-{dtype}-mode{mode}-padding{padding}", GRID_SAMPLER_3D, call)


def msda_cases() -> Iterator[Case]:
    for dtype, rank, sizes, starts in combinations(FLOATS, (3, 4), INDICES, INDICES):
        call = MSDA.build(dtype=dtype, grad_output_rank=rank, index_dtype=sizes)
        start_index = _retyped(call, "level_start_index", starts)
        yield Case(
            f"{MSDA.name}-{dtype}-rank{rank}-{sizes}-{starts}",
            MSDA,
            call.with_inputs(level_start_index=start_index),
        )


def floyd_cases() -> Iterator[Case]:
    for dtype, mask in combinations((DType.FLOAT16, DType.BFLOAT16), (None, DType.BOOL, DType.UINT8)):
        call = FLOYD.build(dtype=dtype, with_mask=mask is not None, mask_dtype=mask or DType.BOOL)
        yield Case(f"{FLOYD.name}-{dtype}-mask_{mask}", FLOYD, call)


def variant_cases(*others: Case) -> Iterator[Case]:
    """The variants of every record that has no case yet, but for what is a sample."""
    known = {case.record for case in others}
    for record in (each for each in OPERATORS.values() if each not in known):
        for small in small_calls(record, Product.ATLAS_A2, simulated=True):
            if not small.name.startswith("sample "):
                yield Case(f"{record.name}-{small.name.replace(' ', '-')}", record, small.call)


def sample_cases() -> Iterator[Case]:
    """Every sample of every record: empty tensors, rank 0 and 8, limits, declared outputs."""
    for record in OPERATORS.values():
        for sample in record.samples(Product.ATLAS_A2):
            metas = {n: None if m is None else m.contiguous() for n, m in sample.call.inputs.items()}
            yield Case(f"{record.name}-sample-{sample.name}", record, sample.call.with_inputs(**metas))


def _retyped(call: CallMeta, name: str, dtype: DType) -> Any:
    meta = call.tensor(name)
    return type(meta)(dtype, meta.shape)


MATRIX = [
    *group_norm_cases(),
    *grid_sampler_cases(),
    *msda_cases(),
    *floyd_cases(),
    *grid_sampler_3d_cases(),
]
MATRIX.extend(variant_cases(*MATRIX))
"""Every operator in every dtype with every output mask, and the modes that choose other code."""
PLAIN = [
    *(Case(f"{s.name}-{d}", s, s.build(dtype=d)) for s in (GROUP_NORM, GRID_SAMPLER, MSDA) for d in FLOATS),
    *(Case(f"{FLOYD.name}-{d}", FLOYD, FLOYD.build(dtype=d, with_mask=True)) for d in FLOATS[1:]),
]
"""Every operator in every dtype once."""
LARGE = [
    Case(f"{GROUP_NORM.name}-float32", GROUP_NORM, GROUP_NORM.build(c=48, hxw=96 * 96, group=8)),
    Case(
        f"{GRID_SAMPLER.name}-bfloat16",
        GRID_SAMPLER,
        GRID_SAMPLER.build(dtype="bfloat16", c=24, h=96, w=160, oh=64, ow=64),
    ),
    Case(
        f"{MSDA.name}-float16",
        MSDA,
        MSDA.build(dtype="float16", nq=300, nh=8, ch=32, levels=((40, 40), (20, 20)), points=4),
    ),
    Case(f"{FLOYD.name}-bfloat16", FLOYD, FLOYD.build(dtype="bfloat16", h=2, d=64, with_mask=True)),
    Case(
        f"{GRID_SAMPLER_3D.name}-float64",
        GRID_SAMPLER_3D,
        GRID_SAMPLER_3D.build(dtype="float64", c=8, d=32, h=28, w=36, od=12, oh=14, ow=18),
    ),
]
"""Calls whose operands and results take several chunks of 1 MiB, none of them a whole number of chunks."""


def over(first: str, second: str, cases: list[Case]) -> pytest.MarkDecorator:
    """Every case over the first transport, every third over the second, but none of Floyd's."""
    pairs = [(case, first) for case in cases]
    pairs += [(case, second) for case in cases[::3] if case.record is not FLOYD]
    ids = [f"{case.id}-{transport}" for case, transport in pairs]
    return pytest.mark.parametrize(("case", "transport"), pairs, ids=ids)


# ----------------------------------------------------------------------------------------------- servers


@dataclass(frozen=True)
class Target:
    """One server and the ways to call it."""

    running: ServerProcess
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
        yield Target(running, Wire.of(channel), unary, streamed)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Target]]:
    """One server on a port and one on a Unix socket, with as many threads as this process."""
    folder = tmp_path_factory.mktemp("bits")
    with (
        run_server(folder / "tcp.log", *LARGE_MESSAGES, env=own_threads()) as tcp,
        run_server(
            folder / "unix.log", *LARGE_MESSAGES, env=own_threads(), listen=f"unix:{folder}/s"
        ) as unix,
        connected(tcp) as over_tcp,
        connected(unix) as over_unix,
    ):
        assert unix.address.startswith("unix:")
        yield {"tcp": over_tcp, "unix": over_unix}


@pytest.fixture
def target(transport: str, targets: Mapping[str, Target]) -> Target:
    return targets[transport]


def typed(client: Client, case: Case, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Results of the client's typed method; what produced them is told truly."""
    result = getattr(client, case.record.name)(**operands, **case.call.attrs, out=dict(case.call.outputs))
    info = result.info
    assert (info.backend, info.device) == (case.backend(), "cpu:0")
    assert (info.simulated, info.attempts) == (False, 1)
    assert info.product is Product.ATLAS_A2
    return outputs_of(case.record, result)


# ------------------------------------------------------------------------------------------------- tests


@over(TCP, UNIX, [*MATRIX, *sample_cases()])
def test_every_call_comes_back_bit_for_bit(case: Case, target: Target, tally: Tally) -> None:
    operands, expected = case.operands(), case.results()
    packed = {
        n: wire_layout(a, "contiguous", np.random.default_rng(0))
        for n, a in operands.items()
        if a is not None
    }
    message, follow = encode(case.record, case.call, packed, chunk_from_bytes=1)
    chunk_bytes = ODD_CHUNK_BYTES * (1 + max((len(d) for _, d in follow), default=0) // 2**17)
    frames = [header_frame(case.record, message), *interleaved(follow, chunk_bytes)]
    found = {
        "unary": typed(target.unary, case, operands),
        "streamed": typed(target.streamed, case, operands),
        "chunked": target.wire.execute(frames),
    }
    problems = {way: differences(expected, results) for way, results in found.items()}
    assert not any(problems.values()), problems
    tally("bit for bit: calls compared", len(found))
    tally("bit for bit: outputs compared", len(found) * sum(a is not None for a in expected.values()))


@over(TCP, UNIX, PLAIN)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_foreign_layout_changes_no_bit(case: Case, kind: str, target: Target, tally: Tally) -> None:
    """Strides, gaps, offsets and stride 0 on the wire, as clients in other languages may send them."""
    operands, expected = case.operands(), case.results()
    if kind == "expanded":
        operands = {
            name: a if a is None or name in INDEX_OPERANDS else expanded(a) for name, a in operands.items()
        }
        expected = local_results(case.record, case.call, operands)
    rng = np.random.default_rng(7)
    packed = {name: wire_layout(a, kind, rng) for name, a in operands.items() if a is not None}
    if kind != "contiguous":
        assert not all(meta.is_contiguous for meta, _ in packed.values())
    message, _ = encode(case.record, case.call, packed)
    assert differences(expected, target.wire.unary(case.record, message)) == []
    message, follow = encode(case.record, case.call, packed, chunk_from_bytes=64)
    results = target.wire.execute(
        [header_frame(case.record, message), *interleaved(follow, 64 * ODD_CHUNK_BYTES)]
    )
    assert differences(expected, results) == []
    tally("bit for bit: calls compared", 2)


@over(UNIX, TCP, PLAIN)
@pytest.mark.parametrize("kind", ["transposed", "every_second", "backwards", "broadcast", "read_only"])
def test_any_array_of_the_caller_changes_no_bit(case: Case, kind: str, target: Target, tally: Tally) -> None:
    """Views as NumPy users have them, through the client, which packs what cannot travel as it is."""
    operands = {name: None if a is None else _as_view(a, kind) for name, a in case.operands().items()}
    expected = local_results(case.record, case.call, operands) if kind == "broadcast" else case.results()
    for client in (target.unary, target.streamed):
        assert differences(expected, typed(client, case, operands)) == []
    tally("bit for bit: calls compared", 2)


def _as_view(array: Array, kind: str) -> Array:
    if kind == "transposed":
        return np.asfortranarray(array)
    if kind == "every_second":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)
        wide[..., 1::2] = array
        return wide[..., 1::2]
    if kind == "backwards":
        return np.ascontiguousarray(array[::-1])[::-1]
    if kind == "broadcast":
        return expanded(array)
    frozen = array.copy()
    frozen.flags.writeable = False
    return frozen


@over(UNIX, TCP, LARGE)
def test_calls_of_many_chunks_come_back_bit_for_bit(case: Case, target: Target, tally: Tally) -> None:
    operands, expected = case.operands(), case.results()
    assert max(a.nbytes for a in expected.values() if a is not None) > codec.CHUNK_BYTES
    assert differences(expected, typed(target.unary, case, operands)) == []
    assert differences(expected, typed(target.streamed, case, operands)) == []
    packed = {
        n: wire_layout(a, "reversed", np.random.default_rng(0)) for n, a in operands.items() if a is not None
    }
    message, follow = encode(case.record, case.call, packed, chunk_from_bytes=1)
    results = target.wire.execute(
        [header_frame(case.record, message), *interleaved(follow, codec.MAX_CHUNK_BYTES)]
    )
    assert differences(expected, results) == []
    tally("bit for bit: calls compared", 3)


@over(UNIX, TCP, PLAIN)
def test_the_same_call_twice_gives_the_same_bits(case: Case, target: Target) -> None:
    """Nothing of an earlier call shows: the arenas are full of other bytes in between."""
    operands = case.operands()
    first = typed(target.unary, case, operands)
    noise = Case("noise", GROUP_NORM, GROUP_NORM.build(c=6, hxw=2**14, group=3))
    typed(target.streamed, noise, noise.operands())
    assert differences(first, typed(target.streamed, case, operands)) == []


def test_one_variable_sets_the_threads_of_every_library(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries differ in which variable they follow first, and results in the number of threads."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    running = start_server(env={"OMP_NUM_THREADS": "3"})
    [worker] = workers_of(running.process.pid)
    entries = Path(f"/proc/{worker}/environ").read_text().split("\0")
    found = dict(entry.partition("=")[::2] for entry in entries)
    assert (found["OMP_NUM_THREADS"], found["OPENBLAS_NUM_THREADS"]) == ("3", "3")
    assert "3 threads" in running.info().devices[0].description
