"""`remote`: what is sent of an unmodified model's backward pass, and that nobody can tell."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.client.torch.agreement import Golden
from tests.client.torch.models import (
    Transformer,
    gradients,
    loss_of_grid_sample,
    loss_of_group_norm,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from npugrad_client import Client
from npugrad_client.torch import RemoteWarning, Summary, remote

pytestmark = pytest.mark.torch
Tensor = Any  # with its own type, each `grad` would have to be shown not to be None


def test_an_unmodified_model_gets_its_gradients_from_the_service(client: Client) -> None:
    model, x = Transformer(), torch.randn(2, 3, 9, 7)
    expected = gradients(model.double(), x.double())
    model.float()
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        got = gradients(model, x)
    assert golden.compared == 3
    for one, other in zip(got, expected, strict=True):
        # The whole model in float32 against the whole model in float64; each operator was held to less.
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-5)
    sent = {row.operator: row.calls for row in mode.summary().rows if row.is_sent}
    assert sent == {"grid_sampler_2d_backward": 1, "group_norm_backward": 2}
    assert mode.summary().local == 0


def test_nothing_is_sent_after_it(client: Client) -> None:
    with remote(client, min_bytes=0) as mode:
        pass
    loss_of_group_norm()[1].backward()
    assert mode.summary() == Summary(())


def test_a_call_is_validated_once_and_one_like_it_not_at_all(client: Client) -> None:
    entered: list[str] = []

    def note(frame: Any, event: str, arg: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    with Client(client.target) as fresh, remote(fresh, min_bytes=0) as mode:
        for expected in (1, 0):
            loss = loss_of_group_norm(weight=torch.randn(8))[1]
            sys.setprofile(note)
            loss.backward()
            sys.setprofile(None)
            assert entered.count("validate_call") == expected
            entered.clear()
    assert mode.summary().sent == 2


@pytest.mark.parametrize(("operator", "frames"), [(torch.add, 1), (torch.sub, 1), (torch.mul, 2)])
def test_an_operator_that_is_none_of_ours_costs_a_frame_or_two(
    client: Client, operator: Any, frames: int
) -> None:
    """What is left of the time is that of PyTorch's own dispatch; the frames can be counted."""
    entered: list[str] = []
    x = torch.randn(8)

    def note(frame: Any, event: str, arg: object) -> None:
        if event == "call" and "npugrad_client" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_name)

    with remote(client):
        operator(x, x)  # what is imported or compiled at first is none of it
        gc.disable()  # nor is what it would call for clients of other tests
        sys.setprofile(note)
        operator(x, x)
        sys.setprofile(None)
        gc.enable()
    assert len(entered) == frames, entered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_volumes_are_sent(client: Client, mode: str, dtype: Any) -> None:
    x, grid = torch.randn(2, 3, 4, 5, 6, dtype=dtype), torch.rand(2, 3, 4, 2, 3, dtype=dtype) * 2.4 - 1.2
    leaves = [x.requires_grad_(), grid.requires_grad_()]
    with remote(client, min_bytes=0) as sending, Golden() as golden:
        F.grid_sample(x, grid, mode, "border", align_corners=True).square().sum().backward()
    assert golden.compared == sending.summary().sent == 1
    assert [leaf.grad.dtype for leaf in leaves] == [dtype, dtype]


@pytest.mark.parametrize("name", ["grid", "norm"])
def test_results_are_the_services_own(client: Client, name: str) -> None:
    """Not something close that was computed here: bit for bit what the client's method gives."""
    seen: list[Any] = []

    class Spy(Golden):
        def _compare(self, func: Any, args: Any, got: Any) -> None:
            seen.append((args, got))

    _, loss = loss_of_grid_sample() if name == "grid" else loss_of_group_norm(weight=torch.randn(8))
    with remote(client, min_bytes=0), Spy():
        loss.backward()
    ((args, got),) = seen
    if name == "grid":
        grads = client.grid_sampler_2d_backward(
            grad_output=args[0], input=args[1], grid=args[2], interpolation_mode=args[3],
            padding_mode=args[4], align_corners=args[5], output_mask=args[6],
        )  # fmt: skip
        assert torch.equal(got[0], grads.input_grad)
        assert torch.equal(got[1], grads.grid_grad)
    else:
        normed = client.group_norm_backward(
            grad_out=args[0], input=args[1], mean=args[2], rstd=args[3], gamma=args[4],
            n=args[5], c=args[6], hxw=args[7], group=args[8], output_mask=args[9],
        )  # fmt: skip
        assert torch.equal(got[0], normed.grad_input)


@pytest.mark.parametrize(("x_needs", "w_needs", "b_needs"), [(1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 1)])
def test_only_wanted_gradients_come_back(client: Client, x_needs: int, w_needs: int, b_needs: int) -> None:
    x = torch.randn(2, 8, 6, requires_grad=bool(x_needs))
    w, b = torch.randn(8, requires_grad=bool(w_needs)), torch.randn(8, requires_grad=bool(b_needs))
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        F.group_norm(x, 2, w, b).square().sum().backward()
    assert golden.compared == mode.summary().sent == 1
    assert [t.grad is not None for t in (x, w, b)] == [bool(x_needs), bool(w_needs), bool(b_needs)]


@pytest.mark.parametrize("given", [(), ("weight",), ("bias",), ("weight", "bias")], ids="-".join)
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("data", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norm_is_sent_as_it_is(client: Client, data: Any, scale: Any, given: Any) -> None:
    if data is torch.float32 and scale is torch.bfloat16:
        pytest.skip("PyTorch refuses it")
    x = torch.randn(3, 4, 6, dtype=data, requires_grad=True)
    operands = {name: torch.randn(4, 6, dtype=scale, requires_grad=True) for name in given}
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        F.layer_norm(x, (4, 6), **operands).float().square().sum().backward()
    assert golden.compared == mode.summary().sent == 1
    assert mode.summary().as_float32 == mode.summary().local == 0
    for tensor in (x, *operands.values()):
        assert (tensor.grad.dtype, tensor.grad.shape) == (tensor.dtype, tensor.shape)


def test_the_layer_norms_of_an_encoder_are_sent(client: Client) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    expected = gradients(layer.double(), x.double())
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        got = gradients(layer.float(), x)
    assert golden.compared == mode.summary().sent == 2
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-5)


def test_the_gradient_of_a_layer_norm_s_gradient_is_autograd_s(client: Client) -> None:
    x = torch.randn(3, 6, requires_grad=True)
    found = []
    for least in (0, 2**40):
        with remote(client, min_bytes=least) as mode:
            (grad,) = torch.autograd.grad(F.layer_norm(x, (6,)).pow(3).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), x)[0])
        assert (mode.summary().sent > 0) is (least == 0)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_expanded_and_transposed_gradients_travel_as_they_are(client: Client) -> None:
    x, grid = torch.randn(2, 3, 6, 5, requires_grad=True), torch.rand(2, 4, 3, 2) - 0.5
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        F.grid_sample(x.permute(0, 1, 3, 2), grid, align_corners=True).sum().backward()
    assert golden.compared == mode.summary().sent == 1


def test_a_bias_without_a_weight_is_fine(client: Client) -> None:
    """PyTorch's own operator ends with an error here."""
    bias = torch.zeros(8, requires_grad=True)
    x = torch.randn(2, 8, 5)
    with remote(client, min_bytes=0):
        (F.group_norm(x, 4, None, bias) * 2).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((8,), 20.0))


# ------------------------------------------------------------------------------- hooks, checkpoints, nesting


def test_hooks_see_and_change_gradients_and_may_go_backward_themselves(client: Client) -> None:
    model, x = Transformer(), torch.randn(2, 3, 9, 7)
    expected = gradients(model, x)
    seen: list[str] = []

    def inner(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        with torch.enable_grad():
            loss_of_group_norm()[1].backward()
        seen.append(type(module).__name__)

    model.head.register_full_backward_hook(inner)
    trunk: Any = model.trunk
    trunk[1].weight.register_hook(lambda grad: grad * 3)
    with remote(client, min_bytes=0) as mode:
        got = gradients(model, x)
    assert seen == ["GroupNorm"]
    names = ["x", *(name for name, _ in model.named_parameters())]
    for name, one, other in zip(names, got, expected, strict=True):
        factor = 3 if name == "trunk.1.weight" else 1
        torch.testing.assert_close(one, other * factor, rtol=1e-3, atol=1e-4)
    assert mode.summary().sent == 4


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_checkpoints(client: Client, use_reentrant: bool, depth: int) -> None:
    model, x = Transformer(), torch.randn(2, 3, 9, 7)
    expected = gradients(model, x)

    def wrapped(run: Any) -> Any:
        return lambda value: checkpoint(run, value, use_reentrant=use_reentrant)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, value: Tensor) -> Any:
            run: Any = self.model
            for _ in range(depth):
                run = wrapped(run)
            return run(value)

    with remote(client, min_bytes=0) as mode, Golden() as golden:
        got = gradients(Checkpointed(), x)
    assert golden.compared == mode.summary().sent == 3
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_deep_reentrant_checkpoints_that_autograd_moves_to_another_thread(client: Client) -> None:
    """Beyond 60 levels the engine goes on in a thread of its own, with the state of the first."""
    x, weight = torch.randn(1, 8, 4, requires_grad=True), torch.randn(8)
    threads: set[int] = set()

    def nested(value: Tensor, depth: int) -> Any:
        if depth == 0:
            value.register_hook(lambda grad: threads.add(threading.get_ident()))
            return F.group_norm(value, 2, weight)
        return checkpoint(nested, value, depth - 1, use_reentrant=True)

    with remote(client, min_bytes=0) as mode, Golden() as golden:
        nested(x, 70).square().sum().backward()
    assert golden.compared == mode.summary().sent == 1
    assert threads != {threading.get_ident()}


def test_the_inner_one_decides_alone(client: Client) -> None:
    with remote(client, min_bytes=0) as outer:
        with remote(client, min_bytes=2**40) as keeps:
            loss_of_group_norm()[1].backward()
        with remote(client, min_bytes=0) as sends:
            loss_of_group_norm()[1].backward()
        assert outer.summary() == Summary(())
        loss_of_group_norm()[1].backward()
    assert (keeps.summary().sent, keeps.summary().local) == (0, 1)
    assert (sends.summary().sent, sends.summary().local) == (1, 0)
    assert (outer.summary().sent, outer.summary().local) == (1, 0)


def test_one_object_may_be_entered_again_inside_itself_and_later(client: Client) -> None:
    mode = remote(client, min_bytes=0)
    with mode, mode:
        loss_of_group_norm()[1].backward()
        with mode:
            loss_of_group_norm()[1].backward()
    with mode:
        loss_of_group_norm()[1].backward()
    assert mode.summary().sent == 3
    loss_of_group_norm()[1].backward()
    assert mode.summary().sent == 3


def test_as_a_decorator(client: Client) -> None:
    mode = remote(client, min_bytes=0)

    @mode
    def step() -> None:
        loss_of_group_norm()[1].backward()

    step()
    step()
    assert mode.summary().sent == 2


def test_every_thread_that_enters_it_and_no_other(client: Client) -> None:
    mode, barrier, failures = remote(client, min_bytes=0), threading.Barrier(5), []

    def work(enters: bool) -> None:
        try:
            model, x = Transformer(), torch.randn(1, 3, 9, 7)
            expected = gradients(model, x)
            barrier.wait(60)
            for _ in range(3):
                if enters:
                    with mode:
                        got = gradients(model, x)
                else:
                    got = gradients(model, x)
                for one, other in zip(got, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number < 4,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failures
    assert mode.summary().sent == 4 * 3 * 3


def test_other_dispatch_modes_beside_it(client: Client) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = Transformer(), torch.randn(1, 3, 9, 7)
    with FlopCounterMode(display=False) as outside, remote(client, min_bytes=0) as mode:
        gradients(model, x)
    with remote(client, min_bytes=0) as second, FlopCounterMode(display=False) as inside:
        gradients(model, x)
    assert mode.summary().sent == second.summary().sent == 3
    assert outside.get_total_flops() == inside.get_total_flops() > 0


def test_functional_transforms(client: Client) -> None:
    x, w = torch.randn(3, 2, 8, 5), torch.randn(8)

    def loss(sample: Tensor) -> Any:
        return F.group_norm(sample, 4, w).pow(3).sum()

    expected = torch.func.grad(loss)(x[0].double().float())
    with remote(client, min_bytes=0), warnings.catch_warnings():
        warnings.simplefilter("ignore", RemoteWarning)
        got = torch.func.grad(loss)(x[0])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_unpacking_and_hooks_inside_a_node_are_not_taken_for_anything_else(client: Client) -> None:
    x = torch.randn(2, 8, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t / 2, t.dtype), lambda p: (p[0] * 2).to(p[1])):
        y = F.group_norm(x, 4)
    y.register_hook(lambda grad: grad * 3)
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        y.square().sum().backward()
    assert golden.compared == mode.summary().sent == 1
    assert mode.summary().local == 0
