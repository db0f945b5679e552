"""`remote`: what is sent of an unmodified model's backward pass, and that nobody can tell."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.client.torch.agreement import Golden, assert_close
from tests.client.torch.models import Transformer, gradients, loss_of_grid_sample, loss_of_group_norm
from tests.client.torch.test_attentions import operands
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from npugrad import OPERATORS
from npugrad_client import Client
from npugrad_client._generated_ops import ATEN
from npugrad_client.torch import RemoteWarning, Summary, drop_in, multi_scale_deformable_attention, remote

pytestmark = pytest.mark.torch
Tensor = Any  # with its own type, each `grad` would have to be shown not to be None


def assert_near(got: Any, expected: Any, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    """Of gradients of whole models: each operator is held to less."""
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def test_an_unmodified_model_gets_its_gradients_from_the_service(client: Client) -> None:
    model, x = Transformer(), torch.randn(2, 3, 9, 7)
    expected = gradients(model.double(), x.double())
    model.float()
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        got = gradients(model, x)
    assert golden.compared == 3
    assert_near([each.double() for each in got], expected, atol=1e-5)
    sent = {row.operator: row.calls for row in mode.summary().rows if row.is_sent}
    assert sent == {"grid_sampler_2d_backward": 1, "group_norm_backward": 2}
    assert mode.summary().local == 0
    loss_of_group_norm()[1].backward()
    assert mode.summary().sent == 3, "and nothing after it"


@pytest.mark.parametrize("function", ATEN)
def test_each_function_that_a_record_names_is_sent_as_its_operator(client: Client, function: str) -> None:
    record = OPERATORS[ATEN[function]]
    call = record.build()
    contents = record.make_inputs(call, np.random.default_rng(5))
    tensors = {name: None if array is None else torch.from_numpy(array) for name, array in contents.items()}
    binding: Any = record.binding
    with remote(client, min_bytes=0) as mode:
        found = binding.call(torch.ops, {**tensors, **call.attrs})
    assert [(row.operator, row.is_sent, row.calls) for row in mode.summary().rows] == [(record.name, True, 1)]
    assert_near(found, binding.call(torch.ops, {**tensors, **call.attrs}))


LAYERS = {
    "silu_backward": nn.SiLU(),
    "gelu_backward_v2": nn.GELU("tanh"),
    "softmax_backward": nn.Softmax(1),
    "batch_norm_backward": nn.BatchNorm1d(4),
    "batch_norm_backward, evaluated": nn.BatchNorm1d(4).eval(),
    "batch_norm_backward, mixed": nn.BatchNorm1d(4),
    "batch_norm_backward, of instances": nn.InstanceNorm1d(4, affine=True),
    "embedding_dense_backward": nn.Embedding(5, 4),
    "embedding_dense_backward, padded": nn.Embedding(5, 4, padding_idx=1),
    "nll_loss_backward": nn.NLLLoss(),
    "nll_loss_backward, weighted": nn.NLLLoss(torch.rand(4), ignore_index=2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_new_operators_get_the_gradients_of_autograd(client: Client, name: str) -> None:
    layer, operator = LAYERS[name], name.split(",")[0]
    x = torch.randn(3, 4, 6, dtype=torch.bfloat16 if "mixed" in name else None, requires_grad=True)
    target = torch.randint(4, (3,))
    given = {"nll": (x[..., 0], target), "embedding": (target,)}.get(operator.split("_")[0], (x,))
    leaves = [*layer.parameters(), *([] if "embedding" in name else [x])]

    def backward() -> Any:
        out = layer(*given)
        return torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(0))

    with remote(client, min_bytes=0) as mode:
        found = backward()
    assert [(row.operator, row.is_sent, row.calls) for row in mode.summary().rows] == [(operator, True, 1)]
    expected = backward()
    assert [one.dtype for one in found] == [other.dtype for other in expected]
    assert_near(found, expected, *((0.02, 0.02) if "mixed" in name else ()))


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
    """What is left of the time is that of PyTorch's own dispatch; the frames can be counted.

    Those with which PyTorch would keep torch.compile out are twice as many.
    """
    entered: list[str] = []
    x = torch.randn(8)

    def note(frame: Any, event: str, arg: object) -> None:
        places = ("npugrad_client", "torch/_compile.py", "torch/_dynamo")
        if event == "call" and any(place in frame.f_code.co_filename for place in places):
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
    args = [each.detach() if isinstance(each, torch.Tensor) else each for each in args]
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
@pytest.mark.parametrize(
    ("data", "scale"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_layer_norm_is_sent_as_it_is(client: Client, data: Any, scale: Any, given: Any) -> None:
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
    assert_near([each.double() for each in got], expected, atol=1e-5)


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


# -------------------------------------------------------------------------------------------- in float64


def sampled(padding_mode: str) -> Any:
    """A sampler, and operands with mid-cell points: within the step of the check none crosses a pixel."""
    cells = torch.tensor([[0.5, 0.4], [1.45, 2.5], [3.4, 1.6], [2.5, 0.5]])
    grid = ((2 * cells + 1) / torch.tensor([5.0, 4.0]) - 1).reshape(1, 2, 2, 2)
    sample = partial(F.grid_sample, padding_mode=padding_mode, align_corners=False)
    return sample, (torch.randn(1, 2, 4, 5), grid)


def normed() -> Any:
    return lambda x, w, b: F.group_norm(x, 2, w, b), (torch.randn(2, 4, 6), torch.randn(4), torch.randn(4))


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
@pytest.mark.parametrize("name", ["zeros", "border", "reflection", "norm"])
def test_gradcheck(client: Client, name: str) -> None:
    function, operands = normed() if name == "norm" else sampled(name)
    leaves = tuple(operand.requires_grad_() for operand in operands)
    close: dict[str, Any] = {"eps": 1e-2, "atol": 2e-3, "rtol": 1e-2, "fast_mode": True}
    with remote(client, min_bytes=0, on_refused="raise") as mode:
        assert torch.autograd.gradcheck(function, leaves, **close)
    assert mode.summary().sent > 0
    assert mode.summary().local == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_models_against_float64(client: Client, seed: int) -> None:
    """Each gradient within the project's tolerance of the whole model in float64."""
    torch.manual_seed(seed)
    channels = 4 * int(torch.randint(1, 5, ()))
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 1)]
    for _ in range(int(torch.randint(1, 3, ()))):
        layers += [nn.GroupNorm(4, channels), nn.Softplus(), nn.Conv2d(channels, channels, 1)]
    model, padding = nn.Sequential(*layers), ("zeros", "border", "reflection")[seed % 3]
    # Points well inside cells of the 6 x 8 image: no kink near them.
    cells = torch.rand(2, 5, 4, 2) * 0.8 + 0.1 + torch.randint(0, 5, (2, 5, 4, 2))
    grid = (2 * cells + 1) / torch.tensor([8.0, 6.0]) - 1

    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.grid = nn.Parameter(grid)

        def forward(self, x: Tensor) -> Any:
            return F.grid_sample(self.model(x), self.grid, padding_mode=padding, align_corners=False)

    sampled, x = Sampled(), torch.randn(2, 3, 6, 8)
    with remote(client, min_bytes=0) as mode:
        got = gradients(sampled, x)
    assert mode.summary().sent == len([m for m in model if isinstance(m, nn.GroupNorm)]) + 1
    expected = gradients(sampled.double(), x.double())
    names = ["x", *(name for name, _ in sampled.named_parameters())]
    for name, one, other in zip(names, got, expected, strict=True):
        if name.endswith(".bias") and _is_normalised_away(sampled, name):
            continue  # exactly zero but for cancellation: there is nothing to be relative to
        assert_close(one, other, name, extra=1e-5 * float(other.abs().max()))


def _is_normalised_away(sampled: nn.Module, name: str) -> bool:
    """Whether a bias is followed by a normalisation over a single channel a group."""
    model: Any = sampled.model
    number = int(name.split(".")[1])
    after = model[number + 1] if number + 1 < len(model) else None
    return isinstance(after, nn.GroupNorm) and after.num_groups == after.num_channels


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

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, value: Tensor) -> Any:
            run: Any = self.model
            for _ in range(depth):
                run = partial(checkpoint, run, use_reentrant=use_reentrant)
            return run(value)

    with remote(client, min_bytes=0) as mode, Golden() as golden:
        got = gradients(Checkpointed(), x)
    assert golden.compared == mode.summary().sent == 3
    assert_near(got, expected)


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


def test_one_object_may_be_entered_again_inside_itself_and_later_and_is_a_decorator(client: Client) -> None:
    mode = remote(client, min_bytes=0)

    @mode
    def step() -> None:
        loss_of_group_norm()[1].backward()

    with mode, mode:
        loss_of_group_norm()[1].backward()
        with mode:
            loss_of_group_norm()[1].backward()
    step()
    step()
    assert mode.summary().sent == 4
    loss_of_group_norm()[1].backward()
    assert mode.summary().sent == 4


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
                assert_near(got, expected)
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


def test_unpacking_and_hooks_inside_a_node_are_not_taken_for_anything_else(client: Client) -> None:
    x = torch.randn(2, 8, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t / 2, t.dtype), lambda p: (p[0] * 2).to(p[1])):
        y = F.group_norm(x, 4)
    y.register_hook(lambda grad: grad * 3)
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        y.square().sum().backward()
    assert golden.compared == mode.summary().sent == 1
    assert mode.summary().local == 0


# ------------------------------------------------------------------------------------ unusual tensors


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.deep), "aot_eager"])
def test_compiled_models_that_keep_atens_operators_are_sent(client: Client, backend: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Tanh())
    x, parameters = torch.randn(2, 3, 6, 6), list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    loss = torch.compile(model, backend=backend)(x).square().sum()
    with remote(client, min_bytes=0) as mode:
        got = torch.autograd.grad(loss, parameters)
    assert mode.summary().sent == 1
    assert_near(got, expected)


def test_channels_last(client: Client) -> None:
    x = torch.randn(2, 8, 5, 4).to(memory_format=torch.channels_last).requires_grad_()
    loss = (F.group_norm(x, 4) * torch.randn(2, 8, 5, 4)).sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    with remote(client, min_bytes=0) as mode:
        loss.backward()
    assert mode.summary().sent == 1
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_nothing_to_sample_and_a_batch_of_none(client: Client) -> None:
    with remote(client, min_bytes=0):
        for x_shape, grid_shape in (((0, 2, 4, 4), (0, 3, 3, 2)), ((2, 2, 4, 4), (2, 0, 3, 2))):
            x: Any = torch.randn(x_shape, requires_grad=True)
            grid: Any = torch.zeros(grid_shape, requires_grad=True)
            F.grid_sample(x, grid, align_corners=False).sum().backward()
            assert (x.grad.shape, grid.grad.shape) == (x.shape, grid.shape)
            assert not x.grad.any()
        x, weight = torch.randn(0, 8, 5, requires_grad=True), torch.ones(8, requires_grad=True)
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
    """The gradient of sampling is sent, also under vmap; norms run here; the attentions say they cannot."""
    x, grid = torch.randn(3, 2, 8, 5, 5), torch.rand(3, 2, 3, 3, 2) - 0.5

    def loss(image: Any, where: Any) -> Any:
        return F.grid_sample(image, where, align_corners=False).pow(3).sum()

    expected = torch.vmap(torch.func.grad(loss))(x, grid)
    with remote(client, min_bytes=0) as mode:
        got = torch.vmap(torch.func.grad(loss))(x, grid)
    assert mode.summary().sent == 1
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    y, w = torch.randn(2, 8, 5), torch.randn(8)
    norm = torch.func.grad(lambda sample: F.group_norm(sample, 4, w).pow(3).sum())
    expected = norm(y)
    with remote(client, min_bytes=0), pytest.warns(RemoteWarning):
        torch.testing.assert_close(norm(y), expected, rtol=1e-3, atol=1e-4)
    value, *others = (tensor.detach() for tensor in operands())
    with pytest.raises(RuntimeError, match=r"autograd.Function with functorch transforms"):
        torch.func.grad(lambda v: multi_scale_deformable_attention(v, *others, client=client).sum())(value)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept_or_sent(client: Client, context: Any) -> None:
    with remote(client, min_bytes=0) as mode, context():
        assert not F.group_norm(torch.randn(2, 8, 5, requires_grad=True), 4).requires_grad
        assert not multi_scale_deformable_attention(*operands(), client=client).requires_grad
    assert mode.summary().rows == ()


@pytest.mark.parametrize("on_refused", ["warn", "raise"])
def test_tensors_without_data_are_none_of_the_services_business(client: Client, on_refused: Any) -> None:
    mode = remote(client, min_bytes=0, on_refused=on_refused)
    x: Any = torch.randn(2, 8, 5, device="meta", requires_grad=True)
    with mode:
        F.group_norm(x, 4).square().sum().backward()
    assert x.grad.shape == x.shape
    for outer, inner in ((FakeTensorMode(), mode), (mode, FakeTensorMode())):
        with outer, inner:
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
