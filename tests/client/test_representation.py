"""How what a client gives shows itself: results of every operator, clients, servers, operators, verdicts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from tests.fix_server import ServerProcess

import npugrad_client
from npugrad import OPERATORS, OpRecord
from npugrad.call import ExecutionInfo
from npugrad.products import Product
from npugrad.representation import WIDTH
from npugrad_client import AsyncClient, Client, DeviceInfo, Progress, Recipe, RetryPolicy, TensorMeta

INFO = ExecutionInfo("cpu", "cpu:0", Product.ATLAS_A2, run_s=0.0125, request_id="<b>")


def assert_fits(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= 3, text
    assert max(map(len, lines)) <= WIDTH, text


def result(record: OpRecord, **changed: Any) -> Any:
    """A result of a large call, whose arrays hold one element each."""
    call = record.build(**record.workloads.named["large"].sizes)
    outputs = record.infer(call)
    arrays = {
        n: None if m is None else np.broadcast_to(np.zeros((), m.dtype.numpy), m.shape)
        for n, m in outputs.items()
    }
    return getattr(npugrad_client, f"{record.rpc}Result")(**{**arrays, **changed}, info=INFO)


def test_a_result_shows_types_and_shapes_in_three_lines_and_in_notebooks_as_tables() -> None:
    for record in OPERATORS.values():
        found = result(record)
        assert_fits(repr(found))
        assert repr(found).startswith(f"{record.rpc}Result({record.outputs[0].name}=float")
        masked = result(record, **{record.outputs[0].name: None})
        page = masked._repr_html_()
        assert f"<tr><td>{record.outputs[0].name}</td><td>masked out</td><td></td><td></td></tr>" in page
        for output in record.outputs:
            array = getattr(found, output.name)
            assert f"{output.name}={array.dtype}{[*array.shape]}".replace(", ", ",") in repr(found)
            shape = " x ".join(map(str, array.shape))
            row = f"<tr><td>{output.name}</td><td>{array.dtype}</td><td>{shape}</td>"
            assert (row in page) is (output is not record.outputs[0])
        assert repr(found).endswith("info=cpu:0, 12.5 ms)")
        assert "<td>&lt;b&gt;</td>" in page, "the info, escaped"


def test_a_result_of_many_heads_fits_on_the_reference() -> None:
    info = dataclasses.replace(INFO, device="cpu-reference:0", run_s=123.456)
    call = OPERATORS["fused_floyd_attention_grad"].build(dtype="bfloat16", h=16, n=1024, d=128)
    metas = OPERATORS["fused_floyd_attention_grad"].infer(call)
    arrays = {
        n: np.broadcast_to(np.zeros((), m.dtype.numpy), m.shape) for n, m in metas.items() if m is not None
    }
    assert_fits(repr(npugrad_client.FusedFloydAttentionGradResult(**arrays, info=info)))


def test_clients_name_some_of_many_servers() -> None:
    for kind in (Client, AsyncClient):
        assert repr(kind("localhost:50051")) == f"{kind.__name__}('localhost:50051')"
        many = repr(kind([f"host{number}:50051" for number in range(20)]))
        assert many == f"{kind.__name__}('host0:50051, host1:50051, host2:50051' and 17 more in .target)"


def test_what_a_caller_makes_fits_three_lines() -> None:
    for made in (
        RetryPolicy(),
        TensorMeta("bfloat16", (2**30,) * 2, strides=(2**31, 1)),
        Recipe("uniform", shape=(1,) * 32, digest=bytes(32)),
        Progress("receiving", 2**40, 2**41, 2**40, 2**41, 10),
    ):
        assert_fits(repr(made))
    assert repr(RetryPolicy(max_tries=9)).startswith("RetryPolicy(max_tries=9, retry_for_s=30.0, ")


def test_a_server_fits_three_lines(server: ServerProcess) -> None:
    with Client(server.address) as client:
        info = client.server_info()
    for shown in (info, info.limits, *info.devices):
        assert_fits(repr(shown))
    assert f"npugrad {info.version} for {info.product}" in repr(info)
    assert "cpu:0 ready" in repr(info)
    page = info._repr_html_()
    assert "<caption>Devices</caption>" in page
    assert f"<tr><td>version</td><td>{info.version}</td></tr>" in page
    for limit in dataclasses.fields(info.limits):
        assert f"<td>{limit.name}</td>" in page
    for field in dataclasses.fields(info):
        assert field.name in ("devices", "limits") or f"<td>{field.name}</td>" in page
    many = tuple(DeviceInfo(f"npu:{n}", "npu", "<i>", False, "quarantined", 0, "") for n in range(64))
    large = dataclasses.replace(info, devices=many)
    assert_fits(repr(large))
    assert "npu:2 quarantined and 61 more in .devices" in repr(large)
    assert large._repr_html_().count("<td>&lt;i&gt;</td>") == 64


def test_operators_and_verdicts_fit_three_lines(server: ServerProcess) -> None:
    with Client(server.address) as client:
        for info in client.list_operators():
            assert_fits(repr(info))
            assert f"{info.name}, {info.aclnn_name}" in repr(info)
            for part in (*info.parameters, *info.constraints):
                assert_fits(repr(part))
                assert repr(part).startswith(f"{type(part).__name__}(")
        meta = {"normalized_shape": (4,), "output_mask": (True, True, True)}
        wrong = client.validate("layer_norm_backward", inputs={}, attrs=meta)
    for violation in wrong.violations:
        assert_fits(repr(violation))
    assert_fits(repr(wrong))
    assert repr(wrong).startswith("Verdict(status 161001,")
    assert "and 1 more in .violations" in repr(wrong)
