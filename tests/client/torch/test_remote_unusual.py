"""`remote` and tensors that are unusual: without data, sparse, quantised, and programs that are traced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.client.torch.models import loss_of_group_norm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from npugrad_client import Client
from npugrad_client.torch import RemoteWarning, Summary, drop_in, remote

pytestmark = pytest.mark.torch
POLICIES = pytest.mark.parametrize("on_refused", ["warn", "raise"])


@POLICIES
def test_tensors_on_meta_are_none_of_the_services_business(client: Client, on_refused: Any) -> None:
    x = torch.randn(2, 8, 5, device="meta", requires_grad=True)
    with remote(client, min_bytes=0, on_refused=on_refused) as mode:
        F.group_norm(x, 4).square().sum().backward()
    assert x.grad.shape == x.shape
    assert mode.summary() == Summary(())


@POLICIES
@pytest.mark.parametrize("is_outside", [True, False])
def test_fake_tensors_are_neither(client: Client, on_refused: Any, is_outside: bool) -> None:
    fake, mode = FakeTensorMode(), remote(client, min_bytes=0, on_refused=on_refused)
    with fake if is_outside else mode, mode if is_outside else fake:
        x = torch.randn(2, 8, 5, requires_grad=True)
        F.group_norm(x, 4).square().sum().backward()
    assert x.grad.shape == x.shape
    assert mode.summary() == Summary(())


def test_an_exported_program_is_the_same_and_trains(client: Client) -> None:
    class Normalised(nn.Module):
        def forward(self, x: Any) -> Any:
            return F.group_norm(x, 4).tanh()

    x = torch.randn(2, 8, 5)
    plain = torch.export.export(Normalised(), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RemoteWarning)
        with remote(client, min_bytes=0) as mode, drop_in(client):
            exported = torch.export.export(Normalised(), (x,))
    assert exported.graph_module.code == plain.graph_module.code
    assert mode.summary() == Summary(())
    leaf = x.requires_grad_()
    with mode:
        exported.module()(leaf).sum().backward()
    assert mode.summary().sent == 1
    assert leaf.grad.abs().sum() > 0


def test_sparse_and_quantised_tensors_beside_it(client: Client) -> None:
    dense = torch.randn(4, 4, requires_grad=True)
    with remote(client, min_bytes=0) as mode:
        torch.sparse.mm(dense.to_sparse(), torch.ones(4, 2)).sum().backward()
        rounded = torch.fake_quantize_per_tensor_affine(dense, 0.1, 0, -128, 127)
        rounded.sum().backward()
        loss_of_group_norm()[1].backward()
    assert dense.grad.abs().sum() > 0
    assert (mode.summary().sent, mode.summary().local) == (1, 0)


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_an_operator_called_with_them_runs_as_without(client: Client) -> None:
    """PyTorch has no such kernels; its own error comes out, after one warning of ours."""
    grad = torch.randn(2, 8, 5)
    mean = torch.zeros(2, 4)
    quantised = torch.quantize_per_tensor(grad, 0.1, 0, torch.qint8)
    for odd, told in ((grad.to_sparse(), "torch.sparse_coo"), (quantised, "torch.qint8")):
        arguments: Any = (grad, odd, mean, mean, None, 2, 8, 5, 4, [True, False, False])
        failing = pytest.raises((RuntimeError, NotImplementedError))
        told_once = pytest.warns(RemoteWarning, match=f"input: found .*{told}")
        with remote(client, min_bytes=0), told_once, failing:
            torch.ops.aten.native_group_norm_backward(*arguments)
