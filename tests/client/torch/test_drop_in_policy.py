"""`drop_in`: what goes to the service, what stays here and why, and what happens when the service fails."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.client.torch import deformable_detr
from tests.client.torch.deformable_detr import (
    Attention,
    DetrFunction,
    MmcvFunction,
    PlainFunction,
)
from tests.client.torch.test_drop_in_upstream import STEP, call_of

from npugrad_client import Client, ConnectError, InvalidOperand, NullOperand
from npugrad_client.torch import RemoteWarning, drop_in, remote

pytestmark = pytest.mark.torch
STYLES = pytest.mark.parametrize("function", [DetrFunction, MmcvFunction], ids=["deformable-detr", "mmcv"])


def operands(channels: int, dtype: Any = torch.float64) -> Any:
    """The five operands that upstream draws."""
    return call_of(channels, dtype)[:5]


def gradients(function: Any, call: Any) -> Any:
    """Gradients of value, locations and weights of a fixed loss."""
    out = function.apply(*call, STEP)
    loss = (out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)).sum()
    return torch.autograd.grad(loss, (call[0], call[3], call[4]))


@STYLES
def test_what_the_documents_refuse_runs_here_and_is_told_once(client: Client, function: Any) -> None:
    call, mode = operands(8), drop_in(client)
    with mode, pytest.warns(RemoteWarning, match="value: found dtype float64") as said:
        got = [gradients(function, call) for _ in range(2)]
    assert len(said) == 1
    assert said[0].filename == deformable_detr.__file__  # where the extension is called
    (row,) = mode.summary().rows
    assert (row.is_sent, row.calls) == (False, 2)
    expected = gradients(PlainFunction, call)
    for one in got:
        for grad, other in zip(one, expected, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-11, atol=1e-13)


@STYLES
def test_or_raises_the_documented_error(client: Client, function: Any) -> None:
    with drop_in(client, on_refused="raise"):
        with pytest.raises(InvalidOperand, match="value: found dtype float64") as refused:
            function.apply(*operands(8), STEP)
        assert gradients(function, operands(8, torch.float32))  # and goes on
    assert refused.value.code == 161002


def test_a_fallback_that_swallows_errors_finds_none_to_swallow(client: Client) -> None:
    """Mask2Former's module tries the extension and, whatever happens, takes the plain function."""

    class Swallowing:
        fell_back = False

        @classmethod
        def apply(cls, *arguments: Any) -> Any:
            try:
                return DetrFunction.apply(*arguments)
            except:  # noqa: E722
                cls.fell_back = True
                return PlainFunction.apply(*arguments)

    mode = drop_in(client)
    with mode, pytest.warns(RemoteWarning, match="runs locally because the service refuses it"):
        gradients(Swallowing, operands(5, torch.float32))
    assert not Swallowing.fell_back
    assert mode.summary().local == 1


@STYLES
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_types_are_sent_as_float32(client: Client, function: Any, low: Any) -> None:
    value, shapes, starts, location, weight = operands(8, torch.float32)
    call = (value.detach().to(low).requires_grad_(), shapes, starts, location, weight)
    mode = drop_in(client)
    with mode:
        out = function.apply(*call, STEP)
        grads = gradients(function, call)
    assert out.dtype is low
    assert [grad.dtype for grad in grads] == [low, torch.float32, torch.float32]
    assert (mode.summary().as_float32, mode.summary().local) == (1, 0)
    wide = (call[0].detach().double().requires_grad_(), *call[1:3], location.double(), weight.double())
    for grad, other in zip(grads, gradients(PlainFunction, wide), strict=True):
        torch.testing.assert_close(grad.double(), other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))


@STYLES
def test_a_module_under_autocast(client: Client, function: Any) -> None:
    model, mode = Attention(function), drop_in(client)
    shapes = torch.tensor([[6, 8], [3, 4]])
    with mode, torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(2, 5, 32), torch.rand(2, 5, 2), torch.randn(2, 60, 32), shapes)
        out.float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert mode.summary().sent == 1


def test_mmcvs_backward_takes_its_arguments_by_position_too(client: Client) -> None:
    call = [t.detach() for t in operands(8, torch.float32)]
    with drop_in(client):
        extension = importlib.import_module("mmcv._ext")
        grad = torch.ones_like(extension.ms_deform_attn_forward(*call, STEP))
        found = []
        for named in (False, True):
            filled = [torch.full_like(t, 7.0) for t in (call[0], call[3], call[4])]
            step: Any = {"im2col_step": STEP} if named else {}
            extension.ms_deform_attn_backward(*call, grad, *filled, *(() if named else (STEP,)), **step)
            found.append(filled)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert not (found[0][0] == 7).any()


def test_small_calls_stay_here_where_that_is_wanted(client: Client) -> None:
    mode = drop_in(client, min_bytes=2**20)
    with mode:
        got = gradients(DetrFunction, operands(8, torch.float32))
    assert [(row.is_sent, row.why) for row in mode.summary().rows] == [(False, "smaller than min_bytes")]
    for one, other in zip(got, gradients(PlainFunction, operands(8)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


@STYLES
def test_a_failure_comes_out_of_backward_or_the_call_runs_here(function: Any) -> None:
    call = operands(8, torch.float32)
    with Client("127.0.0.1:1", retry=None) as dead:
        with drop_in(dead), pytest.raises(ConnectError):
            gradients(function, call)
        mode = drop_in(dead, on_error="local")
        with mode, pytest.warns(RemoteWarning, match="because the service failed: .*cannot reach") as said:
            got = [gradients(function, call) for _ in range(2)]
    assert len(said) == 1
    assert mode.summary().failed == 2
    for one, other in zip(got[0], gradients(PlainFunction, operands(8)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"on_refused": "ignore"}, {"on_error": "warn"}, {"min_bytes": -1}])
def test_a_policy_that_there_is_not(client: Client, wrong: Any) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^drop_in: {name}: found .*; expected "):
        drop_in(client, **wrong)


# ------------------------------------------------------------------------------------------- bad input


BROKEN = {
    "rank": lambda c: (c[0][0], *c[1:]),
    "points": lambda c: (*c[:4], c[4][..., :1]),
    "batch": lambda c: (c[0], *c[1:3], *(t.expand(2, *t.shape[1:]) for t in c[3:])),
    "heads": lambda c: (c[0][:, :, :1], *c[1:]),
    "levels": lambda c: (c[0], c[1][:1], *c[2:]),
    "starts": lambda c: (*c[:2], c[2][:1], *c[3:]),
    "coordinates": lambda c: (*c[:3], c[3][..., :1], c[4]),
    "whole numbers": lambda c: (c[0].long(), *c[1:]),
    "level type": lambda c: (c[0], c[1].double(), *c[2:]),
}


@pytest.mark.parametrize("break_", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_operands_that_do_not_fit_together_are_refused_whatever_the_policy(
    client: Client, break_: Any, dtype: Any
) -> None:
    with drop_in(client, on_refused="local"), pytest.raises(InvalidOperand) as refused:
        DetrFunction.apply(*break_([t.detach() for t in operands(8, dtype)]), STEP)
    assert refused.value.code == 161002


def sparse(value: Any) -> Any:
    return value.to_sparse()


def quantised(value: Any) -> Any:
    return torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)


def on_meta(value: Any) -> Any:
    return value.to("meta")


@pytest.mark.parametrize("change", [sparse, quantised, on_meta])
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_what_is_no_dense_tensor_of_the_cpu(client: Client, change: Any) -> None:
    value, *others = (t.detach() for t in operands(8, torch.float32))
    with drop_in(client, on_refused="local"), pytest.raises(TypeError, match=r"value: found .*"):
        DetrFunction.apply(change(value), *others, STEP)


def test_a_missing_operand_is_null(client: Client) -> None:
    call: list[Any] = [t.detach() for t in operands(8, torch.float32)]
    call[4] = None
    with drop_in(client, on_refused="local"):
        extension = importlib.import_module("MultiScaleDeformableAttention")
        with pytest.raises(NullOperand, match="attn_weight: found null"):
            extension.ms_deform_attn_forward(*call, STEP)


def test_inside_of_remote_and_around_it(client: Client) -> None:
    """Each counts its own: the extension's gradient is no operator of PyTorch's."""
    outer, inner = remote(client, min_bytes=0), drop_in(client)
    with outer, inner:
        first = gradients(DetrFunction, operands(8, torch.float32))
    with inner, outer:
        second = gradients(DetrFunction, operands(8, torch.float32))
    assert (outer.summary().rows, inner.summary().sent) == ((), 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with outer, drop_in(client, on_refused="local"):
        gradients(DetrFunction, operands(5, torch.float64))
    assert outer.summary().rows == ()


def test_a_model_of_both_extensions_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one library was patched by another, which kept what it found: each gets its own answer."""
    compiled: Any = types.ModuleType("MultiScaleDeformableAttention")
    compiled.ms_deform_attn_forward = lambda *_: "compiled"
    monkeypatch.setitem(sys.modules, "MultiScaleDeformableAttention", compiled)
    call = operands(8, torch.float32)
    mode = drop_in(client)
    with mode:
        one, other = (gradients(function, call) for function in (DetrFunction, MmcvFunction))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert mode.summary().sent == 2
    assert importlib.import_module("MultiScaleDeformableAttention") is compiled
