"""`drop_in`: models written for the compiled extensions run unmodified, and leave no trace."""

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

from tests.client.torch.agreement import assert_close
from tests.client.torch.deformable_detr import (
    Attention,
    DetrFunction,
    MmcvFunction,
    PlainFunction,
)
from tests.fix_server import ServerProcess

from npugrad_client import Client
from npugrad_client.torch import drop_in

pytestmark = pytest.mark.torch
NAMES = ("MultiScaleDeformableAttention", "mmcv._ext")
STYLES = pytest.mark.parametrize("function", [DetrFunction, MmcvFunction], ids=["deformable-detr", "mmcv"])
SHAPES = torch.tensor([[6, 8], [3, 4]])


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
    for name, one, other in zip(
        ["query", "maps", *dict(model.named_parameters())], got, expected, strict=True
    ):
        assert_close(one, other, name, extra=1e-5 * float(other.abs().max()))


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
    real: Any = types.ModuleType("mmcv._ext")
    real.nms = lambda boxes: "real nms"
    real.ms_deform_attn_forward = lambda *_: "real forward"
    monkeypatch.setitem(sys.modules, "mmcv._ext", real)
    with drop_in(client):
        extension: Any = importlib.import_module("mmcv._ext")
        assert extension.nms([]) == "real nms"
        assert extension.ms_deform_attn_forward is not real.ms_deform_attn_forward
        with drop_in(client):
            assert extension.nms([]) == "real nms"
        assert extension.nms([]) == "real nms"
    assert sys.modules["mmcv._ext"] is real
    assert extension.nms([]) == "real nms"  # mmcv's own modules, imported meanwhile, keep the stand-in
    monkeypatch.delitem(sys.modules, "mmcv._ext")
    with drop_in(client), pytest.raises(NotImplementedError):
        extension.nms([])


def test_operators_that_there_are_not_are_errors_once_called(client: Client) -> None:
    with drop_in(client):
        extension: Any = importlib.import_module("mmcv._ext")
        assert hasattr(extension, "nms")  # mmcv asks for all of its operators when it is imported
        with pytest.raises(
            NotImplementedError, match=r"mmcv._ext.nms: the drop-in has deformable attention only"
        ):
            extension.nms(1, 2, iou=3)
        assert not hasattr(extension, "__path__")


def test_a_model_that_kept_the_module_goes_on_with_a_later_one(client: Client) -> None:
    with drop_in(client):
        kept: Any = importlib.import_module("MultiScaleDeformableAttention")
    with pytest.raises(RuntimeError, match="no drop_in is installed"):
        kept.ms_deform_attn_forward(*(torch.zeros(1),) * 5, 64)
    with drop_in(client):
        assert importlib.import_module("MultiScaleDeformableAttention") is kept
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
    other = types.ModuleType("MultiScaleDeformableAttention")
    with drop_in(client):
        sys.modules["MultiScaleDeformableAttention"] = other
    assert sys.modules.pop("MultiScaleDeformableAttention") is other
    assert {name: sys.modules.get(name) for name in NAMES} == before


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
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert run.stdout.endswith("agreed\n"), run.stderr
