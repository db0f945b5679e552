"""Validation and descriptions: what a real server says, and what it could say that is not so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.client.both import Looped
from tests.client.fake_service import group_norm
from tests.fix_server import ServerProcess
from tests.operators import MSDA

import npugrad
from npugrad import OPERATORS, Constraint, NpugradError, OpRecord, Product, TensorMeta
from npugrad.v1 import server_pb2, validation_pb2
from npugrad_client import Client, MalformedRequest, Recipe, UnsafeLevels, UnsupportedOperator, _info

MASK = (True, True, True)
NULLS: dict[str, set[str]] = {
    "multi_scale_deformable_attention_grad": set(),
    "grid_sampler_2d_backward": {"output_mask"},
    "group_norm_backward": {"gamma", "grad_input", "grad_gamma", "grad_beta"},
    "fused_floyd_attention_grad": {"atten_mask"},
    "layer_norm_backward": {"weight", "bias", "grad_input", "grad_weight", "grad_bias"},
    "grid_sampler_3d_backward": {"output_mask"},
    "batch_norm_backward": {
        *("weight", "running_mean", "running_var", "save_mean", "save_invstd"),
        *("grad_input", "grad_weight", "grad_bias"),
    },
}
"""Where a null can be legal."""


@pytest.fixture(scope="module", params=[Client, Looped], ids=["threads", "asyncio"])
def plain(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Any]:
    with request.param(server.address, timeout_s=60) as made:
        yield made


@cache
def samples(record: OpRecord, product: Product) -> list[npugrad.CallMeta]:
    return [found.call for found in record.samples(product)]


def ways(record: OpRecord, constraint: Constraint) -> Iterator[npugrad.CallMeta]:
    """Calls that break a constraint, at least one for each product that has it."""
    for product in Product:
        if constraint.applies(product):
            broken = map(constraint.violate, samples(record, product))
            yield from [call for call in broken if call is not None][:1]


@pytest.mark.parametrize("record", OPERATORS.values(), ids=list(OPERATORS))
def test_the_server_validates_as_the_record_does(server: ServerProcess, record: OpRecord) -> None:
    with Client(server.address, timeout_s=60) as plain:
        for constraint in record.constraints:
            for call in ways(record, constraint):
                asked: dict[str, Any] = {"inputs": call.inputs, "attrs": call.attrs, "outputs": call.outputs}
                local = npugrad.validate(record.name, **asked, product=call.product)
                assert plain.validate(record.name, **asked, product=call.product) == local, constraint.id
                assert constraint.id in [v.id for v in local.violations]
        for call in samples(record, Product.ATLAS_A2):
            verdict = plain.validate(record.name, inputs=call.inputs, attrs=call.attrs)
            assert verdict == npugrad.validate(record.name, inputs=call.inputs, attrs=call.attrs)
            assert verdict.status == 0


def test_validate_predicts_seconds_once_such_calls_were_done(plain: Any) -> None:
    operands = group_norm()
    metas = {
        name: TensorMeta("float32", operands[name].shape) for name in ("grad_out", "input", "mean", "rstd")
    }
    attrs = {name: operands[name] for name in ("n", "c", "hxw", "group")} | {"output_mask": MASK}
    plain.group_norm_backward(**operands)
    found = plain.validate("group_norm_backward", inputs=metas, attrs=attrs)
    assert found.predicted_wait_s is not None
    assert found.predicted_run_s is not None
    assert found.predicted_run_s > 0
    other = plain.validate("group_norm_backward", inputs=metas, attrs=attrs, product=Product.ATLAS_A3)
    assert (other.predicted_wait_s, other.predicted_run_s) == (None, None), "this server runs none for it"


def test_predictions_that_are_absent_are_none_and_not_0() -> None:
    assert _info.decode_verdict(validation_pb2.ValidateResponse()).predicted_wait_s is None
    found = _info.decode_verdict(validation_pb2.ValidateResponse(predicted_wait_s=0.0))
    assert (found.predicted_wait_s, found.predicted_run_s) == (0.0, None)


def test_validate_takes_what_no_memory_holds(plain: Any) -> None:
    meta = TensorMeta("float32", (2**20, 2**10, 2**10))
    attrs = {"n": 2**20, "c": 2**10, "hxw": 2**10, "group": 1, "output_mask": MASK}
    small = TensorMeta("float32", (2**20, 1))
    inputs = {"grad_out": meta, "input": meta, "mean": small, "rstd": small}
    verdict = plain.validate("group_norm_backward", inputs=inputs, attrs=attrs)
    assert verdict.outputs["grad_input"] == meta


def test_validate_takes_what_a_call_takes(plain: Any) -> None:
    """Arrays, what can be made one, and recipes."""
    operands = group_norm()
    attrs = {name: operands.pop(name) for name in ("n", "c", "hxw", "group", "output_mask")}
    metas = {name: TensorMeta("float32", array.shape) for name, array in operands.items()}
    operands["input"] = np.asfortranarray(operands["input"])
    operands["mean"] = SimpleNamespace(__array__=operands["mean"].__array__)
    operands["rstd"] = Recipe("uniform", shape=operands["rstd"].shape)
    found = plain.validate("group_norm_backward", inputs=operands, attrs=attrs)
    assert found == plain.validate("group_norm_backward", inputs=metas, attrs=attrs)
    assert found.status == 0


def test_validate_finds_levels_that_a_call_finds(plain: Any) -> None:
    """Where their values are given, of a call that breaks no rule; with the call's own error."""
    meta = MSDA.build()
    operands: dict[str, Any] = MSDA.make_inputs(meta, np.random.default_rng(0))
    assert plain.validate(MSDA.name, inputs=operands, attrs={}).status == 0
    operands["level_start_index"] = np.array([0, 13])
    errors: list[tuple[str, ...]] = []
    asks: list[Callable[[], Any]] = [
        lambda: plain.multi_scale_deformable_attention_grad(**operands),
        lambda: plain.multi_scale_deformable_attention_grad(**operands, verify=True),
        lambda: plain.validate(MSDA.name, inputs=operands, attrs={}),
        lambda: plain.validate(MSDA.name, inputs={**operands, "value": meta.tensor("value")}, attrs={}),
    ]
    for ask in asks:
        with pytest.raises(UnsafeLevels, match="level 1: found an end beyond the keys") as caught:
            ask()
        errors.append((str(caught.value), caught.value.reason, caught.value.operator, caught.value.operand))
    assert len({*errors}) == 1
    for change, status in (
        ({"level_start_index": meta.tensor("level_start_index")}, 0),
        ({"location": None}, 161001),
    ):
        found = plain.validate(MSDA.name, inputs={**operands, **change}, attrs={})
        assert found.status == status


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"operator": "rope"}, UnsupportedOperator, "unknown operator 'rope'; known are"),
    ({"inputs": {"x": None}}, TypeError, "unknown input 'x'"),
    (
        {"inputs": {"input": "x"}},
        TypeError,
        "input: found str; expected a NumPy array, a torch CPU tensor or",
    ),
    ({"attrs": {}}, MalformedRequest, "n: found nothing"),
    ({"attrs": {"n": 2**63}}, MalformedRequest, "n: found 9223372036854775808; expected an int"),
    ({"product": "atlas-b9"}, ValueError, "unknown product 'atlas-b9'; known are atlas-training"),
]


def test_what_cannot_be_validated_says_why(plain: Any) -> None:
    attrs = {"n": 1, "c": 1, "hxw": 1, "group": 1, "output_mask": MASK}
    for change, error, message in MISTAKES:
        asked = {"operator": "group_norm_backward", "inputs": {}, "attrs": attrs, "product": None, **change}
        with pytest.raises(error, match=message):
            plain.validate(**asked)


def test_the_server_describes_itself(plain: Any) -> None:
    before = plain.server_info()
    plain.group_norm_backward(**group_norm())
    after = plain.server_info()
    assert after.version == npugrad.__version__
    assert after.product is Product.ATLAS_A2
    assert [d.name for d in after.devices] == ["cpu:0"]
    assert after.devices[0].state == "ready"
    assert after.operators == tuple(OPERATORS)
    assert after.accepted_calls == before.accepted_calls + 1
    assert after.uptime_s > before.uptime_s
    assert not after.draining
    assert {"grpcio", "protobuf", "numpy", "ml_dtypes"} <= set(after.versions)
    assert after.limits.recommended_chunk_bytes <= after.limits.max_chunk_bytes


def test_the_server_lists_the_records(plain: Any) -> None:
    for product in (None, *Product):
        for listed, record in zip(plain.list_operators(product), OPERATORS.values(), strict=True):
            wanted = product or Product.ATLAS_A2
            for name in ("name", "aclnn_name", "summary", "min_cann"):
                assert getattr(listed, name) == getattr(record, name)
            assert listed.supported is (wanted in record.products)
            assert [(p.name, p.c_name, p.doc) for p in listed.parameters] == [
                (p.name, p.c_name, p.doc) for p in record.params
            ]
            assert {p.name for p in listed.parameters if p.optional} == NULLS.get(record.name, set())
            described = {p.name: p for p in listed.parameters}
            for param in (*record.inputs, *record.outputs):
                assert described[param.name].role == param.role
                assert described[param.name].dtypes == tuple(param.dtypes.get(wanted, ()))
            rules = [c for c in record.constraints if c.applies(wanted)]
            assert [
                (c.id, c.code, c.text, c.sources, c.operands, c.vendor_code) for c in listed.constraints
            ] == [(c.id, c.code, c.text, c.sources, c.operands, c.vendor_words) for c in rules]


def test_a_state_of_a_newer_server_is_shown_as_it_came() -> None:
    reply = server_pb2.GetServerInfoResponse(product=2)  # type: ignore[arg-type]
    reply.devices.add(name="npu:0", state=99)
    reply.devices.add(name="npu:1", state=4)
    assert [d.state for d in _info.decode_server_info(reply).devices] == ["state 99", "down"]


@pytest.mark.parametrize("number", [0, 9])
def test_a_product_that_is_not_known_is_never_guessed(number: int) -> None:
    reply = server_pb2.GetServerInfoResponse(product=number)  # type: ignore[arg-type]
    with pytest.raises(NpugradError, match=rf"found product {number}; expected one of 1 \(atlas-training\)"):
        _info.decode_server_info(reply)


def test_a_dtype_that_is_not_known_is_left_out_of_the_list() -> None:
    reply = server_pb2.ListOperatorsResponse()
    parameter = reply.operators.add(name="x").parameters.add(name="y")
    parameter.data_types.extend([1, 99])  # type: ignore[list-item]
    assert _info.decode_operators(reply)[0].parameters[0].dtypes == ("float32",)


def test_a_malformed_verdict_is_the_servers_mistake() -> None:
    reply = validation_pb2.ValidateResponse(status=0)
    reply.outputs.add(name="grad_input").meta.data_type = 99  # type: ignore[assignment]
    with pytest.raises(NpugradError, match=r"reply is malformed: .*found data type 99") as caught:
        _info.decode_verdict(reply)
    assert type(caught.value) is NpugradError
