"""`remote`: what is sent of an unmodified model's backward pass, what stays, and that nobody can tell."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from tests.client.torch.agreement import Golden, assert_close  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from npugrad_client import Client, ConnectError, DeadlineExceeded, InvalidOperand  # noqa: E402
from npugrad_client.torch import RemoteWarning, Summary, remote  # noqa: E402

pytestmark = pytest.mark.torch
Tensor = Any  # with its own type, each `grad` would have to be shown not to be None
NOWHERE = "127.0.0.1:1"


class Transformer(nn.Module):
    """A spatial transformer with a normalised trunk: both operators in one backward pass."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.Tanh())
        self.locate = nn.Linear(channels, 6)
        self.head = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Any:
        features = self.trunk(x)
        theta = self.locate(features.mean((2, 3))).reshape(-1, 2, 3) * 0.3 + torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(theta, [x.shape[0], 3, 9, 7], align_corners=False)
        return self.head(F.grid_sample(features, grid, align_corners=False))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of input and parameters of a fixed loss."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weights).sum().backward()
    return [tensor.grad.clone() for tensor in (x, *model.parameters())]  # `double()` converts them


def loss_of_group_norm(dtype: Any = torch.float32, **kwargs: Any) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 8, 5, 4, dtype=dtype, requires_grad=True)
    return x, (F.group_norm(x, 4, **kwargs) * torch.linspace(-1, 1, 20).reshape(5, 4).to(dtype)).sum()


def loss_of_grid_sample(dtype: Any = torch.float32, mode: str = "bilinear") -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 3, 6, 5, dtype=dtype, requires_grad=True)
    grid = (torch.rand(2, 4, 3, 2) * 2.4 - 1.2).to(dtype).requires_grad_()
    return x, F.grid_sample(x, grid, mode=mode, align_corners=False).square().sum()


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


# ------------------------------------------------------------------------------------------------ types


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_mixed_types_travel_as_float32_and_come_back(client: Client, low: Any) -> None:
    x = torch.randn(2, 8, 6, dtype=low, requires_grad=True)
    w, b = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        F.group_norm(x, 4, w, b).float().square().sum().backward()
    assert (x.grad.dtype, w.grad.dtype, b.grad.dtype) == (low, torch.float32, torch.float32)
    assert golden.compared == mode.summary().as_float32 == mode.summary().sent == 1


def test_autocast(client: Client) -> None:
    model, x = Transformer(), torch.randn(2, 3, 9, 7)
    out: list[Any] = []
    for context in (remote(client, min_bytes=2**40), remote(client, min_bytes=0)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
        with context as mode, Golden() as golden:
            loss.backward()
        out.append([parameter.grad for parameter in model.parameters()])
    assert golden.compared == mode.summary().sent == 3
    assert mode.summary().as_float32 >= 1
    for one, other in zip(*out, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def test_autocast_around_backward_too(client: Client) -> None:
    model, x = Transformer(), torch.randn(2, 3, 9, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16), remote(client, min_bytes=0) as mode, Golden() as golden:
        model(x).float().square().sum().backward()
    assert golden.compared == mode.summary().sent == 3


REFUSED = {
    "double norm": (lambda: loss_of_group_norm(torch.float64), "group_norm_backward"),
    "double grid": (lambda: loss_of_grid_sample(torch.float64), "grid_sampler_2d_backward"),
    "bicubic": (lambda: loss_of_grid_sample(mode="bicubic"), "grid_sampler_2d_backward"),
    "volume": (
        lambda: (
            x := torch.randn(1, 2, 3, 4, 5, requires_grad=True),
            F.grid_sample(x, torch.rand(1, 2, 2, 2, 3), align_corners=False).square().sum(),
        ),
        "grid_sampler_3d_backward",
    ),
}


@pytest.mark.parametrize(("make", "operator"), REFUSED.values(), ids=REFUSED)
def test_what_the_documents_refuse_runs_here_with_one_warning(
    client: Client, make: Any, operator: str
) -> None:
    mode = remote(client, min_bytes=0)
    x, loss = make()
    expected = torch.autograd.grad(loss, x, retain_graph=True)[0]
    with mode, pytest.warns(RemoteWarning, match=f"^{operator} runs here, .* does not take it: ") as said:
        [each.backward() for each in (loss, make()[1])]
    assert len(said) == 1
    assert torch.equal(x.grad, expected)
    (row,) = mode.summary().rows
    assert (row.operator, row.is_sent, row.calls) == (operator, False, 2)
    assert "expected" in row.why


@pytest.mark.parametrize(("make", "operator"), REFUSED.values(), ids=REFUSED)
def test_or_raises_the_documented_error_out_of_backward(client: Client, make: Any, operator: str) -> None:
    with remote(client, min_bytes=0, on_refused="raise") as mode:
        with pytest.raises(InvalidOperand, match=f"^{operator}: "):
            make()[1].backward()
        loss_of_group_norm()[1].backward()  # and goes on
    assert mode.summary().sent == 1


def test_subclasses_of_tensors_stay_here(client: Client) -> None:
    base: Any = torch.Tensor

    class Mine(base):  # type: ignore[misc]
        pass

    x = torch.randn(2, 8, 5).as_subclass(Mine).requires_grad_()
    with remote(client, min_bytes=0) as mode:
        F.group_norm(x, 4).square().sum().backward()
    assert x.grad is not None
    assert [row.why for row in mode.summary().rows if not row.is_sent] in ([], ["no plain CPU tensors"])


# ------------------------------------------------------------------------------------- gradients of gradients


@pytest.mark.parametrize("name", ["norm", "grid"])
def test_create_graph_keeps_values_right(client: Client, name: str) -> None:
    w = torch.randn(8)
    grid = torch.rand(2, 4, 3, 2) - 0.5

    def second(x: Tensor, context: Any) -> tuple[Any, Any]:
        x = x.requires_grad_()
        y = F.group_norm(x, 4, w) if name == "norm" else F.grid_sample(x, grid, align_corners=False)
        with context:
            (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
            (again,) = torch.autograd.grad(first.pow(2).sum(), x)
        return first, again

    x = torch.randn(2, 8, 5, 4)
    expected = second(x.clone(), warnings.catch_warnings())
    mode = remote(client, min_bytes=0)
    if name == "norm":
        with pytest.warns(RemoteWarning, match="group_norm_backward runs here, as ") as said:
            got = second(x.clone(), mode)
        # The gradient's own gradient goes through mean and rstd, which autograd takes apart once more.
        whys = ["a gradient of mean or rstd takes it apart", "create_graph=True takes it apart"]
        assert [(row.is_sent, row.why, row.calls) for row in mode.summary().rows] == [
            (False, w, 1) for w in whys
        ]
        assert len(said) == 2
    else:
        got = second(x.clone(), mode)
        assert mode.summary().sent >= 1
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------ policy


def test_small_calls_stay_here_without_a_word(client: Client) -> None:
    with remote(client) as mode:
        loss_of_group_norm()[1].backward()
        loss_of_grid_sample(torch.float64)[1].backward()
        x = torch.randn(2, 32, 64, 64, requires_grad=True)
        F.group_norm(x, 4).square().sum().backward()
    assert [(r.is_sent, r.why, r.calls) for r in mode.summary().rows] == [
        (False, "smaller than min_bytes", 1),
        (True, "", 1),
        (False, "smaller than min_bytes", 1),
    ]


def test_a_failure_of_the_service_comes_out_of_backward() -> None:
    with Client(NOWHERE, timeout_s=20) as dead:
        x, loss = loss_of_group_norm()
        with remote(dead, min_bytes=0), pytest.raises(ConnectError, match="cannot reach"):
            loss.backward()
    assert x.grad is None
    loss_of_group_norm()[1].backward()  # autograd is as it was


def test_or_the_call_runs_here_and_is_counted() -> None:
    x, loss = loss_of_group_norm()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    with Client(NOWHERE, timeout_s=20) as dead:
        mode = remote(dead, min_bytes=0, on_error="local")
        with mode, pytest.warns(RemoteWarning, match="as the service failed: .*cannot reach") as said:
            [each.backward() for each in (loss, loss_of_group_norm()[1])]
    assert len(said) == 1
    assert torch.equal(x.grad, expected)
    assert (mode.summary().sent, mode.summary().failed) == (0, 2)
    assert mode.summary().rows[0].why == "service failed: ConnectError"


def test_options_reach_the_service(client: Client) -> None:
    with remote(client, min_bytes=0, verify=True, priority=3, label="run", deterministic=True) as mode:
        loss_of_group_norm()[1].backward()
    assert mode.summary().sent == 1
    with remote(client, min_bytes=0, timeout_s=1e-9), pytest.raises(DeadlineExceeded):
        loss_of_group_norm()[1].backward()


@pytest.mark.parametrize("policy", [{"on_refused": "warn"}, {"on_error": "ignore"}])
def test_a_policy_that_there_is_not(client: Client, policy: dict[str, Any]) -> None:
    (name,) = policy
    with pytest.raises(ValueError, match=f"^remote: {name}: found '.*'; expected '.*' or '"):
        remote(client, **policy)


def test_the_summary_is_a_table(client: Client) -> None:
    with remote(client, min_bytes=0) as mode:
        loss_of_group_norm()[1].backward()
        F.group_norm(
            torch.randn(1, 4, 4, dtype=torch.bfloat16, requires_grad=True), 2, torch.ones(4)
        ).sum().backward()
    lines = str(mode.summary()).splitlines()
    assert lines[0].split() == ["operator", "where", "why", "calls", "MiB", "seconds"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["group_norm_backward", "sent", "-", "1"],
        ["group_norm_backward", "sent", "as", "float32"],
    ]
    row = mode.summary().rows[0]
    assert row.bytes >= 3 * 320 * 4
    assert row.seconds > 0


# ------------------------------------------------------------------------------------------------ gradcheck


FLOAT32_IS_MEANT = pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")


@FLOAT32_IS_MEANT
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
def test_gradcheck_of_grid_sample(client: Client, padding_mode: str) -> None:
    x = torch.randn(1, 2, 4, 5, requires_grad=True)
    # Mid-cell points: within the step of the check no sample crosses a pixel, where the gradient jumps.
    cells = torch.tensor([[0.5, 0.4], [1.45, 2.5], [3.4, 1.6], [2.5, 0.5]])
    grid = ((2 * cells + 1) / torch.tensor([5.0, 4.0]) - 1).reshape(1, 2, 2, 2).requires_grad_()

    def sample(a: Tensor, b: Tensor) -> Any:
        return F.grid_sample(a, b, padding_mode=padding_mode, align_corners=False)

    with remote(client, min_bytes=0, on_refused="raise") as mode:
        assert torch.autograd.gradcheck(
            sample, (x, grid), eps=1e-2, atol=2e-3, rtol=1e-2, fast_mode=True, check_batched_grad=False
        )
    assert mode.summary().sent > 0
    assert mode.summary().local == 0


@FLOAT32_IS_MEANT
def test_gradcheck_of_group_norm(client: Client) -> None:
    x = torch.randn(2, 4, 6, requires_grad=True)
    w, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)

    def norm(*operands: Tensor) -> Any:
        return F.group_norm(operands[0], 2, operands[1], operands[2])

    with remote(client, min_bytes=0, on_refused="raise") as mode:
        assert torch.autograd.gradcheck(norm, (x, w, b), eps=1e-2, atol=2e-3, rtol=1e-2, fast_mode=True)
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


def test_unpacking_and_hooks_inside_a_node_are_not_taken_for_anything_else(client: Client) -> None:
    x = torch.randn(2, 8, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t / 2, t.dtype), lambda p: (p[0] * 2).to(p[1])):
        y = F.group_norm(x, 4)
    y.register_hook(lambda grad: grad * 3)
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        y.square().sum().backward()
    assert golden.compared == mode.summary().sent == 1
    assert mode.summary().local == 0
