"""The checks that Deformable-DETR, DINO, Mask2Former and mmcv make of their compiled operator, by `drop_in`.

Sizes, values and tolerances are those of Deformable-DETR's `models/ops/test.py`, which the others copied, and
of mmcv's `tests/test_ops/test_ms_deformable_attn.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.client.torch.agreement import assert_close
from tests.client.torch.deformable_detr import DetrFunction, MmcvFunction, PlainFunction
from torch.autograd import gradcheck

from npugrad_client import Client
from npugrad_client.torch import drop_in

pytestmark = pytest.mark.torch
STYLES = pytest.mark.parametrize("function", [DetrFunction, MmcvFunction], ids=["deformable-detr", "mmcv"])
HEADS, QUERIES, LEVELS, POINTS = 2, 2, ((6, 4), (3, 2)), 2
STEP = 2


def call_of(channels: int, dtype: Any = torch.float64) -> Any:
    """Small values and weights that add up to one, as upstream draws them, each a leaf; im2col_step last."""
    torch.manual_seed(3)
    shapes = torch.as_tensor(LEVELS, dtype=torch.long)
    starts = torch.cat((shapes.new_zeros((1,)), shapes.prod(1).cumsum(0)[:-1]))
    value = torch.rand(1, int(shapes.prod(1).sum()), HEADS, channels) * 0.01
    location = torch.rand(1, QUERIES, HEADS, len(LEVELS), POINTS, 2)
    weight = torch.rand(1, QUERIES, HEADS, len(LEVELS), POINTS) + 1e-5
    weight /= weight.sum(-1, keepdim=True).sum(-2, keepdim=True)
    value, location, weight = (t.to(dtype).requires_grad_() for t in (value, location, weight))
    return value, shapes, starts, location, weight, STEP


@STYLES
def test_forward_is_that_of_the_plain_function_in_float64(client: Client, function: Any) -> None:
    call = call_of(2)
    expected = PlainFunction.apply(*call).detach()
    with drop_in(client):
        got = function.apply(*call).detach()
    assert torch.allclose(got, expected)
    assert (got - expected).abs().max() < 1e-18
    assert ((got - expected).abs() / expected.abs()).max() < 1e-15


@STYLES
def test_and_in_float32(client: Client, function: Any) -> None:
    call = call_of(2, torch.float32)
    expected = PlainFunction.apply(*call).detach()
    with drop_in(client):
        got = function.apply(*call).detach()
    assert torch.allclose(got, expected, rtol=1e-2, atol=1e-3)
    assert (got - expected).abs().max() < 1e-9
    assert ((got - expected).abs() / expected.abs()).max() < 1e-6


@STYLES
@pytest.mark.parametrize("channels", [4, 30, 32, 64, 71])
def test_gradcheck(client: Client, function: Any, channels: int) -> None:
    mode = drop_in(client, on_refused="local")
    with mode:
        assert gradcheck(function.apply, call_of(channels), fast_mode=channels > 4)
    assert mode.summary().sent == 0
    assert mode.summary().local > 0


@STYLES
@pytest.mark.parametrize("channels", [1025, 2048, 3096])
def test_gradcheck_of_many_channels(client: Client, function: Any, channels: int) -> None:
    """In the fast mode, which multiplies the Jacobian by random vectors; upstream's takes minutes here."""
    with drop_in(client, on_refused="local"):
        assert gradcheck(function.apply, call_of(channels), fast_mode=True)


@STYLES
def test_gradcheck_of_1_to_257_channels(client: Client, function: Any) -> None:
    with drop_in(client, on_refused="local"):
        for channels in range(1, 258):
            assert gradcheck(function.apply, call_of(channels), fast_mode=True), channels


@pytest.mark.slow
@STYLES
@pytest.mark.parametrize("channels", [30, 32, 64, 71])
def test_gradcheck_column_by_column(client: Client, function: Any, channels: int) -> None:
    with drop_in(client, on_refused="local"):
        assert gradcheck(function.apply, call_of(channels))


@STYLES
@pytest.mark.parametrize("channels", [5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradients_in_every_type(client: Client, function: Any, dtype: Any, channels: int) -> None:
    """8 channels are the service's, but for float64; 5 are not; the two agree with float64 alike."""
    call, mode = call_of(channels, dtype), drop_in(client, on_refused="local")
    with mode:
        out = function.apply(*call)
        grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(dtype)
        out.backward(grad)
    floats = {number: call[number].detach().double().requires_grad_() for number in (0, 3, 4)}
    golden = [floats.get(number, operand) for number, operand in enumerate(call)]
    PlainFunction.apply(*golden).backward(grad.double())
    for number in (0, 3, 4):
        assert call[number].grad.dtype is dtype
        assert_close(
            call[number].grad.to(torch.float32 if dtype is torch.float64 else dtype), golden[number].grad
        )
    is_sent = channels == 8 and dtype is not torch.float64
    assert (mode.summary().sent, mode.summary().local) == (is_sent, not is_sent)
