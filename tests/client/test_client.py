"""The typed methods against a real server: results, documented codes, declared outputs, odd operands."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.calls import Sample, fill, sample
from tests.client.both import BOTH, Looped, Make
from tests.client.fake_service import STREAMED, UNARY, group_norm
from tests.fix_server import ServerProcess

from npugrad import OPERATORS, Product, TensorMeta
from npugrad_client import (
    Client,
    InvalidOperand,
    NullOperand,
    OperatorError,
)

MASK = (True, True, True)
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module", params=[UNARY, STREAMED], ids=["unary", "streamed"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    with Client(server.address, timeout_s=60, stream_from_bytes=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def plain(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address, timeout_s=60) as made:
        yield made


def given(call: Sample, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a sample."""
    return {**call.arrays, **call.call.attrs, **changes}


# -------------------------------------------------------------------------------------- typed methods


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_operator_answers_with_the_references_results(server: ServerProcess, operator: str) -> None:
    """Either way, of both clients and of futures."""
    call = sample(operator, seed=3)
    expected = call.reference()
    for way in (UNARY, STREAMED):
        options: Any = {"timeout_s": 60, "stream_from_bytes": way}
        with Client(server.address, **options) as client, Looped(server.address, **options) as looped:
            for grads in (
                getattr(client, operator)(**given(call)),
                getattr(client.submit, operator)(**given(call)).result(60),
                getattr(looped, operator)(**given(call)),
            ):
                assert {n: getattr(grads, n).tobytes() for n in call.outputs} == expected
                assert grads.info.device == "cpu:0"
                assert grads.info.backend.startswith("cpu")
                assert grads.info.product is Product.ATLAS_A2
                assert not grads.info.simulated
                assert grads.info.attempts == 1
                assert grads.info.request_id


def test_a_method_takes_the_records_parameters_and_nothing_else() -> None:
    """Operands default to null, attributes have no default, and all go by keyword."""
    for operator, record in OPERATORS.items():
        parameters = list(inspect.signature(getattr(Client, operator)).parameters.values())[1:]
        options = ["out", "timeout_s", "deterministic", "priority", "label", "verify", "progress"]
        own = [p.name for p in record.params if p not in record.outputs]
        assert [p.name for p in parameters] == own + options
        assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}
        tensors = {p.name for p in record.inputs}
        for parameter in parameters[: len(own)]:
            assert parameter.default is (None if parameter.name in tensors else inspect.Parameter.empty)


# ------------------------------------------------------------------------------------ documented codes


def test_a_missing_operand_is_none_is_null(client: Client) -> None:
    call = group_norm()
    for same in ({**call, "mean": None}, {k: v for k, v in call.items() if k != "mean"}):
        with pytest.raises(NullOperand) as caught:
            client.group_norm_backward(**same)
        error = caught.value
        assert (error.code, error.constraint, error.source) == (161001, "mean.not_null", "validator")
        assert error.operator == "group_norm_backward"
        assert str(error).startswith("group_norm_backward: mean: found null; expected ")
        assert error.request_id


def test_an_optional_operand_may_be_missing(client: Client) -> None:
    call = group_norm()
    without = client.group_norm_backward(**{**call, "gamma": None})
    ones = client.group_norm_backward(**{**call, "gamma": np.ones(4, np.float32)})
    assert without.grad_input.tobytes() == ones.grad_input.tobytes()


# ------------------------------------------------------------------------------------ declared outputs


def test_out_arrays_of_any_layout_are_filled_and_returned(client: Client) -> None:
    call = group_norm()
    expected = client.group_norm_backward(**call)
    out = {
        "grad_input": np.full((8, 4, 2), 9, np.float32).transpose(2, 1, 0),
        "grad_gamma": np.full(8, 9, np.float32)[::-2],
        "grad_beta": np.full(4, 9, ">f4"),
    }
    got = client.group_norm_backward(**call, out=out)
    for name, array in out.items():
        assert getattr(got, name) is array
        np.testing.assert_array_equal(array, getattr(expected, name))


def test_a_masked_out_array_is_answered_by_none_and_left_alone(client: Client) -> None:
    mine = np.full((2, 4, 8), 9, np.float32)
    call = {**group_norm(), "output_mask": (False, True, False)}
    got = client.group_norm_backward(**call, out={"grad_input": mine})
    assert got.grad_input is None
    assert got.grad_beta is None
    assert got.grad_gamma is not None
    assert (mine == 9).all()


UNFIT: list[tuple[dict[str, Any], type[OperatorError], str]] = [
    ({"grad_input": None}, NullOperand, "grad_input.not_null"),
    ({"grad_input": np.zeros((2, 4, 8), np.float16)}, InvalidOperand, "grad_input.same_dtype"),
    ({"grad_input": np.zeros((2, 4, 7), np.float32)}, InvalidOperand, "grad_input.shape"),
    ({"grad_gamma": TensorMeta("float32", (5,))}, InvalidOperand, "grad_gamma.shape"),
    ({"grad_gamma": TensorMeta("hifloat8", (4,))}, InvalidOperand, "grad_gamma.same_dtype"),
]


def test_a_declared_output_that_does_not_fit_has_the_documented_code(client: Client) -> None:
    for out, cls, constraint in UNFIT:
        with pytest.raises(cls) as caught:
            client.group_norm_backward(**group_norm(), out=out)
        assert caught.value.constraint == constraint
    call = {**group_norm(), "output_mask": (False, True, True)}
    assert client.group_norm_backward(**call, out={"grad_input": None}).grad_input is None, "it is legal"


@BOTH
def test_large_results_land_in_the_callers_arrays(server: ServerProcess, make: Make) -> None:
    call = group_norm(n=2, c=64, hxw=8192)  # 4 MiB an operand
    mine = np.full((2, 64, 8192), 9, np.float32)
    with make(server.address, timeout_s=60) as client:
        expected = client.group_norm_backward(**call).grad_input.tobytes()
        assert client.group_norm_backward(**call, out={"grad_input": mine}).grad_input is mine
    assert mine.tobytes() == expected


# ---------------------------------------------------------------------------------------- odd operands


def test_eight_threads_share_a_client(plain: Client) -> None:
    def work(seed: int) -> bool:
        call = fill(record, record.build(n=2, c=8, hxw=64 if seed % 2 else 20_000, group=2), seed)
        grads = plain.group_norm_backward(**given(call), label=f"thread {seed}")
        return {n: getattr(grads, n).tobytes() for n in call.outputs} == call.reference()

    record = OPERATORS["group_norm_backward"]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
