"""Calls over gRPC on simulated NPUs: every operator, type, mode, mask and layout. All is SIMULATED."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from tests.calls import Sample, call_execute, call_unary, failure_of, fill
from tests.cann_sim.build import Installation
from tests.derived import pairs, told
from tests.e2e.harness import wire_layout
from tests.edge_calls import ATTENTION, IMAGES, SAMPLERS, attention_call, grid_call
from tests.fix_npu import NpuServer, StartNpuServer
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM, MSDA
from tests.summary import Tally

from npugrad import codec
from npugrad.agreement import agreement
from npugrad.coordinates import CoordinateRule
from npugrad.dtypes import DType
from npugrad.layout import view
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.v1 import (
    backward_pb2,
    server_pb2,
    server_pb2_grpc,
    validation_pb2,
    validation_pb2_grpc,
)
from npugrad_client import Client
from npugrad_server.acceptance.shapes import float_dtypes

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]

LAYOUTS = ("contiguous", "offset", "reversed", "gaps", "expanded")


# ------------------------------------------------------------------------------------------------ helpers


def check(sample: Sample, contents: Mapping[str, bytes]) -> None:
    metas = sample.outputs
    assert contents.keys() == metas.keys()
    results = {name: view(meta, contents[name]) for name, meta in metas.items()}
    judged = agreement(sample.record, sample.arrays, sample.call.attrs, results)
    assert judged.ok, f"{sample.record.name} {sample.call}: {judged}"


def call(channel: grpc.Channel, sample: Sample, **options: Any) -> Any:
    """Makes a streamed call, checks its results, returns what produced them."""
    reply = call_execute(channel, sample.frames(**options))
    check(sample, reply.contents)
    info = reply.result.info
    assert (info.backend, info.simulated, info.device[:4]) == ("npu", True, "npu:")
    return info


def at_once(count: int, caller: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(caller, range(count)))


def laid_out(record: OpRecord, meta: CallMeta, seed: int) -> Sample:
    """A call with data, each operand in a layout of its own."""
    rng = np.random.default_rng(seed)
    made = record.make_inputs(meta, rng)
    contents: dict[str, memoryview] = {}
    arrays: dict[str, npt.NDArray[Any] | None] = dict.fromkeys(made)
    for name, array in made.items():
        if array is not None:
            layout = str(rng.choice(LAYOUTS))
            if layout == "expanded" and array.ndim and array.dtype.kind != "i":
                array = np.broadcast_to(array[:1], array.shape)
            new, contents[name] = wire_layout(array, layout, rng)
            meta = meta.with_inputs(**{name: new})
            arrays[name] = view(new, contents[name])
    return Sample(record, meta, contents, arrays)


def calls_of(record: OpRecord) -> Iterator[tuple[str, CallMeta]]:
    """Small calls with each pair of type, mode and mask."""
    variants = record.workloads.variants
    for dtype, *chosen in pairs([*float_dtypes(record, Product.ATLAS_A2)], *variants.values()):
        changed = dict(zip(variants, chosen, strict=True))
        yield f"{dtype} {changed}", record.build(dtype=dtype, **changed)


# -------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_sample_and_every_type_mode_and_mask_in_mixed_layouts(
    npu_server: NpuServer, operator: str, tally: Tally
) -> None:
    record = get_operator(operator)
    samples = [(each.name, fill(record, each.call)) for each in record.samples(Product.ATLAS_A2)]
    first = zlib.crc32(operator.encode())
    mixed = [(name, laid_out(record, meta, first + n)) for n, (name, meta) in enumerate(calls_of(record))]
    with npu_server.process.channel() as channel:
        for name, sample in (*samples, *mixed):
            with told(name):
                call(channel, sample)
    tally(f"simulated NPU calls within tolerance, {operator}", len(samples) + len(mixed))


def test_strided_operands_go_down_as_views_and_outputs_as_each_operator_wants_them(
    npu_server: NpuServer,
) -> None:
    """What the recorder of the simulator saw of phase 1, in the order of C."""
    # Sizes that no other call of this server has.
    turned = GROUP_NORM.build(n=2, c=14, hxw=4, group=2, output_mask=(False, True, False))
    turned = turned.with_inputs(
        grad_out=TensorMeta(DType.FLOAT32, (2, 14, 4), strides=(0, 1, 14), storage_offset=3)
    )
    masked = GRID_SAMPLER.build(c=14, output_mask=(False, True))
    unused = GRID_SAMPLER.build(c=15, output_mask=(True, False))
    shape = unused.tensor("input").shape
    unused = unused.with_inputs(input=TensorMeta(DType.FLOAT32, shape, strides=(0, 0, 0, 0)))
    heads = MSDA.build(grad_output_rank=4, nq=14)
    heads = heads.with_inputs(
        grad_output=TensorMeta(DType.FLOAT32, heads.tensor("grad_output").shape, strides=(0, 0, 0, 0))
    )
    with npu_server.process.channel() as channel:
        call(channel, fill(GROUP_NORM, turned))
        call(channel, fill(GRID_SAMPLER, masked))
        call(channel, fill(GRID_SAMPLER, unused))
        call(channel, fill(MSDA, heads))
    norm = the_plan(npu_server, GROUP_NORM, "gradOut", [2, 14, 4])
    assert (norm["gradOut"]["strides"], norm["gradOut"]["storage"]) == ([0, 1, 14], [56])
    assert norm["gradOut"]["offset"] == 0
    assert (norm["gradInput"], norm["gradBetaOut"]) == (None, None)
    assert norm["gradGammaOut"]["shape"] == [14]
    sampler = the_plan(npu_server, GRID_SAMPLER, "input", [2, 14, 4, 5])
    assert sampler["inputGrad"]["shape"] == [2, 14, 4, 5]
    zeros = the_plan(npu_server, GRID_SAMPLER, "input", [2, 15, 4, 5])["input"]
    assert (zeros["strides"], zeros["storage"]) == ([300, 20, 5, 1], [2, 15, 4, 5])
    bs, _, nh, ch = heads.tensor("grad_output").shape
    attention = the_plan(npu_server, MSDA, "gradOutput", [bs, 14, nh * ch])
    assert set(attention["gradOutput"]["strides"]) == {0}


def the_plan(npu_server: NpuServer, record: OpRecord, operand: str, shape: list[int]) -> dict[str, Any]:
    """Arguments of the only first phase with an operand of this shape."""
    plans = [
        {argument["name"]: argument["value"] for argument in plan["arguments"]}
        for plan in npu_server.report.records("plan")
        if plan["op"] == record.aclnn_name
    ]
    (found,) = [plan for plan in plans if plan[operand]["shape"] == shape]
    return found


def test_everything_masked_out_and_a_null_mask_succeed(npu_server: NpuServer) -> None:
    with npu_server.process.channel() as channel:
        for meta in (
            GROUP_NORM.build(output_mask=(False, False, False)),
            GRID_SAMPLER.build(output_mask=(False, False)),
            GRID_SAMPLER.build(output_mask=None),
        ):
            record = GROUP_NORM if "mean" in meta.inputs else GRID_SAMPLER
            result = call_unary(channel, record, fill(record, meta).message())
            assert not result.contents


def test_validate_tells_the_workspace(npu_server: NpuServer) -> None:
    sample = fill(GROUP_NORM, GROUP_NORM.build(n=2, c=16, hxw=32, group=2))
    with npu_server.process.channel() as channel:
        stub = validation_pb2_grpc.ValidationServiceStub(channel)
        header = codec.wrap(backward_pb2.ExecuteHeader(), GROUP_NORM, sample.message())
        answer = stub.Validate(validation_pb2.ValidateRequest(call=header), timeout=30)
        assert (answer.status, answer.HasField("workspace_bytes")) == (0, True)
        assert answer.workspace_bytes == call(channel, sample).workspace_bytes
        other = validation_pb2.ValidateRequest(call=header, product=Product.ATLAS_A3.wire)  # type: ignore[arg-type]
        assert not stub.Validate(other, timeout=30).HasField("workspace_bytes")


def test_levels_outside_the_value_tensor_never_reach_the_device(npu_server: NpuServer) -> None:
    """The literal official example stores 1.0 as int32: 1065353216 pixels."""
    sample = fill(MSDA, MSDA.build(bs=1, nq=32, nh=1, ch=8, levels=((1, 1),), points=1))
    sizes = sample.arrays["spatial_shape"]
    assert sizes is not None
    sizes[...] = 0x3F800000
    before = len(npu_server.report.records("plan"))
    with npu_server.process.channel() as channel:
        failure = failure_of(lambda: call_unary(channel, MSDA, sample.message()))
    assert failure.error.reason == "UNSAFE_LEVELS"
    assert failure.status is grpc.StatusCode.INVALID_ARGUMENT
    assert len(npu_server.report.records("plan")) == before


@pytest.mark.parametrize(
    ("record", "meta"),
    [
        (FLOYD, FLOYD.build()),
        (GRID_SAMPLER, GRID_SAMPLER.build(n=1, c=2049, h=1, w=1, oh=1, ow=1)),
    ],
    ids=["floyd", "grid sampler with 2049 channels"],
)
def test_what_cannot_be_deterministic_is_refused(
    npu_server: NpuServer, record: OpRecord, meta: CallMeta
) -> None:
    sample = fill(record, meta)
    with npu_server.process.channel() as channel:
        failure = failure_of(lambda: call_execute(channel, sample.frames(deterministic=True)))
        assert failure.error.reason == "DETERMINISM_UNSUPPORTED"
        assert failure.status is grpc.StatusCode.FAILED_PRECONDITION
        call(channel, sample)


def test_modes_never_overlap_and_devices_and_streams_share_the_work(npu_server: NpuServer) -> None:
    """Four callers with both modes; the simulator aborts when the option changes under queued work."""
    devices: set[str] = set()

    def caller(number: int) -> None:
        with npu_server.process.channel() as channel:
            for turn in range(12):
                sample = fill(GROUP_NORM, GROUP_NORM.build(n=4, c=32, hxw=64, group=4), seed=turn)
                devices.add(call(channel, sample, deterministic=(number + turn // 3) % 2 == 0).device)

    first = len(npu_server.report.records("launch"))
    at_once(4, caller)
    assert devices == {"npu:0", "npu:1"}
    launches = npu_server.report.records("launch")
    assert len(launches) - first == 48
    assert {launch["deterministic"] for launch in launches} == {0, 1}
    assert len({(launch["device"], launch["stream"]) for launch in launches}) == 4


def test_deterministic_calls_of_eight_streams_have_the_bits_of_a_single_one(
    start_npu_server: StartNpuServer,
) -> None:
    """Without the option the simulator's results differ from run to run."""
    running = start_npu_server("--streams-per-device", "8", plan="kernel_ms=30")
    sample = fill(GROUP_NORM, GROUP_NORM.build(n=4, c=32, hxw=64, group=4))

    def results(channel: grpc.Channel, deterministic: bool, count: int) -> list[bytes]:
        frames = [sample.frames(deterministic=deterministic) for _ in range(count)]
        return [call_execute(channel, found).contents["grad_gamma"] for found in frames]

    found: dict[bool, list[bytes]] = {True: [], False: []}

    def caller(number: int) -> None:
        with running.process.channel() as channel:
            for turn in range(8):
                deterministic = (number + turn // 2) % 2 == 0
                found[deterministic] += results(channel, deterministic, 1)

    with running.process.channel() as channel:
        (alone,) = set(results(channel, True, 4))
    at_once(8, caller)
    assert found[True] == [alone] * 32
    assert len(found[False]) == 32
    assert sum(bits != alone for bits in found[False]) > 16
    assert running.report.counters()["max_concurrent_kernels"] > 1


def test_up_to_8_5_calls_go_to_a_device_of_their_mode(start_npu_server: StartNpuServer) -> None:
    running = start_npu_server(devices="npu:0?deterministic=1,npu:1", plan="cann=8.5.0;ndev=2")
    told = {device.name: device.description.rpartition(", ")[2] for device in running.process.info().devices}
    assert told == {"npu:0": "always deterministic", "npu:1": "not deterministic"}
    sample = fill(GROUP_NORM, GROUP_NORM.build(n=4, c=32, hxw=64, group=4))
    found: dict[bool, set[bytes]] = {True: set(), False: set()}
    with running.process.channel() as channel:
        for turn in range(12):
            deterministic = turn % 3 != 0
            reply = call_execute(channel, sample.frames(deterministic=deterministic))
            assert reply.result.info.device == ("npu:0" if deterministic else "npu:1")
            found[deterministic].add(reply.contents["grad_gamma"])
    assert len(found[True]) == 1 < len(found[False])


def test_results_can_be_verified_and_a_wrong_one_is_held_back(start_npu_server: StartNpuServer) -> None:
    running = start_npu_server()
    # The simulator flips a bit that is a small error in float32, and a large one in float16.
    meta = GRID_SAMPLER.build(dtype=DType.FLOAT16, n=2, c=8, h=5, w=5, oh=9, ow=9)
    turned = TensorMeta(DType.FLOAT16, meta.tensor("input").shape, strides=(1, 2, 80, 16))
    sample = fill(GRID_SAMPLER, meta.with_inputs(input=turned))
    with running.process.channel() as channel:
        call(channel, sample, verify=True)
        running.plan("kernel:1:corrupt")
        failure = failure_of(lambda: call_execute(channel, sample.frames(verify=True)))
        assert failure.error.reason == "VERIFICATION_FAILED"
        call(channel, sample, verify=True)


@pytest.mark.parametrize("record", SAMPLERS, ids=lambda record: record.name)
def test_points_on_pixel_edges_are_verified_by_the_rules_of_a_card(
    npu_server: NpuServer, record: OpRecord
) -> None:
    """The simulated card has the vendor's coordinates, which part from the service's own."""
    made = attention_call("identity") if record is ATTENTION else grid_call(record, "identity", 3)
    with Client(npu_server.process.address) as client:
        method = getattr(client, record.name)
        info = method(**made.inputs, **made.meta.attrs, verify=True).info
        assert info.simulated
    rule = CoordinateRule.VENDOR_A2 if CoordinateRule.VENDOR_A2 in made.rules else CoordinateRule.MMCV
    assert info.verification == made.judged(made.by_rule(rule)).explanation
    assert ("vendor-a2" in info.verification) == (record is IMAGES), "a size at which it matters"


def test_one_library_with_all_operators_serves_as_well(
    start_npu_server: StartNpuServer, install_cann_sim: Callable[..., Installation]
) -> None:
    running = start_npu_server(installation=install_cann_sim("single"))
    with running.process.channel() as channel:
        for record in OPERATORS.values():
            call(channel, fill(record, next(record.samples(Product.ATLAS_A2)).call))


def test_an_operator_that_cann_lacks_is_not_advertised(
    start_npu_server: StartNpuServer, install_cann_sim: Callable[..., Installation]
) -> None:
    """What its callers are told is in the fault matrix."""
    running = start_npu_server(installation=install_cann_sim("split", "8.5.0"))
    with running.process.channel() as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        assert FLOYD.name not in stub.GetServerInfo(server_pb2.GetServerInfoRequest()).operators
        listed = stub.ListOperators(server_pb2.ListOperatorsRequest()).operators
        assert {op.name for op in listed if op.supported} == set(OPERATORS) - {FLOYD.name}
        sample = fill(GROUP_NORM, GROUP_NORM.build())
        failure = failure_of(lambda: call_execute(channel, sample.frames(deterministic=True)))
        assert failure.error.reason == "DETERMINISM_UNSUPPORTED"
        assert "CANN 8.5.0 reads the option once" in str(failure.error)
        assert "such as npu:0?deterministic=1" in str(failure.error)
        call(channel, sample)


@pytest.mark.parametrize(
    ("soc", "product"), [("Ascend910_9391", Product.ATLAS_A3), ("Ascend910B", Product.ATLAS_TRAINING)]
)
def test_the_chip_tells_the_product(start_npu_server: StartNpuServer, soc: str, product: Product) -> None:
    running = start_npu_server(devices="auto", plan=f"soc={soc}")
    info = running.process.info()
    assert info.product == product.wire
    assert set(info.operators) == {n for n, s in OPERATORS.items() if product in s.products}
    with running.process.channel() as channel:
        for name in info.operators:
            record = get_operator(name)
            call(channel, fill(record, next(record.samples(product)).call))
