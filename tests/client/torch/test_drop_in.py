"""`drop_in`: models written for the compiled extensions run unmodified, and leave no trace.

Sizes, values and tolerances of upstream's checks are those of Deformable-DETR's `models/ops/test.py`, which
DINO and Mask2Former copied, and of mmcv's `tests/test_ops/test_ms_deformable_attn.py`.
"""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.client.torch import deformable_detr
from tests.client.torch.agreement import assert_close
from tests.client.torch.deformable_detr import Attention, DetrFunction, MmcvFunction, PlainFunction
from tests.fix_server import ServerProcess
from torch.autograd import gradcheck

from npugrad_client import Client, ConnectError, InvalidOperand, NullOperand
from npugrad_client.torch import RemoteWarning, drop_in, remote

pytestmark = pytest.mark.torch
DETR, MMCV = NAMES = ("MultiScaleDeformableAttention", "mmcv._ext")
FUNCTIONS = (DetrFunction, MmcvFunction)
STYLES = pytest.mark.parametrize("function", FUNCTIONS, ids=["deformable-detr", "mmcv"])
SHAPES = torch.tensor([[6, 8], [3, 4]])
HEADS, QUERIES, LEVELS, POINTS, STEP = 2, 2, ((6, 4), (3, 2)), 2, 2


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


def constants(channels: int = 8, dtype: Any = torch.float32) -> list[Any]:
    """The operands, for calls without gradients."""
    return [operand.detach() for operand in call_of(channels, dtype)[:5]]


def gradients(function: Any, call: Any) -> Any:
    """Gradients of value, locations and weights of a fixed loss."""
    out = function.apply(*call)
    loss = (out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)).sum()
    return torch.autograd.grad(loss, (call[0], call[3], call[4]))


def assert_right(got: Any, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Those of the service's own type are those of the plain function."""
    for one, other in zip(got, gradients(PlainFunction, call_of(8)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)


def step(model: Any, dtype: Any = torch.float32) -> list[Any]:
    """Gradients of query, maps and parameters of a fixed loss."""
    torch.manual_seed(3)
    query = torch.randn(2, 5, 32).to(dtype).requires_grad_()
    maps = torch.randn(2, 60, 32).to(dtype).requires_grad_()
    reference = torch.rand(2, 5, 2).to(dtype)
    model(query, reference, maps, SHAPES).square().mean().backward()
    return [tensor.grad.clone() for tensor in (query, maps, *model.parameters())]


@STYLES
def test_an_unmodified_module_trains_through_it(client: Client, function: Any) -> None:
    model = Attention(function)
    plain = copy.deepcopy(model).double()
    plain.function = PlainFunction
    with drop_in(client):
        got = step(model)
    expected = step(plain, torch.float64)
    names = ["query", "maps", *dict(model.named_parameters())]
    for name, one, other in zip(names, got, expected, strict=True):
        assert_close(one, other, name, extra=1e-5 * float(other.abs().max()))


# ------------------------------------------------------------------------------------- upstream's checks


@STYLES
@pytest.mark.parametrize(
    ("dtype", "close", "absolute", "relative"),
    [
        (torch.float64, {}, 1e-18, 1e-15),
        (torch.float32, {"rtol": 1e-2, "atol": 1e-3}, 1e-9, 1e-6),
    ],
)
def test_forward_is_that_of_the_plain_function(
    client: Client, function: Any, dtype: Any, close: Any, absolute: float, relative: float
) -> None:
    call = call_of(2, dtype)
    expected = PlainFunction.apply(*call).detach()
    with drop_in(client):
        got = function.apply(*call).detach()
    assert torch.allclose(got, expected, **close)
    assert (got - expected).abs().max() < absolute
    assert ((got - expected).abs() / expected.abs()).max() < relative


@STYLES
def test_gradcheck(client: Client, function: Any) -> None:
    """With more channels in the fast mode, which multiplies the Jacobian by random vectors."""
    mode = drop_in(client, on_refused="local")
    with mode:
        for channels in (4, 30, 32, 64, 71, 1025, 2048, 3096):
            assert gradcheck(function.apply, call_of(channels), fast_mode=channels > 4), channels
    assert mode.summary().sent == 0
    assert mode.summary().local > 0


@pytest.mark.deep
@pytest.mark.slow
def test_gradcheck_of_1_to_257_channels(client: Client) -> None:
    with drop_in(client, on_refused="local"):
        for channels in (*range(1, 34), *range(37, 258, 10)):
            function = FUNCTIONS[channels // 8 % 2]
            assert gradcheck(function.apply, call_of(channels), fast_mode=True), channels
        assert gradcheck(DetrFunction.apply, call_of(10)), "column by column"


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
        narrow = torch.float32 if dtype is torch.float64 else dtype
        assert_close(call[number].grad.to(narrow), golden[number].grad)
    is_sent = channels == 8 and dtype is not torch.float64
    assert (mode.summary().sent, mode.summary().local) == (is_sent, not is_sent)


# ----------------------------------------------------------------------------------------- the modules


@STYLES
def test_modules_are_there_only_inside(client: Client, function: Any) -> None:
    before = {name: sys.modules.get(name) for name in NAMES}
    with drop_in(client):
        assert all(callable(sys.modules[name].ms_deform_attn_forward) for name in NAMES)
    assert {name: sys.modules.get(name) for name in NAMES} == before
    with pytest.raises(ModuleNotFoundError):
        step(Attention(function))


def test_what_was_there_is_put_back_and_handed_through(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = types.ModuleType(MMCV)
    real.nms = lambda boxes: "real nms"
    real.ms_deform_attn_forward = lambda *_: "real forward"
    monkeypatch.setitem(sys.modules, MMCV, real)
    with drop_in(client):
        extension: Any = importlib.import_module(MMCV)
        assert extension.nms([]) == "real nms"
        assert extension.ms_deform_attn_forward is not real.ms_deform_attn_forward
        with drop_in(client):
            assert extension.nms([]) == "real nms"
        assert extension.nms([]) == "real nms"
    assert sys.modules[MMCV] is real
    assert extension.nms([]) == "real nms"  # mmcv's own modules, imported meanwhile, keep the stand-in
    monkeypatch.delitem(sys.modules, MMCV)
    with drop_in(client):
        assert hasattr(extension, "nms")  # mmcv asks for all of its operators when it is imported
        told = r"mmcv._ext.nms: the drop-in has deformable attention only"
        with pytest.raises(NotImplementedError, match=told):
            extension.nms(1, 2, iou=3)
        assert not hasattr(extension, "__path__")


def test_a_model_that_kept_the_module_goes_on_with_a_later_one(client: Client) -> None:
    with drop_in(client):
        kept: Any = importlib.import_module(DETR)
    with pytest.raises(RuntimeError, match="no drop_in is installed"):
        kept.ms_deform_attn_forward(*(torch.zeros(1),) * 5, 64)
    with drop_in(client):
        assert importlib.import_module(DETR) is kept
        step(Attention(DetrFunction))


def test_installed_by_hand_and_in_order(client: Client) -> None:
    outer, inner = drop_in(client), drop_in(client)
    outer.install()
    with pytest.raises(RuntimeError, match="it is already installed"):
        outer.install()
    inner.install()
    with pytest.raises(RuntimeError, match="it is not the one that was installed last"):
        outer.remove()
    inner.remove()
    step(Attention(MmcvFunction))
    outer.remove()
    with pytest.raises(RuntimeError, match="it is not the one that was installed last"):
        outer.remove()


def test_what_another_library_put_there_meanwhile_stays(client: Client) -> None:
    before = {name: sys.modules.get(name) for name in NAMES}
    other = types.ModuleType(DETR)
    with drop_in(client):
        sys.modules[DETR] = other
    assert sys.modules.pop(DETR) is other
    assert {name: sys.modules.get(name) for name in NAMES} == before


def test_a_model_of_both_extensions_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one library was patched by another, which kept what it found: each gets its own answer."""
    compiled: Any = types.ModuleType(DETR)
    compiled.ms_deform_attn_forward = lambda *_: "compiled"
    monkeypatch.setitem(sys.modules, DETR, compiled)
    mode = drop_in(client)
    with mode:
        one, other = (gradients(function, call_of(8, torch.float32)) for function in FUNCTIONS)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert mode.summary().sent == 2
    assert importlib.import_module(DETR) is compiled


def test_mmcvs_backward_takes_its_arguments_by_position_too(client: Client) -> None:
    call = constants()
    with drop_in(client):
        extension = importlib.import_module(MMCV)
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


def test_the_real_mmcv(server: ServerProcess) -> None:
    """mmcv-lite, which has no compiled extension, where it is installed; in a process that it may fill."""
    pytest.importorskip("mmcv", reason="mmcv is not installed (mmcv-lite 2.2.0 and mmengine are enough)")
    program = f"""
        import torch
        from npugrad_client import Client
        from npugrad_client.torch import drop_in
        with Client({server.address!r}, timeout_s=60) as client, drop_in(client):
            from mmcv.ops.multi_scale_deform_attn import (
                MultiScaleDeformableAttnFunction, multi_scale_deformable_attn_pytorch)
            shapes, starts = torch.tensor([[6, 8], [3, 4]]), torch.tensor([0, 48])
            value = torch.randn(2, 60, 4, 8, requires_grad=True)
            where = torch.rand(2, 5, 4, 2, 3, 2, requires_grad=True)
            weight = torch.rand(2, 5, 4, 2, 3, requires_grad=True)
            operands = (value, where, weight)
            got = MultiScaleDeformableAttnFunction.apply(value, shapes, starts, where, weight, 64)
            expected = multi_scale_deformable_attn_pytorch(value, shapes, where, weight)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            one = torch.autograd.grad(got.square().sum(), operands)
            other = torch.autograd.grad(expected.square().sum(), operands)
            for a, b in zip(one, other):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            print("agreed")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert run.stdout.endswith("agreed\n"), run.stderr


# ------------------------------------------------------------------------------------------- policies


@STYLES
def test_what_the_documents_refuse_runs_here_and_is_told_once_or_is_an_error(
    client: Client, function: Any
) -> None:
    mode = drop_in(client)
    with mode, pytest.warns(RemoteWarning, match="value: found dtype float64") as said:
        got = [gradients(function, call_of(8)) for _ in range(2)]
    assert len(said) == 1
    assert said[0].filename == deformable_detr.__file__  # where the extension is called
    (row,) = mode.summary().rows
    assert (row.is_sent, row.calls) == (False, 2)
    for one in got:
        assert_right(one, rtol=1e-11, atol=1e-13)
    with drop_in(client, on_refused="raise"):
        with pytest.raises(InvalidOperand, match="value: found dtype float64") as refused:
            function.apply(*call_of(8))
        assert gradients(function, call_of(8, torch.float32))  # and goes on
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
        gradients(Swallowing, call_of(5, torch.float32))
    assert not Swallowing.fell_back
    assert mode.summary().local == 1


@STYLES
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_types_are_sent_as_float32(client: Client, function: Any, low: Any) -> None:
    value, *others = call_of(8, torch.float32)
    call = (value.detach().to(low).requires_grad_(), *others)
    mode = drop_in(client)
    with mode:
        out = function.apply(*call)
        grads = gradients(function, call)
    assert out.dtype is low
    assert [grad.dtype for grad in grads] == [low, torch.float32, torch.float32]
    assert (mode.summary().as_float32, mode.summary().local) == (1, 0)
    wide = (call[0].detach().double().requires_grad_(), *call_of(8)[1:])
    for grad, other in zip(grads, gradients(PlainFunction, wide), strict=True):
        torch.testing.assert_close(grad.double(), other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))


@STYLES
def test_a_module_under_autocast(client: Client, function: Any) -> None:
    model, mode = Attention(function), drop_in(client)
    with mode, torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(2, 5, 32), torch.rand(2, 5, 2), torch.randn(2, 60, 32), SHAPES)
        out.float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert mode.summary().sent == 1


def test_small_calls_stay_here_where_that_is_wanted(client: Client) -> None:
    mode = drop_in(client, min_bytes=2**20)
    with mode:
        assert_right(gradients(DetrFunction, call_of(8, torch.float32)))
    assert [(row.is_sent, row.why) for row in mode.summary().rows] == [(False, "smaller than min_bytes")]


@STYLES
def test_a_failure_comes_out_of_backward_or_the_call_runs_here(function: Any) -> None:
    call = call_of(8, torch.float32)
    with Client("127.0.0.1:1", retry=None) as dead:
        with drop_in(dead), pytest.raises(ConnectError):
            gradients(function, call)
        mode = drop_in(dead, on_error="local")
        with mode, pytest.warns(RemoteWarning, match="because the service failed: .*cannot reach") as said:
            got = [gradients(function, call) for _ in range(2)]
    assert len(said) == 1
    assert mode.summary().failed == 2
    assert_right(got[0])


@pytest.mark.parametrize("wrong", [{"on_refused": "ignore"}, {"on_error": "warn"}, {"min_bytes": -1}])
def test_a_policy_that_there_is_not(client: Client, wrong: Any) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^drop_in: {name}: found .*; expected "):
        drop_in(client, **wrong)


def test_inside_of_remote_and_around_it(client: Client) -> None:
    """Each counts its own: the extension's gradient is no operator of PyTorch's."""
    outer, inner = remote(client, min_bytes=0), drop_in(client)
    with outer, inner:
        first = gradients(DetrFunction, call_of(8, torch.float32))
    with inner, outer:
        second = gradients(DetrFunction, call_of(8, torch.float32))
    assert (outer.summary().rows, inner.summary().sent) == ((), 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with outer, drop_in(client, on_refused="local"):
        gradients(DetrFunction, call_of(5))
    assert outer.summary().rows == ()


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
        DetrFunction.apply(*break_(constants(dtype=dtype)), STEP)
    assert refused.value.code == 161002


NO_DENSE = {
    "sparse": lambda value: value.to_sparse(),
    "quantised": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
    "meta": lambda value: value.to("meta"),
}


@pytest.mark.parametrize("change", NO_DENSE.values(), ids=NO_DENSE)
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_what_is_no_dense_tensor_of_the_cpu(client: Client, change: Any) -> None:
    value, *others = constants()
    with drop_in(client, on_refused="local"), pytest.raises(TypeError, match=r"value: found .*"):
        DetrFunction.apply(change(value), *others, STEP)


def test_a_missing_operand_is_null(client: Client) -> None:
    with drop_in(client, on_refused="local"):
        extension = importlib.import_module(DETR)
        with pytest.raises(NullOperand, match="attn_weight: found null"):
            extension.ms_deform_attn_forward(*constants()[:4], None, STEP)
