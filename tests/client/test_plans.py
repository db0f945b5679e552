"""Calls by plan: sent and answered as without one, byte for byte, and kept only where that is certain.

Two calls share a plan if and only if nothing but contents, label and priority differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from tests.client.fake_service import INFO, STREAMED, fake_service, group_norm, zeros

from npugrad import OPERATORS, NpugradError, TensorMeta, codec
from npugrad.call import CallOptions
from npugrad.errors import InvalidOperand, MalformedRequest
from npugrad.frames import encode_frame
from npugrad.layout import view
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.recipe import Recipe
from npugrad_client import Client, _plans
from npugrad_client._attempt import Attempt
from npugrad_client._call import Prepared, prepare
from npugrad_client._frames import open_call
from npugrad_client._plans import Plans
from npugrad_client._signature import sign
from npugrad_client._unary import encode_unary, read_unary

RECORD = OPERATORS["group_norm_backward"]
INPUTS = [p.name for p in RECORD.inputs]
HERE = Attempt(RECORD.name, "here")


def split(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return {n: call[n] for n in INPUTS}, {n: v for n, v in call.items() if n not in INPUTS}


def planned(plans: Plans, out: Any = None, options: CallOptions | None = None, **changes: Any) -> Prepared:
    inputs, attrs = split({**group_norm(), **changes})
    return plans.prepare(RECORD, inputs, attrs, out, options or CallOptions())


def general(out: Any = None, options: CallOptions | None = None, **changes: Any) -> Prepared:
    inputs, attrs = split({**group_norm(), **changes})
    return prepare(RECORD, inputs, attrs, out, options or CallOptions())


def answer_of(call: Prepared, fill: int = 0) -> Any:
    """A right reply, of this byte throughout."""
    metas = dict(call.record.infer(call.call))
    contents = {n: memoryview(bytes([fill]) * m.nbytes) for n, m in metas.items() if m is not None}
    return codec.encode_response(call.record, metas, contents, INFO)[0]


def answered(call: Prepared) -> Mapping[str, Any]:
    return read_unary(call, answer_of(call).SerializeToString(), HERE).arrays


def learned(out: Any = None, **changes: Any) -> Plans:
    """Plans with that of one call."""
    plans = Plans()
    call = planned(plans, out, **changes)
    assert call.plan is None
    answered(call)
    return plans


def random(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {"grad_out": random((2, 4, 8))},
    "null": {"gamma": None},
    "transposed": {"grad_out": random((8, 4, 2)).T},
    "column-major": {"grad_out": np.asfortranarray(random((2, 4, 8)))},
    "big-endian": {"grad_out": random((2, 4, 8)).astype(">f4")},
    "reversed": {"grad_out": random((2, 4, 8))[:, ::-1]},
    "with gaps": {"grad_out": random((2, 4, 16))[..., ::2]},
    "expanded": {"grad_out": np.broadcast_to(np.float32(3), (2, 4, 8))},
    "not used": {
        **{n: random((2, 4, 4096)) for n in ("grad_out", "input")},
        "hxw": 4096,
        "output_mask": (False, False, True),
    },
    "empty": {
        **{n: np.zeros(s, np.float32) for n, s in (("grad_out", (0, 4, 8)), ("input", (0, 4, 8)))},
        **{n: np.zeros((0, 2), np.float32) for n in ("mean", "rstd")},
        "n": 0,
    },
    "masked": {"output_mask": (False, True, False)},
    "labelled": {"options": CallOptions(True, -3, "me", True)},
    "declared": {"out": {"grad_input": TensorMeta("float32", (2, 4, 8)), "grad_beta": None}},
}


@pytest.mark.parametrize("changes", CALLS.values(), ids=CALLS)
def test_a_call_by_plan_is_the_same_bytes_and_its_reply_the_same_arrays(changes: dict[str, Any]) -> None:
    found, same = planned(learned(**changes), **changes), general(**changes)
    assert found.plan is not None
    assert found.request == encode_unary(same)
    assert found.nbytes == same.nbytes
    if changes is CALLS["not used"]:
        assert len(found.request) < 4 * 2 * 4 * 4096 + 1000, "what is not used does not travel"
    reply = answer_of(same, 7).SerializeToString()
    got, expected = read_unary(found, reply, HERE), read_unary(same, reply, HERE)
    assert got.info == expected.info
    assert list(got.arrays) == list(expected.arrays)
    for name, array in got.arrays.items():
        other = expected.arrays[name]
        assert (array is None) is (other is None)
        if array is not None and other is not None:
            assert (array.dtype, array.shape, array.tobytes()) == (other.dtype, other.shape, other.tobytes())
            assert array.flags.writeable
            assert array.flags.owndata


@pytest.mark.parametrize("record", OPERATORS.values(), ids=list(OPERATORS))
def test_every_operator_goes_by_plan(record: OpRecord) -> None:
    by_plan = 0
    for sample in record.samples(Product.ATLAS_A2):
        call, plans = sample.call, Plans()
        inputs = {
            n: None if m is None else view(m, np.random.default_rng(0).bytes(m.content_bytes))
            for n, m in call.inputs.items()
        }
        arguments = (record, inputs, dict(call.attrs), dict(call.outputs), CallOptions(label="x"))
        first = plans.prepare(*arguments)
        answered(first)
        if first.key is not None:
            by_plan += 1
            found = plans.prepare(*arguments)
            assert found.request == encode_unary(prepare(*arguments)), sample.name
            arrays = read_unary(found, answer_of(first, 1).SerializeToString(), HERE).arrays
            assert arrays.keys() == {p.name for p in record.outputs}, sample.name
    assert by_plan


@pytest.mark.parametrize(("hxw", "chunked"), [(16, 0), (2**13, 2)])
def test_a_streamed_call_opens_by_plan_as_protobuf_writes_it(hxw: int, chunked: int) -> None:
    call, plans = RECORD.build(n=2, c=4, hxw=hxw, group=2), Plans()
    inputs = RECORD.make_inputs(call, np.random.default_rng(3))
    arguments = (RECORD, inputs, dict(call.attrs), None, CallOptions(label="x", priority=3))
    plans.prepare(*arguments).note_streamed()
    found = plans.prepare(*arguments)
    assert found.plan is not None
    header, follow = open_call(found)
    expected, contents = open_call(prepare(*arguments))
    assert encode_frame(header) == encode_frame(expected)
    assert follow == contents
    assert len(follow) == chunked


def test_labels_and_priorities_share_a_plan_and_travel() -> None:
    plans = learned()
    for options in (CallOptions(label="a"), CallOptions(priority=5, label="b"), CallOptions()):
        found = planned(plans, options=options)
        assert found.plan is not None
        assert found.request == encode_unary(general(options=options))
    for number in range(300):
        planned(plans, options=CallOptions(label=str(number)))
    assert len(plans._options) < 100


def test_what_is_malformed_is_refused_where_there_is_a_plan() -> None:
    for options in (CallOptions(priority=101), CallOptions(label="\n")):
        with pytest.raises(MalformedRequest) as caught:
            planned(learned(), options=options)
        with pytest.raises(MalformedRequest) as expected:
            general(options=options)
        assert str(caught.value) == str(expected.value)
    legal = group_norm(n=1, c=4)
    with pytest.raises(MalformedRequest, match="n: found True; expected an integer"):
        planned(learned(**legal), **{**legal, "n": True})


# ---------------------------------------------------------------------------------------- the caller's arrays


def test_the_callers_array_is_filled_directly_if_nothing_else_may_need_it_meanwhile() -> None:
    """An operand may share its memory, or the call be sent once more."""
    mine, shared, spare = (np.ones((2, 4, 8), np.float32) for _ in range(3))
    plans = learned({"grad_input": mine})
    found = planned(plans, {"grad_input": mine})
    assert answered(found)["grad_input"] is mine
    assert not mine.any()
    beside = planned(plans, {"grad_input": shared}, grad_out=shared)
    assert beside.is_apart
    for call, array in ((beside, shared), (planned(plans, {"grad_input": spare}).apart(), spare)):
        assert call.plan is not None
        assert answered(call)["grad_input"] is not array
        assert array.all()
    mine.flags.writeable = False
    with pytest.raises(TypeError, match="grad_input: found a read-only array in out"):
        planned(plans, {"grad_input": mine})


# --------------------------------------------------------------------------------------------------- replies


LIES: dict[str, Callable[[Any], object]] = {
    "without gamma": lambda message: message.ClearField("grad_gamma"),
    "too short": lambda message: setattr(message.grad_gamma, "data", b"123"),
    "other shape": lambda message: message.grad_gamma.meta.shape.__setitem__(0, 2),
    "no product": lambda message: setattr(message.info, "product", 0),
    "announced": lambda message: setattr(message.grad_gamma, "chunked_bytes", 16),
}


def test_a_reply_that_differs_is_judged_as_without_a_plan() -> None:
    """What the record infers is known of larger calls only."""
    sizes = group_norm(n=4, c=8, hxw=1024, group=2)
    for name, lie in LIES.items():
        found, same = planned(learned(**sizes), **sizes), general(**sizes)
        reply = answer_of(found)
        lie(reply)
        with pytest.raises(NpugradError) as caught:
            read_unary(found, reply.SerializeToString(), HERE)
        with pytest.raises(NpugradError) as expected:
            read_unary(same, reply.SerializeToString(), HERE)
        assert str(caught.value) == str(expected.value), name


def test_bytes_that_are_no_reply_are_an_error_where_there_is_a_plan() -> None:
    with pytest.raises(NpugradError, match=r"^group_norm_backward: here: INTERNAL: .*deserializ"):
        read_unary(planned(learned()), b"\xff\xff", HERE)


def test_a_server_that_answers_otherwise_is_learned_anew() -> None:
    plans = learned()
    reply = answer_of(general())
    reply.grad_gamma.padding = b"1234"
    for _ in range(2):
        found = planned(plans)
        arrays = read_unary(found, reply.SerializeToString(), HERE).arrays
        assert arrays["grad_gamma"] is not None
    assert found.plan is not None
    assert found.plan.reply is not None
    assert found.plan.reply.split(reply.SerializeToString()) is not None


# --------------------------------------------------------------------------------------------- what is kept


def test_nothing_is_kept_of_a_call_that_was_not_answered_well() -> None:
    plans = Plans()
    call, reply = planned(plans), answer_of(general())
    LIES["no product"](reply)
    with pytest.raises(NpugradError):
        read_unary(call, reply.SerializeToString(), HERE)
    assert planned(plans).plan is None


def test_what_is_unusual_goes_without() -> None:
    plans = Plans()
    for changes in ({"n": np.int64(2)}, {"grad_out": Recipe("normal", shape=(2, 4, 8))}):
        for _ in range(2):
            call = planned(plans, **changes)
            assert call.plan is None
            answered(call)


def test_operands_in_another_order_are_sent_as_what_they_are() -> None:
    inputs, attrs = split({**group_norm(), "grad_out": random((2, 4, 8))})
    turned = dict(reversed(inputs.items()))
    plans = Plans()
    for _ in range(2):
        for given in (inputs, turned):
            call = plans.prepare(RECORD, given, attrs, None, CallOptions())
            assert encode_unary(call) == encode_unary(prepare(RECORD, inputs, attrs, None, CallOptions()))
            answered(call)


def test_plans_are_bounded_and_the_last_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plans, "MAX_PLANS", 20)
    plans = learned()
    for hxw in range(9, 9 + 60):
        call = planned(plans, **group_norm(hxw=hxw))
        answered(call)
        assert planned(plans).plan is not None
        assert len(plans._young) + len(plans._old) <= 20
    assert planned(plans, **group_norm(hxw=9)).plan is None


def test_a_call_for_a_product_is_refused_as_the_documents_say() -> None:
    inputs, attrs = split(group_norm(n=1, c=8001, hxw=2, group=1))
    plans = Plans()
    with pytest.raises(InvalidOperand):
        plans.prepare(RECORD, inputs, attrs, None, CallOptions(), Product.ATLAS_A2)
    found = plans.prepare(RECORD, inputs, attrs, None, CallOptions(), Product.ATLAS_TRAINING)
    assert found.expected["grad_gamma"] == TensorMeta("float32", (8001,))


# ------------------------------------------------------------------------------------------- over the wire


@pytest.mark.parametrize("stream_from_bytes", [STREAMED, 2**20])
def test_calls_over_the_wire_are_the_same_again(stream_from_bytes: int) -> None:
    def echoing(record: OpRecord, request: Any, context: Any) -> Any:
        reply = zeros(record, request, context)
        reply.grad_input.data = request.grad_out.data
        return reply

    with (
        fake_service(unary=echoing) as service,
        Client(service.address, timeout_s=30, stream_from_bytes=stream_from_bytes) as client,
    ):
        for number in range(3):
            grad_out = np.full((2, 4, 8), number, np.float32)
            grads = client.group_norm_backward(**{**group_norm(), "grad_out": grad_out}, label=f"n{number}")
            if stream_from_bytes:
                np.testing.assert_array_equal(grads.grad_input, grad_out)
            assert client._plans._young
    if stream_from_bytes:
        assert [request.options.label for request in service.headers] == ["n0", "n1", "n2"]
    else:
        headers = [f.header.group_norm_backward for f in service.frames if f.HasField("header")]
        assert [header.options.label for header in headers] == ["n0", "n1", "n2"]
        chunks = [f.chunk.data for f in service.frames if f.HasField("chunk")]
        assert not chunks, "small operands travel in the header"
        contents = [np.frombuffer(h.grad_out.data, np.float32)[0] for h in headers]
        assert contents == [0, 1, 2]


# ------------------------------------------------------------------------------------------- signatures


def key(
    options: CallOptions | None = None, out: Any = None, product: Product | None = None, **changes: Any
) -> Any:
    """What a call shares with those that go by its plan; None where there is nothing."""
    inputs, attrs = split({**group_norm(), **changes})
    signature = sign(RECORD, inputs, attrs, out, options or CallOptions(), product)
    return None if signature is None else signature[0]


ARRAY = group_norm()["grad_out"]
OTHERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "true": {"n": True},
    "a float": {"n": 2.0},
    "a number of text": {"n": "2"},
    "minus nothing": {"hxw": -0.0},
    "nothing": {"hxw": 0.0},
    "not a number": {"hxw": float("nan")},
    "mask of numbers": {"output_mask": (1, 1, 1)},
    "mask that is a list": {"output_mask": [True, True, True]},
    "no mask": {"output_mask": None},
    "null": {"gamma": None},
    "other null": {"rstd": None},
    "two null": {"gamma": None, "rstd": None},
    "shape": {"grad_out": ARRAY.reshape(-1)},
    "rank": {"grad_out": ARRAY[None]},
    "type": {"grad_out": ARRAY.astype(np.int32)},
    "width": {"grad_out": ARRAY.astype(np.float64)},
    "byte order": {"grad_out": ARRAY.astype(">f4")},
    "transposed": {"grad_out": ARRAY.T},
    "column-major": {"grad_out": np.asfortranarray(ARRAY)},
    "expanded": {"grad_out": np.broadcast_to(np.float32(1), ARRAY.shape)},
    "deterministic": {"options": CallOptions(deterministic=True)},
    "deterministic by number": {"options": CallOptions(deterministic=1)},  # type: ignore[arg-type]
    "verified": {"options": CallOptions(verify=True)},
    "null output": {"out": {"grad_input": None}},
    "other null output": {"out": {"grad_gamma": None}},
    "declared": {"out": {"grad_input": TensorMeta("float32", (2, 4, 8))}},
    "declared with strides": {"out": {"grad_input": TensorMeta("float32", (2, 4, 8), strides=(32, 8, 1))}},
    "declared in a format": {"out": {"grad_input": TensorMeta("float32", (2, 4, 8), "NCL")}},
    "filled": {"out": {"grad_input": np.zeros((2, 4, 8), np.float32)}},
    "filled in another type": {"out": {"grad_input": np.zeros((2, 4, 8), np.float16)}},
    "for a product": {"product": Product.ATLAS_A2},
    "for another product": {"product": Product.ATLAS_A3},
}


def test_what_differs_shares_no_signature_and_what_does_not_matter_is_no_part_of_it() -> None:
    keys = {name: key(**changes) for name, changes in OTHERS.items()}
    assert None not in keys.values()
    for name, changes in OTHERS.items():
        if name != "not a number":
            assert [other for other, found in keys.items() if found == key(**changes)] == [name]
    assert key(grad_out=np.full_like(ARRAY, 7)) == key()
    assert key(options=CallOptions(label="me")) == key(options=CallOptions(priority=3)) == key()
    other = sign(OPERATORS["layer_norm_backward"], {"input": ARRAY}, {}, None, CallOptions())
    own = sign(RECORD, {"input": ARRAY}, {}, None, CallOptions())
    assert None not in (own, other)
    assert own != other


class _Mine(np.ndarray[Any, Any]):
    """An array with ideas of its own."""


UNUSUAL: list[dict[str, Any]] = [
    {"n": np.int64(2)},
    {"output_mask": np.array([True, True, True])},
    {"output_mask": (np.True_, True, True)},
    {"output_mask": ((True,), True, True)},
    {"output_mask": (True,) * 5000},
    {"n": 2**100_000},
    {"n": b"2"},
    {"grad_out": ARRAY.view(_Mine)},
    {"grad_out": np.ma.masked_array(ARRAY)},
    {"grad_out": ARRAY.tolist()},
    {"grad_out": Recipe("normal", shape=ARRAY.shape)},
    {"out": [("grad_input", None)]},
    {"out": {"grad_input": 3}},
    {"out": {"grad_input": ARRAY.view(_Mine)}},
    {"options": CallOptions(deterministic=np.True_)},  # type: ignore[arg-type]
    {"options": CallOptions(priority=np.int64(0))},  # type: ignore[arg-type]
    {"options": CallOptions(priority=True)},
    {"options": CallOptions(label=b"me")},  # type: ignore[arg-type]
]


def test_what_is_unusual_has_none() -> None:
    for changes in UNUSUAL:
        assert key(**changes) is None, changes
