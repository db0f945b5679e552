"""Operands that the server makes: the same results bit for bit as with the data sent, whatever the call."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import grpc
import numpy as np
import pytest
from tests.calls import call_execute, call_unary, failure_of, sample
from tests.client.both import BOTH, Looped, Make, call_once
from tests.client.fake_service import abort_with, fake_service, stream_zeros, zeros
from tests.fix_server import ServerProcess

from npugrad import codec
from npugrad.errors import ServerBusy
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.recipe import Recipe, recipes
from npugrad.v1 import backward_pb2
from npugrad_client import Client, RecipeMismatch

each_operator = pytest.mark.parametrize("operator", OPERATORS)
each_way = pytest.mark.parametrize("stream_from_bytes", [2**20, 0], ids=["unary", "execute"])


def made_call(operator: str) -> tuple[OpRecord, CallMeta, dict[str, Recipe], dict[str, Any]]:
    """A call of the record, its recipes, and the small rest as data."""
    record = get_operator(operator)
    call = record.build()
    made = recipes(record, call, seed=5)
    rest = record.make_inputs(call, np.random.default_rng(1))
    return record, call, made, {name: array for name, array in rest.items() if name not in made}


def results(
    client: Any, record: OpRecord, inputs: Mapping[str, Any], attrs: Mapping[str, Any]
) -> dict[str, Any]:
    """Type, shape and bytes of each output, by name; None where it is masked out."""
    found = getattr(client, record.name)(**inputs, **attrs, timeout_s=60)
    arrays = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "info"}
    return {name: None if a is None else (str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()}


@each_operator
@each_way
def test_results_are_those_of_the_data(server: ServerProcess, operator: str, stream_from_bytes: int) -> None:
    record, call, made, rest = made_call(operator)
    arrays = {name: recipe.array() for name, recipe in made.items()}
    proved = {name: recipe.with_digest() for name, recipe in made.items()}
    some = {name: proved[name] if number % 2 else arrays[name] for number, name in enumerate(made)}
    with Client(server.address, stream_from_bytes=stream_from_bytes) as client:
        sent = results(client, record, {**arrays, **rest}, call.attrs)
        assert results(client, record, {**proved, **rest}, call.attrs) == sent
        assert results(client, record, {**some, **rest}, call.attrs) == sent
    with Looped(server.address, stream_from_bytes=stream_from_bytes) as looped:
        assert results(looped, record, {**made, **rest}, call.attrs) == sent
    assert any(value is not None and any(value[2]) for value in sent.values())


@each_way
@BOTH
def test_a_retry_sends_the_recipes_again(stream_from_bytes: int, make: Make) -> None:
    """The first try is refused once it was read; the second is the same request."""
    record, call, made, rest = made_call("group_norm_backward")
    arguments: dict[str, Any] = {**made, **rest, **call.attrs}
    requests: list[Any] = []

    def once(message: Any, context: grpc.ServicerContext) -> None:
        requests.append(message)
        if len(requests) == 1:
            abort_with(context, ServerBusy("full", reason="QUEUE_FULL"))

    def unary(record: OpRecord, request: Any, context: grpc.ServicerContext) -> Any:
        once(request, context)
        return zeros(record, request, context)

    def execute(frames: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        header, *others = frames
        once(codec.unwrap(header.header)[1], context)
        yield from stream_zeros(iter([header, *others]), context)

    with fake_service(unary, execute) as service:
        found = call_once(make, service.address, arguments, stream_from_bytes=stream_from_bytes)
    assert found.info.tries == 2
    first, second = (codec.decode_request(record, message, Product.ATLAS_A2).contents for message in requests)
    assert first == second
    assert {name: content.recipe for name, content in second.items()} == made


def test_every_type_and_layout_is_made_as_here(server: ServerProcess) -> None:
    with Client(server.address) as client:
        for dtype in ("float32", "float16", "bfloat16"):
            tensor = {
                "grad_out": Recipe("constant", shape=(2, 3, 4), dtype=dtype, value=0.5, strides=(0, 0, 0)),
                "input": Recipe("normal", shape=(2, 3, 4), dtype=dtype, strides=(1, 2, 6), seed=1),
                "mean": Recipe("normal", shape=(2, 1), dtype=dtype, std=0.1),
                "rstd": Recipe("uniform", shape=(2, 1), dtype=dtype, low=0.5, high=2),
                "gamma": Recipe("normal", shape=(3,), dtype=dtype, repeat=2),
            }
            attrs = {"n": 2, "c": 3, "hxw": 4, "group": 1, "output_mask": (True, True, True)}
            record = get_operator("group_norm_backward")
            arrays = {name: recipe.array() for name, recipe in tensor.items()}
            assert results(client, record, tensor, attrs) == results(client, record, arrays, attrs)


@pytest.mark.slow
def test_large_operands_cost_no_upload(server: ServerProcess) -> None:
    """Several pieces of the maker's threads; the server proves each digest."""
    record = get_operator("group_norm_backward")
    call = record.build(n=2, c=64, hxw=64 * 1024, group=8, output_mask=(False, False, True))
    made = {name: recipe.with_digest() for name, recipe in recipes(record, call).items()}
    message, follow = codec.encode_request(call.inputs, made, record, call.attrs)
    assert not follow
    assert message.ByteSize() < 1000
    assert made["input"].meta.content_bytes == 2**25
    with Client(server.address) as client:
        arguments: Any = {**made, **call.attrs}
        found = client.group_norm_backward(**arguments, timeout_s=60)
    expected = made["grad_out"].array().astype(np.float64).sum(axis=(0, 2))
    assert np.allclose(np.asarray(found.grad_beta), expected, rtol=1e-3, atol=1e-2)


def test_recipes_and_chunks_share_a_stream(server_channel: grpc.Channel) -> None:
    made = sample()
    recipe = Recipe("normal", shape=made.call.tensor("input").shape, seed=8)
    frames = list(made.frames())
    operand = made.record.param_index("input")
    codec.encode_recipe(recipe, frames[0].header.group_norm_backward.input.recipe)
    kept = [f for f in frames if f.WhichOneof("frame") == "header" or f.chunk.operand != operand]
    assert len(kept) < len(frames)
    found = call_execute(server_channel, kept).contents
    message = made.message()
    message.input.data = bytes(recipe.content())
    sent = call_unary(server_channel, made.record, message).contents
    assert found == {name: content.data for name, content in sent.items()}


def test_chunk_of_an_operand_with_a_recipe_is_refused(server_channel: grpc.Channel) -> None:
    made = sample()
    frames = list(made.frames())
    codec.encode_recipe(
        Recipe("normal", shape=made.call.tensor("input").shape),
        frames[0].header.group_norm_backward.input.recipe,
    )
    failure = failure_of(lambda: call_execute(server_channel, frames))
    assert failure.error.reason == "MALFORMED_REQUEST"
    assert "found operand 1; expected an announced one" in str(failure.error)


# --------------------------------------------------------------------------------------------- refusals


def call_with(server: ServerProcess, recipe: Recipe, stream_from_bytes: int = 2**20) -> None:
    record, call, made, rest = made_call("group_norm_backward")
    with Client(server.address, stream_from_bytes=stream_from_bytes) as client:
        results(client, record, {**made, **rest, "input": recipe}, call.attrs)


@each_way
def test_other_digest_is_told_with_both(server: ServerProcess, stream_from_bytes: int) -> None:
    recipe = made_call("group_norm_backward")[2]["input"]
    other = Recipe.of(recipe.draw, recipe.meta, recipe.seed, b"\xab" * 32)
    with pytest.raises(RecipeMismatch) as caught:
        call_with(server, other, stream_from_bytes)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.reason, error.operand, error.operator) == (
        "RECIPE_MISMATCH",
        "input",
        "group_norm_backward",
    )
    assert not error.retryable
    assert f"found content with digest {recipe.sha256().hex()} made from normal(" in str(error)
    assert f"expected {'ab' * 32}" in str(error)
    server.assert_nothing_leaked()


def test_documented_constraints_come_before_recipes(server_channel: grpc.Channel) -> None:
    made = sample()
    message = made.message()
    message.mean.recipe.generator = "gauss"
    message.group = 0
    failure = failure_of(lambda: call_unary(server_channel, made.record, message))
    assert failure.error.reason == "ACLNN_ERR_PARAM_INVALID"


def test_sizes_are_admitted_like_data(server: ServerProcess, server_channel: grpc.Channel) -> None:
    """A few bytes on the wire may not become more memory than the server gives to calls."""
    record = get_operator("group_norm_backward")
    call = record.build(n=1, c=1, hxw=2**30, group=1, output_mask=(False, False, True))
    message, _ = codec.encode_request(call.inputs, recipes(record, call), record, call.attrs)
    failure = failure_of(lambda: call_unary(server_channel, record, message))
    assert failure.error.reason == "CALL_TOO_LARGE"
    assert failure.status is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_metrics_count_what_travelled(server: ServerProcess, server_channel: grpc.Channel) -> None:
    made = sample()
    message, _ = codec.encode_request(
        made.call.inputs, recipes(made.record, made.call), made.record, made.call.attrs
    )
    request_id = f"recipe-{os.getpid()}"
    call_unary(server_channel, made.record, message, metadata=(("x-request-id", request_id),))
    found = server.find_log("call", request_id=request_id)
    assert found["received_bytes"] == 0


@each_way
def test_cancelled_while_made_gives_everything_back(server: ServerProcess, stream_from_bytes: int) -> None:
    """The memory comes back soon, and not before the thread that writes it is done."""
    record = get_operator("group_norm_backward")
    call = record.build(n=1, c=1, hxw=2**24, group=1, output_mask=(False, False, True))
    made = {name: Recipe.of(r.draw, r.meta, r.seed, b"x" * 32) for name, r in recipes(record, call).items()}
    message, _ = codec.encode_request(call.inputs, made, record, call.attrs)
    header = codec.wrap(backward_pb2.ExecuteHeader(), record, message)

    def ask(channel: grpc.Channel) -> None:
        if stream_from_bytes:
            call_unary(channel, record, message, timeout=0.02)
        else:
            call_execute(channel, [backward_pb2.ExecuteRequest(header=header)], timeout=0.02)

    with server.channel() as channel:
        for _ in range(10):
            with pytest.raises(grpc.RpcError) as caught:
                ask(channel)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            while server.info().input_arena_used_bytes:
                pass
    server.assert_nothing_leaked()
