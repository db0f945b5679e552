"""Deformable attention of other libraries, recognised by `remote` and sent as one call."""

from __future__ import annotations

import functools
import threading
import warnings
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.client.torch.agreement import assert_close
from tests.client.torch.composed_attention import (
    FUNCTIONS,
    LEVELS,
    MMCV,
    NAMES,
    gradients,
    library,
    module,
    operands,
    transformers,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from npugrad_client import Client, ConnectError, RetryPolicy
from npugrad_client.torch import RemoteWarning, _recognised, register_deformable_attention, remote

pytestmark = pytest.mark.torch
FUSED, COMPOSED = "multi_scale_deformable_attention_grad", "grid_sampler_2d_backward"


def sent(mode: Any) -> dict[str, int]:
    return {row.operator: row.calls for row in mode.summary().rows if row.is_sent}


def is_fused(out: Any) -> bool:
    return "_AttentionBackward" in type(out.grad_fn).__name__


class Home:
    """A module with mmcv's function: called, it calls what the module has there now."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, *call: Any) -> Any:
        return self.function(*call)

    @property
    def function(self) -> Any:
        return vars(self.module)[MMCV[1]]

    @function.setter
    def function(self, other: Any) -> None:
        setattr(self.module, MMCV[1], other)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Home:
    """The library that most models have."""
    return Home(library(monkeypatch))


def assert_all_close(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype
        assert_close(one, other.float())


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_a_known_function_is_sent_as_one_call(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str, function: str
) -> None:
    home = library(monkeypatch, name, function)
    # As a model's code has it: under its name, in a module of its own.
    user = module(monkeypatch, "some.model", f"import sys\n{function} = sys.modules[{name!r}].{function}")
    original, call = vars(home)[function], operands()
    with remote(client, min_bytes=0) as mode:
        out = vars(user)[function](*call)
        got = gradients(call, out)
        assert vars(home)[function] is vars(user)[function] is not original
    assert sent(mode) == {FUSED: 1}
    assert mode.summary().local == 0
    assert vars(home)[function] is vars(user)[function] is original
    expected = original(*call)
    assert_close(out.detach(), expected.detach())
    assert_all_close(got, gradients(call, expected))


def test_a_method_of_transformers_is_sent_as_one_call(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = transformers(monkeypatch).MultiScaleDeformableAttention
    original, layer = vars(kind)["forward"], kind()
    value, shapes, location, weight = plain = operands()
    call = (value, torch.tensor(shapes), shapes, torch.tensor([0, 63, 83]), location, weight, 64)
    with remote(client, min_bytes=0) as mode:
        got = gradients(plain, layer(*call))
    assert sent(mode) == {FUSED: 1}
    assert vars(kind)["forward"] is original
    assert_all_close(got, gradients(plain, layer(*call)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_the_service_and_the_formula_here_agree(client: Client, home: Home, dtype: Any, seed: int) -> None:
    call = operands(dtype, ch=8 * (seed + 1), nq=3 + 5 * seed, seed=seed)
    with remote(client, min_bytes=0) as mode:
        out = home(*call)
        there = gradients(call, out)
        again = home(*call)
    assert sent(mode) == {FUSED: 1}
    assert out.dtype is there[0].dtype is dtype
    assert_all_close(there, gradients(call, again))  # after it: by the operator's own kernel


def test_only_points_on_edges_may_get_another_gradient(client: Client, home: Home) -> None:
    call, original = operands(nq=64), home.function
    sizes = torch.tensor(LEVELS).flip(1)[:, None]
    pixels = (torch.randint(0, 8, call[2].shape) % sizes + 0.5) / sizes
    # Half of the points are on pixels, as all are in a Deformable-DETR that was not trained yet.
    is_pixel = (torch.rand(call[2].shape[:-1]) < 0.5).unsqueeze(-1)
    call[2] = torch.where(is_pixel, pixels, call[2].detach()).requires_grad_()
    with remote(client, min_bytes=0):
        out = home(*call)
        got = gradients(call, out)
        again = home(*call)
    formula, expected = gradients(call, again), gradients(call, original(*call))
    assert_all_close(got, formula)  # the operator's rule: no point differs
    assert_close(got[0], expected[0])  # continuous across edges, so the same by either rule
    assert_close(got[2], expected[2])
    differs = ((got[1] - expected[1]).abs() > 1e-4 * expected[1].abs().max()).any(-1)
    at = call[2].detach().double() * sizes - 0.5
    is_edge = ((at - at.round()).abs() <= 3 * 2**-24 * sizes).any(-1)
    assert 0 < int(differs.sum()) < int(is_edge.sum())  # by the rule of `grid_sample`: some points on edges
    assert not (differs & ~is_edge).any()


def test_without_fusing_each_level_is_a_call(client: Client, home: Home) -> None:
    call = operands()
    with remote(client, min_bytes=0, fused=False) as mode:
        gradients(call, home(*call))
    assert sent(mode) == {COMPOSED: len(LEVELS)}


def test_a_module_may_get_the_function_between_two_blocks(
    client: Client, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook does that imports it in a later cell."""
    user, call = module(monkeypatch, "some.notebook", "other = None"), operands()
    with remote(client, min_bytes=0):
        pass
    vars(user)[MMCV[1]] = home.function
    with remote(client, min_bytes=0):
        assert is_fused(vars(user)[MMCV[1]](*call))


def test_the_inner_remote_decides(client: Client, home: Home) -> None:
    call, original = operands(), home.function
    with remote(client, min_bytes=0):
        with remote(client, min_bytes=0, fused=False):
            assert not is_fused(home(*call))
            with remote(client, min_bytes=0):
                assert is_fused(home(*call))
        assert is_fused(home(*call))
    assert home.function is original


def test_other_threads_keep_the_function(client: Client, home: Home) -> None:
    call, original = operands(), home.function
    inside, seen, found = threading.Event(), threading.Event(), []

    def enter() -> None:
        with remote(client, min_bytes=0):
            inside.set()
            assert seen.wait(60)
            found.append(is_fused(home(*call)))

    thread = threading.Thread(target=enter)
    thread.start()
    assert inside.wait(60)
    assert home.function is not original
    assert not is_fused(home(*call))
    with remote(client, min_bytes=0):
        seen.set()
        thread.join()
        assert is_fused(home(*call))  # the other one's end undid nothing
    assert found == [True]
    assert home.function is original


def test_a_changed_signature_is_left_alone_and_told_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = "value, value_spatial_shapes, sampling_locations, attention_weights, scale=1"
    home, call = Home(library(monkeypatch, parameters=parameters)), operands()
    mode = remote(client, min_bytes=0)
    told = r"not replaced: its parameters are value, .* scale instead of value"
    with pytest.warns(RemoteWarning, match=told), mode:
        gradients(call, home(*call))
    with mode:  # and a second warning would be an error
        pass
    assert sent(mode) == {COMPOSED: len(LEVELS)}


def test_a_warning_that_is_an_error_leaves_nothing_entered(
    client: Client, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, parameters = "ultralytics.nn.modules.utils", "value, value_spatial_shapes, x"
    changed = Home(library(monkeypatch, name, parameters=parameters))
    original, before = home.function, changed.function
    with warnings.catch_warnings():
        warnings.simplefilter("error", RemoteWarning)
        with pytest.raises(RemoteWarning), remote(client):
            pass
    assert home.function is original
    assert changed.function is before
    assert not is_fused(original(*operands()))


def test_what_a_user_or_another_library_put_under_a_known_name_is_left_alone(
    client: Client, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, original = operands(), home.function
    home.function = wrapped = functools.wraps(original)(lambda *args: original(*args))
    with pytest.warns(RemoteWarning, match="not replaced"), remote(client, min_bytes=0):
        assert home.function is wrapped
    home.function = own = library(monkeypatch, "my.model", MMCV[1]).multi_scale_deformable_attn_pytorch
    mode = remote(client, min_bytes=0)
    with pytest.warns(RemoteWarning, match="not replaced: something else is in its place"):
        mode.__enter__()
    with mode:
        assert home.function is own
        gradients(call, own(*call))
    mode.__exit__(None, None, None)
    assert sent(mode) == {COMPOSED: len(LEVELS)}
    assert home.function is own


def test_what_is_patched_over_wins_and_nothing_of_it_is_undone(client: Client, home: Home) -> None:
    call, original = operands(), home.function
    with remote(client, min_bytes=0):
        kept = home.function
        home.function = theirs = functools.partial(original)
        assert not is_fused(home(*call))
    assert home.function is theirs
    home.function = kept  # they restore what they found
    assert not is_fused(kept(*call))
    with remote(client, min_bytes=0):
        assert is_fused(home(*call))
    assert home.function is original


def test_a_function_that_computes_something_else_is_left_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"def {MMCV[1]}({NAMES['parameters']}):\n    return 2 * value.flatten(2)[:, :11]"
    home, call = Home(module(monkeypatch, MMCV[0], source)), operands()
    with remote(client, min_bytes=0):
        with pytest.warns(RemoteWarning, match="its result differs from the operator.s"):
            home(*call)
        out = home(*call)
    assert torch.equal(out, 2 * call[0].flatten(2)[:, :11])


def test_a_call_too_small_to_send_stays_as_it_is(client: Client, home: Home) -> None:
    call = operands()
    with remote(client, min_bytes=2**20) as mode:
        out = home(*call)
        assert not is_fused(out)
        gradients(call, out)
    assert sent(mode) == {}


@pytest.mark.parametrize(("dtype", "ch"), [(torch.float32, 12), (torch.float64, 8)])
def test_what_the_operator_refuses_stays_as_it_is(client: Client, home: Home, dtype: Any, ch: int) -> None:
    call = operands(dtype, ch=ch)
    with remote(client, min_bytes=0) as mode:
        with pytest.warns(RemoteWarning, match=f"{FUSED} is not used"):
            out = home(*call)
        assert not is_fused(out)
        if dtype is torch.float32:
            gradients(call, out)
    assert sent(mode) == ({COMPOSED: len(LEVELS)} if dtype is torch.float32 else {})


def test_calls_that_make_no_gradient_stay_as_they_are(client: Client, home: Home) -> None:
    call = operands()
    with remote(client, min_bytes=0):
        with torch.no_grad():
            assert home(*call).grad_fn is None
        plain = (call[0].detach(), call[1], call[2].detach(), call[3].detach())
        assert home(*plain).grad_fn is None
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            home(*call[:3])
        with pytest.raises(RuntimeError, match="split"):
            home(call[0], [(3, 3)], *call[2:])


def test_autocast_gives_the_types_that_the_function_gives(client: Client, home: Home) -> None:
    call = operands()
    call[0] = call[0].detach().bfloat16().requires_grad_()
    original = home.function
    with torch.autocast("cpu", torch.bfloat16):
        expected = original(*call)
        with remote(client, min_bytes=0) as mode:
            out = home(*call)
            got = gradients(call, out)
    assert out.dtype is expected.dtype
    assert sent(mode) == {FUSED: 1}
    assert_all_close(got, gradients(call, expected))


@pytest.mark.parametrize("inside", ["forward", "backward", "both"])
@pytest.mark.parametrize(
    ("use_reentrant", "operators"), [(True, {FUSED: 1}), (False, {COMPOSED: len(LEVELS)})]
)
def test_under_a_checkpoint(
    client: Client, home: Home, use_reentrant: bool, operators: Any, inside: str
) -> None:
    value, shapes, location, weight = operands()
    call = (value, location, weight)

    def attend(value: Any, location: Any, weight: Any) -> Any:
        return home(value, shapes, location, weight)

    expected = torch.autograd.grad(attend(*call).square().sum(), call)
    mode = remote(client, min_bytes=0)
    with mode if inside != "backward" else nullcontext():
        loss = checkpoint(attend, *call, use_reentrant=use_reentrant).square().sum()
    with mode if inside != "forward" else nullcontext():
        loss.backward()
    assert sent(mode) == ({} if inside == "forward" else operators)
    for tensor, gradient in zip(call, expected, strict=True):
        assert_close(tensor.grad, gradient)


def test_what_is_exported_compiled_or_transformed_is_the_function(client: Client, home: Home) -> None:
    value, shapes, location, weight = operands()

    class Model(nn.Module):
        def forward(self, value: Any, location: Any, weight: Any) -> Any:
            return home(value, shapes, location, weight)

    model, call = Model(), (value, location, weight)
    with remote(client, min_bytes=0):
        exported = torch.export.export(model, call)
        gradient = torch.func.grad(lambda x: model(x, location, weight).sum())(value)
        kept = home.function
    home.function = kept  # as another thread sees it, in which nothing is entered
    compiled = torch.compile(model, backend="eager", fullgraph=True)(*call)
    names = [str(node.target) for node in exported.graph.nodes]
    assert sum("grid_sampler" in name for name in names) == len(LEVELS)
    assert not is_fused(compiled)
    assert gradient.shape == value.shape


def test_a_service_that_is_not_there(home: Home) -> None:
    call = operands()
    with Client("127.0.0.1:1", retry=RetryPolicy(retry_for_s=0)) as nobody:
        with remote(nobody, min_bytes=0), pytest.raises(ConnectError):
            gradients(call, home(*call))
        with pytest.warns(RemoteWarning), remote(nobody, min_bytes=0, on_error="local") as mode:
            gradients(call, home(*call))
        assert mode.summary().failed == len(LEVELS)


def test_the_remote_of_the_backward_pass_decides_where_the_gradient_runs(client: Client, home: Home) -> None:
    call = operands()
    with remote(client, min_bytes=0) as forward:
        first, second = (home(*call) for _ in range(2))
    with remote(client, min_bytes=2**30) as backward:
        kept = gradients(call, first)
    assert sent(forward) == sent(backward) == {}
    assert [(row.operator, row.why) for row in backward.summary().rows] == [(FUSED, "smaller than min_bytes")]
    with remote(client, min_bytes=0, fused=False) as backward:
        got = gradients(call, second)
    assert sent(backward) == {FUSED: 1}
    assert_all_close(got, kept)


def test_a_function_of_ones_own(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recognised, "_known", [*_recognised._known])
    names = {"value": "feats", "shapes": "sizes", "locations": "places", "weights": "scores"}
    home = library(monkeypatch, "my.model", "sample", parameters="scores, places, feats, sizes", **names)
    roles = {"value": "feats", "spatial_shapes": "sizes", "locations": "places", "weights": "scores"}
    parameters = ("scores", "places", "feats", "sizes")
    register_deformable_attention("my.*:sample", parameters=parameters, **roles)
    value, shapes, location, weight = call = operands()
    with remote(client, min_bytes=0) as mode:
        out = home.sample(sizes=torch.tensor(shapes), places=location, feats=value, scores=weight)
        gradients(call, out)
    assert sent(mode) == {FUSED: 1}


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match=r"name: found 'sample'; expected 'module:function'"):
        register_deformable_attention("sample")
    with pytest.raises(ValueError, match=r"parameters: found \('a',\); expected 'value' among"):
        register_deformable_attention("my.model:sample", parameters=("a",))
