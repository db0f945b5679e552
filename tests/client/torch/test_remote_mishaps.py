"""`remote` and the functions when things go wrong, or are unusual: a lost service, Ctrl+C, a wrong client."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from collections.abc import Callable

import torch.nn.functional as F
from tests.client.torch.models import loss_of_grid_sample, loss_of_group_norm
from tests.client.torch.test_attentions import operands
from tests.fix_server import ServerProcess, StartServer
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from npugrad_client import AsyncClient, Client, ConnectError, RetryPolicy
from npugrad_client.torch import (
    drop_in,
    fused_floyd_attention,
    multi_scale_deformable_attention,
    remote,
)

pytestmark = pytest.mark.torch
LATER_MS = 60_000


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """It takes seconds, and else the first mode imports it: an interrupt must not fall into that."""
    importlib.import_module("torch._dynamo")


def when_running(server: ServerProcess, act: Callable[[], object]) -> threading.Thread:
    """Does something as soon as the server has a call; each look is a round trip, so that nothing sleeps."""

    def wait() -> None:
        while not server.info().input_arena_used_bytes:
            pass
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


# ------------------------------------------------------------------------------------------- mishaps


def test_a_service_killed_during_backward_is_a_typed_error_and_the_process_goes_on(
    start_server: StartServer,
) -> None:
    server = start_server(devices=f"test:1?ms={LATER_MS}", check_end=False)
    with Client(server.address, timeout_s=60, retry=RetryPolicy(retry_for_s=0)) as client:
        x, loss = loss_of_group_norm()
        watcher = when_running(server, server.kill)
        with remote(client, min_bytes=0), pytest.raises(ConnectError, match="group_norm_backward: "):
            loss.backward(retain_graph=True)
        watcher.join(60)
    assert [x.grad] == [None]
    loss.backward()  # the same graph, here
    assert x.grad.abs().sum() > 0


def test_an_interrupt_comes_out_of_backward_and_the_process_goes_on(start_server: StartServer) -> None:
    server = start_server(devices=f"test:1?ms={LATER_MS}", check_end=False)
    with Client(server.address, timeout_s=60) as client:
        x, loss = loss_of_group_norm()
        watcher = when_running(server, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt), remote(client, min_bytes=0):
            loss.backward(retain_graph=True)
        watcher.join(60)
    assert _get_current_dispatch_mode() is None
    assert [x.grad] == [None]
    loss.backward()
    assert x.grad.abs().sum() > 0


def test_an_exception_inside_leaves_nothing_entered(client: Client) -> None:
    mode = remote(client, min_bytes=0)
    with pytest.raises(KeyError), mode, mode:
        raise KeyError("of the caller")
    assert _get_current_dispatch_mode() is None
    loss_of_group_norm()[1].backward()
    assert mode.summary().rows == ()


def test_an_exception_of_a_hook_comes_out_as_it_is(client: Client) -> None:
    x, loss = loss_of_group_norm()

    def hook(_: Any) -> None:
        raise LookupError("of the hook")

    x.register_hook(hook)
    with remote(client, min_bytes=0) as mode, pytest.raises(LookupError, match="of the hook"):
        loss.backward()
    assert mode.summary().sent == 1


def test_a_closed_client(server: ServerProcess) -> None:
    closed = Client(server.address)
    closed.close()
    for policy in ("raise", "local"):  # a mistake of the program, and no failure of the service
        with (
            remote(closed, min_bytes=0, on_error=policy),
            pytest.raises(RuntimeError, match="is closed"),
        ):
            loss_of_group_norm()[1].backward()


@pytest.mark.parametrize("wrong", [None, "localhost:50051", AsyncClient], ids=["none", "address", "async"])
def test_a_wrong_client_is_told_at_once_and_not_out_of_backward(wrong: Any) -> None:
    wrong = wrong("localhost:1") if wrong is AsyncClient else wrong
    attention = operands()
    floyd = [torch.empty(1, 1, 16, 128, 32)] * 5
    ways = {
        "remote": lambda: remote(wrong),
        "drop_in": lambda: drop_in(wrong),
        "multi_scale_deformable_attention": lambda: multi_scale_deformable_attention(
            *attention, client=wrong
        ),
        "fused_floyd_attention": lambda: fused_floyd_attention(*floyd, client=wrong),
    }
    for name, way in ways.items():
        message = f"^{name}: client: found {type(wrong).__name__}; expected a Client"
        with pytest.raises(TypeError, match=message):
            way()


def test_min_bytes_below_nothing(client: Client) -> None:
    with pytest.raises(ValueError, match=r"^remote: min_bytes: found -1; expected 0 or more$"):
        remote(client, min_bytes=-1)


# ------------------------------------------------------------------------------------------- the unusual


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_that_keep_atens_operators_are_sent(client: Client, backend: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Tanh())
    x = torch.randn(2, 3, 6, 6)
    model(x).square().sum().backward()
    parameters: list[Any] = list(model.parameters())
    expected = [parameter.grad.clone() for parameter in parameters]
    model.zero_grad()
    loss = torch.compile(model, backend=backend)(x).square().sum()
    with remote(client, min_bytes=0) as mode:
        loss.backward()
    assert mode.summary().sent == 1
    for parameter, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, other, rtol=1e-3, atol=1e-4)


def test_channels_last(client: Client) -> None:
    x = torch.randn(2, 8, 5, 4).to(memory_format=torch.channels_last).requires_grad_()
    loss = (F.group_norm(x, 4) * torch.randn(2, 8, 5, 4)).sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    with remote(client, min_bytes=0) as mode:
        loss.backward()
    assert mode.summary().sent == 1
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("x_shape", "grid_shape"), [((0, 2, 4, 4), (0, 3, 3, 2)), ((2, 2, 4, 4), (2, 0, 3, 2))]
)
def test_nothing_to_sample(client: Client, x_shape: Any, grid_shape: Any) -> None:
    x, grid = torch.randn(x_shape, requires_grad=True), torch.zeros(grid_shape, requires_grad=True)
    with remote(client, min_bytes=0):
        F.grid_sample(x, grid, align_corners=False).sum().backward()
    assert (x.grad.shape, grid.grad.shape) == (x.shape, grid.shape)
    assert not x.grad.any()


def test_a_batch_of_none(client: Client) -> None:
    x, weight = torch.randn(0, 8, 5, requires_grad=True), torch.ones(8, requires_grad=True)
    with remote(client, min_bytes=0):
        F.group_norm(x, 4, weight).sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros(8))


def test_many_gradients_at_once(client: Client) -> None:
    x = torch.randn(2, 8, 5, requires_grad=True)
    y, upstream = F.group_norm(x, 4), torch.randn(3, 2, 8, 5)
    (expected,) = torch.autograd.grad(y, x, upstream, is_grads_batched=True, retain_graph=True)
    with remote(client, min_bytes=0) as mode:
        (got,) = torch.autograd.grad(y, x, upstream, is_grads_batched=True)
    assert mode.summary().sent == 3
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_may_be_changed_in_place(client: Client) -> None:
    x, loss = loss_of_grid_sample()
    x.register_hook(lambda grad: grad.mul_(2))
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    with remote(client, min_bytes=0):
        loss.backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)
    x.grad.add_(1)


def test_transforms_of_torch_func(client: Client) -> None:
    """The gradient of sampling is sent, also under vmap; the attentions say that they cannot."""
    x, grid = torch.randn(3, 2, 8, 5, 5), torch.rand(3, 2, 3, 3, 2) - 0.5

    def loss(image: Any, where: Any) -> Any:
        return F.grid_sample(image, where, align_corners=False).pow(3).sum()

    expected = torch.vmap(torch.func.grad(loss))(x, grid)
    with remote(client, min_bytes=0) as mode:
        got = torch.vmap(torch.func.grad(loss))(x, grid)
    assert mode.summary().sent == 1
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    value, *others = (tensor.detach() for tensor in operands())
    with pytest.raises(RuntimeError, match=r"autograd.Function with functorch transforms"):
        torch.func.grad(lambda v: multi_scale_deformable_attention(v, *others, client=client).sum())(value)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept_or_sent(client: Client, context: Any) -> None:
    with remote(client, min_bytes=0) as mode, context():
        assert not F.group_norm(torch.randn(2, 8, 5, requires_grad=True), 4).requires_grad
        assert not multi_scale_deformable_attention(*operands(), client=client).requires_grad
    assert mode.summary().rows == ()


def test_leaving_it_in_a_thread_that_did_not_enter_it_is_told_and_the_one_that_did_still_can() -> None:
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            mode.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(error)

    with Client("localhost:1") as client:
        mode = remote(client)
        with mode:
            thread = threading.Thread(target=leave)
            thread.start()
            thread.join(30)
    assert [str(error) for error in errors] == ["remote: this thread has not entered it"]
    assert _get_current_dispatch_mode() is None
