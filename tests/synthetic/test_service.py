"""The synthetic operator through whole services, on the CPU and on a simulated NPU: every kind of attribute.

What it answers on the NPU, the simulated CANN computes from what its C interface was handed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
from tests.calls import TIMEOUT_S, Sample, call_execute, call_unary, failure_of, fill, header_frame
from tests.derived import told
from tests.e2e.harness import both_ways
from tests.fix_npu import run_npu_server
from tests.fix_server import ServerProcess, run_server
from tests.synthetic.client import AsyncSyntheticClient, SyntheticClient
from tests.synthetic.record import REGISTRY, SYNTHETIC, seen

from npugrad import OPERATORS
from npugrad.attributes import KINDS, Scalar
from npugrad.errors import (
    InvalidOperand,
    MalformedRequest,
    NullOperand,
    OperatorError,
    RequestError,
    UnsupportedOperator,
)
from npugrad.layout import view
from npugrad.meta import CallMeta
from npugrad.products import Product
from npugrad.tolerance import compare
from npugrad.v1 import validation_pb2
from npugrad.validation import error_from_verdict, validate_call

pytestmark = pytest.mark.slow

MODULE = "tests.synthetic.server"


@pytest.fixture(scope="module", params=["cpu", pytest.param("npu", marks=pytest.mark.npu_sim)])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of the synthetic operator alone; what it leaves behind is looked at when it ends."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "cpu":
        with run_server(folder / "server.log", program=("-m", MODULE)) as process:
            yield process
        return
    simulator = request.getfixturevalue("cann_sim")
    request.getfixturevalue("torch_npu")
    with run_npu_server(simulator, folder, program=("-m", MODULE)) as running:
        yield running.process


@pytest.fixture(scope="module")
def channel(service: ServerProcess) -> Iterator[grpc.Channel]:
    with service.channel() as opened:
        yield opened


@pytest.fixture(scope="module")
def client(service: ServerProcess) -> Iterator[Any]:
    with SyntheticClient(service.address, timeout_s=TIMEOUT_S) as opened:
        yield opened


@pytest.fixture
def kind(service: ServerProcess, client: Any) -> str:
    (device,) = client.server_info().devices
    return str(device.name).partition(":")[0]


# Else the simulator sums in any order.
OPTIONS = {"deterministic": True}


def request(call: CallMeta) -> Any:
    """The message of a call with data."""
    return fill(SYNTHETIC, call).message(**OPTIONS)


def execute(channel: grpc.Channel, frames: Iterable[Any]) -> dict[str, bytes]:
    """Contents of the reply."""
    return call_execute(channel, frames, registry=REGISTRY).contents


def three_ways(channel: grpc.Channel, message: Any) -> list[Callable[[], Any]]:
    """Calls it, streams it and validates it."""
    return [
        lambda: call_unary(channel, SYNTHETIC, message),
        lambda: execute(channel, [header_frame(SYNTHETIC, message)]),
        lambda: validate(channel, message),
    ]


def validate(channel: grpc.Channel, message: Any) -> Any:
    method = channel.unary_unary(
        f"/{REGISTRY.validation.full_name}/Validate",
        request_serializer=REGISTRY.validate_request.SerializeToString,
        response_deserializer=validation_pb2.ValidateResponse.FromString,
    )
    return method(REGISTRY.validate_request(call={"synthetic": message}), timeout=TIMEOUT_S)


def check(made: Sample, arrays: Mapping[str, Any]) -> None:
    """Every wanted output is right: the attributes byte for byte, the other one as the reference has it."""
    assert {name for name, array in arrays.items() if array is not None} == set(made.outputs)
    if arrays.get("seen") is not None:
        assert arrays["seen"].tobytes() == seen(made.call.attrs)
    if arrays.get("scaled") is not None:
        golden = np.zeros(arrays["scaled"].shape)
        SYNTHETIC.reference(made.arrays, made.call.attrs, {"scaled": golden})
        assert compare(golden, arrays["scaled"]).ok


def as_arrays(made: Sample, contents: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: view(meta, contents[name]) for name, meta in made.outputs.items()}


def test_every_sample_on_every_way(channel: grpc.Channel, client: Any, kind: str) -> None:
    for sample in SYNTHETIC.samples(Product.ATLAS_A2):
        with told(sample.name):
            check_every_way(channel, client, sample.call, {"cpu": "cpu-reference", "npu": "npu"}[kind])


def check_every_way(channel: grpc.Channel, client: Any, call: CallMeta, backend: str) -> None:
    made = fill(SYNTHETIC, call)
    result = call_unary(channel, SYNTHETIC, made.message(**OPTIONS))
    contents = {name: found.data or b"" for name, found in result.contents.items()}
    check(made, as_arrays(made, contents))
    if made.outputs:
        assert result.info.backend == backend
    assert execute(channel, made.frames(**OPTIONS)) == contents
    answer = client.synthetic(**made.arrays, **call.attrs, deterministic=True)
    found = {name: getattr(answer, name) for name in ("scaled", "seen")}
    check(made, found)
    assert {name: a.tobytes() for name, a in found.items() if a is not None} == contents
    verdict = client.validate("synthetic", inputs=call.inputs, attrs=call.attrs, outputs=call.outputs)
    assert verdict == validate_call(SYNTHETIC, call)
    assert (verdict.status, verdict.violations) == (0, ())


def test_a_call_is_streamed_and_verified(service: ServerProcess) -> None:
    made = fill(SYNTHETIC, SYNTHETIC.build(shape=(64, 96)))
    with SyntheticClient(service.address, timeout_s=TIMEOUT_S, stream_from_bytes=1) as streaming:
        answer = streaming.synthetic(**made.arrays, **made.call.attrs, verify=True, label="synthetic")
    check(made, {"scaled": answer.scaled, "seen": answer.seen})


def test_the_asynchronous_client(service: ServerProcess) -> None:
    made = fill(SYNTHETIC, SYNTHETIC.build())

    async def calls() -> list[Any]:
        async with AsyncSyntheticClient(service.address, timeout_s=TIMEOUT_S) as opened:
            verdict = await opened.validate("synthetic", inputs=made.call.inputs, attrs=made.call.attrs)
            assert verdict.status == 0
            return await asyncio.gather(
                *(opened.synthetic(**made.arrays, **made.call.attrs) for _ in range(3))
            )

    for answer in asyncio.run(calls()):
        check(made, {"scaled": answer.scaled, "seen": answer.seen})


def test_what_is_optional_may_be_left_out(client: Any) -> None:
    call = SYNTHETIC.build(**{p.name: None for p in SYNTHETIC.attrs if p.optional})
    made = fill(SYNTHETIC, call)
    given = {name: value for name, value in call.attrs.items() if value is not None}
    answer = client.synthetic(**made.arrays, **given)
    check(made, {"scaled": answer.scaled, "seen": answer.seen})


def test_every_constraint_on_every_way(channel: grpc.Channel, client: Any) -> None:
    for constraint in SYNTHETIC.constraints:
        broken = constraint.violate(SYNTHETIC.build())
        assert broken is not None
        verdict = validate_call(SYNTHETIC, broken)
        parts = {"inputs": broken.inputs, "attrs": broken.attrs, "outputs": broken.outputs}
        assert client.validate("synthetic", **parts) == verdict
        expected = error_from_verdict(SYNTHETIC, verdict)
        for error in both_ways(channel, SYNTHETIC, Sample(SYNTHETIC, broken, {}, {}).message()):
            assert isinstance(error, OperatorError), constraint.id
            assert type(error) is type(expected), constraint.id
            assert (error.code, error.constraint) == (constraint.code, constraint.id)


def refused(act: Callable[[], Any], name: str) -> None:
    error = failure_of(act).error
    assert isinstance(error, MalformedRequest)
    assert (error.operator, error.operand) == ("synthetic", name)


def test_an_attribute_that_is_unset_is_malformed_or_null(channel: grpc.Channel) -> None:
    for param in SYNTHETIC.attrs:
        message, name = request(SYNTHETIC.build()), param.name
        message.ClearField(name)
        if not KINDS[param.type].is_pointer:
            for act in three_ways(channel, message):
                refused(act, name)
        elif not param.optional:
            for error in both_ways(channel, SYNTHETIC, message):
                assert isinstance(error, NullOperand), name
                assert error.constraint == f"{name}.not_null"
            assert validate(channel, message).violations[0].id == f"{name}.not_null"


def test_an_attribute_out_of_range_is_malformed(channel: grpc.Channel) -> None:
    spoils: dict[str, Callable[[Any], None]] = {
        "level": lambda message: setattr(message, "level", 128),
        "sizes": lambda message: message.sizes.values.extend([0] * 1024),
        "weights": lambda message: message.weights.values.extend([0.0] * 1024),
        "mask_optional": lambda message: message.mask_optional.values.extend([True] * 1024),
        "alpha": lambda message: setattr(message.alpha, "value", b"123"),
        "mode": lambda message: setattr(message, "mode", "a\0b"),
        "mode_optional": lambda message: setattr(message, "mode_optional", "x" * 4097),
    }
    for name, spoil in spoils.items():
        message = request(SYNTHETIC.build())
        spoil(message)
        for act in three_ways(channel, message):
            refused(act, name)


def test_a_string_that_is_no_utf8_is_malformed(channel: grpc.Channel) -> None:
    data = request(SYNTHETIC.build()).SerializeToString()
    broken = data.replace(b"\x92\x01\x03sum", b"\x92\x01\x03s\xffm")  # field 18, 3 bytes
    assert broken != data
    assert isinstance(failure_of(lambda: call_unary(channel, SYNTHETIC, broken)).error, MalformedRequest)


def test_the_client_converts_what_it_is_given(client: Any) -> None:
    made = fill(SYNTHETIC, SYNTHETIC.build(weights=(1.0, 2.0), alpha_optional=Scalar("float32", 0.5)))
    loose: dict[str, Any] = {"sizes": np.array([2, 3]), "weights": [1, 2], "alpha_optional": np.float32(0.5)}
    answer = client.synthetic(**{**made.arrays, **made.call.attrs, **loose})
    check(made, {"scaled": answer.scaled, "seen": answer.seen})


def test_the_client_names_what_is_wrong(client: Any) -> None:
    made = fill(SYNTHETIC, SYNTHETIC.build())
    wrong: list[tuple[str, Any, type[Exception]]] = [
        ("level", 128, MalformedRequest),
        ("seed", -1, MalformedRequest),
        ("weights", (1e39,), MalformedRequest),
        ("ratio", 1e39, MalformedRequest),
        ("alpha", "x", MalformedRequest),
        ("mode_optional", "\0", MalformedRequest),
        ("mode", "median", InvalidOperand),
        ("factor", None, TypeError),
    ]
    for name, value, error in wrong:
        with pytest.raises(error, match=f"synthetic: {name}: found .*; expected "):
            client.synthetic(**{**made.arrays, **made.call.attrs, name: value})


def test_a_type_that_is_legal_and_not_carried_is_refused_as_such(client: Any) -> None:
    made = fill(SYNTHETIC, SYNTHETIC.build())
    operand = {"input": np.asarray(made.arrays["input"], np.complex64)}
    found = client.validate("synthetic", inputs={**made.arrays, **operand}, attrs=made.call.attrs)
    assert found.status == 0
    for mask in ((True, True), (False, True), (False, False)):
        with pytest.raises(RequestError) as caught:
            client.synthetic(**{**made.arrays, **made.call.attrs, **operand, "output_mask": mask})
        assert caught.value.reason == "CONTENT_UNSUPPORTED"
        assert str(caught.value).startswith(
            "synthetic: input: found dtype complex64, which the operator takes, but which is never sent; "
            "expected float32, float16"
        )


def test_the_server_lists_the_operator_and_no_other(client: Any) -> None:
    assert client.server_info().operators == ("synthetic",)
    (operator,) = client.list_operators()
    found = {p.name: p.optional for p in operator.parameters if p.role == "attribute"}
    assert found == {p.name: p.optional for p in SYNTHETIC.attrs}
    with pytest.raises(UnsupportedOperator, match="known are synthetic"):
        client.validate(next(iter(OPERATORS)), inputs={}, attrs={})
