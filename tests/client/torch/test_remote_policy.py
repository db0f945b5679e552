"""`remote`: types, what stays here and why, and what happens when the service fails."""

from __future__ import annotations

import importlib
import linecache
import os
import re
import signal
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.client.torch.agreement import Golden
from tests.client.torch.models import Transformer, loss_of_grid_sample, loss_of_group_norm
from tests.client.torch.test_attentions import operands
from tests.fix_server import ServerProcess, StartServer
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from npugrad_client import (
    AsyncClient,
    Client,
    ConnectError,
    DeadlineExceeded,
    InvalidOperand,
    RetryPolicy,
)
from npugrad_client.torch import (
    RemoteWarning,
    drop_in,
    fused_floyd_attention,
    multi_scale_deformable_attention,
    remote,
)

pytestmark = pytest.mark.torch
Tensor = Any  # with its own type, each `grad` would have to be shown not to be None
NOWHERE = "127.0.0.1:1"
LATER_MS = 60_000


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_mixed_types_travel_as_float32_and_come_back(client: Client, low: Any) -> None:
    x = torch.randn(2, 8, 6, dtype=low, requires_grad=True)
    w, b = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    with remote(client, min_bytes=0) as mode, Golden() as golden:
        F.group_norm(x, 4, w, b).float().square().sum().backward()
    assert (x.grad.dtype, w.grad.dtype, b.grad.dtype) == (low, torch.float32, torch.float32)
    assert golden.compared == mode.summary().as_float32 == mode.summary().sent == 1


def test_autocast(client: Client) -> None:
    """Around the forward pass, and around backward too."""
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
    with torch.autocast("cpu", dtype=torch.bfloat16), remote(client, min_bytes=0) as mode, Golden() as golden:
        model(x).float().square().sum().backward()
    assert golden.compared == mode.summary().sent == 3


REFUSED = {
    "double norm": (lambda: loss_of_group_norm(torch.float64), "group_norm_backward"),
    "double grid": (lambda: loss_of_grid_sample(torch.float64), "grid_sampler_2d_backward"),
    "bicubic": (lambda: loss_of_grid_sample(mode="bicubic"), "grid_sampler_2d_backward"),
}


@pytest.mark.parametrize(("make", "operator"), REFUSED.values(), ids=REFUSED)
def test_what_the_documents_refuse_runs_here_with_one_warning_or_none_or_is_an_error(
    client: Client, make: Any, operator: str
) -> None:
    mode = remote(client, min_bytes=0)
    x, loss = make()
    expected = torch.autograd.grad(loss, x, retain_graph=True)[0]
    told = f"^{operator} runs locally because .* refuses it: "
    with mode, pytest.warns(RemoteWarning, match=told) as said:
        [each.backward() for each in (loss, make()[1])]
    assert len(said) == 1
    assert torch.equal(x.grad, expected)
    (row,) = mode.summary().rows
    assert (row.operator, row.is_sent, row.calls) == (operator, False, 2)
    assert "expected" in row.why
    with remote(client, min_bytes=0, on_refused="local") as mode:
        make()[1].backward()
    assert [(row.operator, row.is_sent) for row in mode.summary().rows] == [(operator, False)]
    with remote(client, min_bytes=0, on_refused="raise") as mode:
        with pytest.raises(InvalidOperand, match=f"^{operator}: "):
            make()[1].backward()
        loss_of_group_norm()[1].backward()  # and goes on
    assert mode.summary().sent == 1


TensorClass: Any = torch.Tensor


class Mine(TensorClass):  # type: ignore[misc]
    """A subclass that does nothing of its own."""


class Wrapped(TensorClass):  # type: ignore[misc]
    """One that says what it is when it computes, as those with ideas of their own do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(cls) if type(out) is torch.Tensor else out


def subclassed(cls: Any) -> Any:
    x = torch.randn(2, 8, 5, requires_grad=True)
    F.group_norm(x.as_subclass(cls), 4).square().sum().backward()
    return x.grad


@pytest.mark.parametrize("cls", [Mine, Wrapped])
def test_subclasses_of_tensors_stay_here_and_are_told_once_or_are_an_error(client: Client, cls: Any) -> None:
    told = f"group_norm_backward runs locally .*found a {cls.__name__}; expected a dense array in CPU memory"
    with remote(client, min_bytes=0) as mode, pytest.warns(RemoteWarning, match=told) as said:
        assert not any(subclassed(cls) is None for _ in range(2))
    assert len(said) == 1
    assert [(row.is_sent, row.why, row.calls) for row in mode.summary().rows] == [
        (False, "not dense CPU tensors", 2)
    ]
    found = pytest.raises(TypeError, match=f"found a {cls.__name__}")
    with remote(client, min_bytes=0, on_refused="raise"), found:
        subclassed(cls)


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_an_operator_called_with_sparse_or_quantised_tensors_runs_as_without(client: Client) -> None:
    """PyTorch has no such kernels; its own error comes out, after one warning of ours."""
    grad, mean = torch.randn(2, 8, 5), torch.zeros(2, 4)
    quantised = torch.quantize_per_tensor(grad, 0.1, 0, torch.qint8)
    for odd, told in ((grad.to_sparse(), "torch.sparse_coo"), (quantised, "torch.qint8")):
        arguments: Any = (grad, odd, mean, mean, None, 2, 8, 5, 4, [True, False, False])
        failing = pytest.raises((RuntimeError, NotImplementedError))
        told_once = pytest.warns(RemoteWarning, match=f"input: found .*{told}")
        with remote(client, min_bytes=0), told_once, failing:
            torch.ops.aten.native_group_norm_backward(*arguments)


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
        with pytest.warns(RemoteWarning, match="group_norm_backward runs locally because ") as said:
            got = second(x.clone(), mode)
        # The gradient's own gradient goes through mean and rstd, which autograd takes apart once more.
        whys = ["it is decomposed for a gradient of mean or rstd", "it is decomposed for create_graph=True"]
        assert [(row.is_sent, row.why, row.calls) for row in mode.summary().rows] == [
            (False, w, 1) for w in whys
        ]
        assert len(said) == 2
    else:
        got = second(x.clone(), mode)
        assert mode.summary().sent >= 1
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("function", [partial(F.group_norm, num_groups=4), F.silu])
def test_what_is_taken_apart_is_told_by_the_inner_one_alone(client: Client, function: Any) -> None:
    x = torch.randn(2, 8, 5, requires_grad=True)
    told = pytest.warns(RemoteWarning, match="it is decomposed for create_graph=True")
    with told as said, remote(client, min_bytes=0) as outer, remote(client, min_bytes=0) as inner:
        torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
    assert len(said) == 1
    assert (outer.summary().local, inner.summary().local) == (0, 1)


# ---------------------------------------------------------------------------------- the line of a warning


def _backward(mode: Any, make: Any) -> None:
    loss = make()[1]
    with mode:
        loss.backward()


def _decorated(mode: Any, make: Any) -> None:
    @mode  # type: ignore[untyped-decorator, unused-ignore]
    def step() -> None:
        make()[1].backward()

    step()


def _create_graph(mode: Any, make: Any) -> None:
    x, loss = make()
    with mode:
        torch.autograd.grad(loss.square(), x, create_graph=True)[0].sum().backward()


def _statistics(mode: Any, make: Any) -> None:
    x = make()[0]
    mean = torch.native_group_norm(x, None, None, 2, 8, 20, 4, 1e-5)[1]
    with mode:
        mean.sum().backward()


def _checkpointed(mode: Any, make: Any) -> None:
    x = make()[0]
    loss = checkpoint(lambda x: F.group_norm(x, 4).square().sum(), x, use_reentrant=True)
    with mode:
        loss.backward()


def _direct(mode: Any, make: Any) -> None:
    grad, mask = make()[0].detach(), [True, False, False]
    with mode:
        torch.ops.aten.native_group_norm_backward(  # as no backward() does
            grad, grad, grad[0, :2, 0], grad[0, :2, 0], None, 2, 8, 20, 4, mask
        )


WARNED = {
    **{name: (_backward, make) for name, (make, _) in REFUSED.items()},
    "decorated": (_decorated, REFUSED["bicubic"][0]),
    "checkpointed": (_checkpointed, REFUSED["double norm"][0]),
    "direct": (_direct, REFUSED["double norm"][0]),
    "create_graph": (_create_graph, loss_of_group_norm),
    "statistics": (_statistics, loss_of_group_norm),
    "service failed": (_backward, loss_of_group_norm),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_warning_names_the_line_of_the_caller(client: Client, name: str) -> None:
    run, make = WARNED[name]
    with (
        Client(NOWHERE, retry=None) as dead,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        run(remote(dead if name == "service failed" else client, min_bytes=0, on_error="local"), make)
    told = [each for each in said if each.category is RemoteWarning]
    assert told
    for each in told:
        assert each.filename == __file__
        assert "backward(" in linecache.getline(each.filename, each.lineno), each.lineno


def test_a_warning_is_told_by_the_filter_of_the_callers_module(client: Client) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=RemoteWarning, module=re.escape(__name__))
        with pytest.raises(RemoteWarning, match="refuses it"):
            _backward(remote(client, min_bytes=0), REFUSED["bicubic"][0])


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


def test_a_failure_of_the_service_comes_out_of_backward_or_the_call_runs_here() -> None:
    x, loss = loss_of_group_norm()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    with Client(NOWHERE, retry=None) as dead:
        with remote(dead, min_bytes=0), pytest.raises(ConnectError, match="cannot reach"):
            loss.backward(retain_graph=True)
        assert [x.grad] == [None]
        loss_of_group_norm()[1].backward()  # autograd is as it was
        mode = remote(dead, min_bytes=0, on_error="local")
        with mode, pytest.warns(RemoteWarning, match="because the service failed: .*cannot reach") as said:
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


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"on_refused": "ignore"}, "on_refused: found 'ignore'; expected '.*' or '"),
        ({"on_error": "ignore"}, "on_error: found 'ignore'; expected '.*' or '"),
        ({"policy": "fast"}, "policy: found 'fast'; expected 'always' or 'faster'$"),
        ({"min_bytes": -1}, "min_bytes: found -1; expected 0 or more$"),
    ],
)
def test_a_policy_that_there_is_not(client: Client, policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^remote: {message}"):
        remote(client, **policy)


def test_the_summary_is_a_table(client: Client) -> None:
    with remote(client, min_bytes=0) as mode:
        loss_of_group_norm()[1].backward()
        F.group_norm(
            torch.randn(1, 4, 4, dtype=torch.bfloat16, requires_grad=True), 2, torch.ones(4)
        ).sum().backward()
    lines = str(mode.summary()).partition("\n\n")[0].splitlines()
    assert lines[0].split() == ["operator", "where", "why", "calls", "MiB", "seconds"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["group_norm_backward", "sent", "-", "1"],
        ["group_norm_backward", "sent", "as", "float32"],
    ]
    row = mode.summary().rows[0]
    assert row.bytes >= 3 * 320 * 4
    assert row.seconds > 0


# ------------------------------------------------------------------------------------------- mishaps


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


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (ServerProcess.kill, pytest.raises(ConnectError, match="group_norm_backward: ")),
        (lambda _: os.kill(os.getpid(), signal.SIGINT), pytest.raises(KeyboardInterrupt)),
    ],
    ids=["a killed service", "an interrupt"],
)
def test_what_ends_backward_comes_out_of_it_and_the_process_goes_on(
    start_server: StartServer, act: Any, error: Any
) -> None:
    server = start_server(devices=f"test:1?ms={LATER_MS}", check_end=False)
    with Client(server.address, timeout_s=60, retry=RetryPolicy(retry_for_s=0)) as client:
        x, loss = loss_of_group_norm()
        watcher = when_running(server, lambda: act(server))
        with error, remote(client, min_bytes=0):
            loss.backward(retain_graph=True)
        watcher.join(60)
    assert _get_current_dispatch_mode() is None
    assert [x.grad] == [None]
    loss.backward()  # the same graph, here
    assert x.grad.abs().sum() > 0


def test_an_exception_inside_or_of_a_hook_comes_out_and_leaves_nothing_entered(client: Client) -> None:
    mode = remote(client, min_bytes=0)
    with pytest.raises(KeyError), mode, mode:
        raise KeyError("of the caller")
    assert _get_current_dispatch_mode() is None
    x, loss = loss_of_group_norm()
    loss.backward(retain_graph=True)
    assert mode.summary().rows == ()

    def hook(_: Any) -> None:
        raise LookupError("of the hook")

    x.register_hook(hook)
    with mode, pytest.raises(LookupError, match="of the hook"):
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
    floyd = [torch.empty(1, 1, 16, 128, 32)] * 5
    ways: dict[Any, list[Any]] = {multi_scale_deformable_attention: operands(), fused_floyd_attention: floyd}
    for way, call in {remote: [], drop_in: [], **ways}.items():
        message = f"^{way.__name__}: client: found {type(wrong).__name__}; expected a Client"
        with pytest.raises(TypeError, match=message):
            way(*call, client=wrong)


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
