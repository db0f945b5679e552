"""The JAX functions with policies: what goes to the service, what is computed here, what is said."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

from npugrad_client import Client, InvalidOperand, NpugradError, NullOperand

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'npugrad[jax]'")

import jax.numpy as jnp
from jax.test_util import check_grads
from tests.client.jax.test_jax import deformable, normal, squared

from npugrad_client.jax import (
    Policies,
    RemoteWarning,
    fused_floyd_attention,
    grid_sample,
    group_norm,
    layer_norm,
    multi_scale_deformable_attention,
)

NOWHERE = "127.0.0.1:1"


def floyd(rng: Any, dtype: Any) -> list[Any]:
    """Five operands of sizes that no document allows."""
    b, h, n, m, k, d = 2, 1, 3, 4, 5, 2
    shapes = ((b, h, n, m, d), (b, h, n, k, d), (b, h, n, k, d), (b, h, k, m, d), (b, h, k, m, d))
    return [normal(rng, *shape, dtype=dtype) for shape in shapes]


def calls(rng: Any, dtype: Any) -> dict[str, tuple[Any, list[Any], tuple[int, ...]]]:
    """Each function, operands, and which of them have gradients."""
    value, shapes, starts, location, weight = deformable(rng, dtype)
    return {
        "group_norm": (
            partial(group_norm, groups=2),
            [normal(rng, 2, 4, 5, dtype=dtype), normal(rng, 4, dtype=dtype), normal(rng, 4, dtype=dtype)],
            (0, 1, 2),
        ),
        "layer_norm": (
            layer_norm,
            [normal(rng, 2, 4, 5, dtype=dtype), normal(rng, 5, dtype=dtype), normal(rng, 5, dtype=dtype)],
            (0, 1, 2),
        ),
        "grid_sample": (
            grid_sample,
            [normal(rng, 1, 2, 4, 4, dtype=dtype), 0.9 * normal(rng, 1, 3, 2, 2, dtype=dtype)],
            (0, 1),
        ),
        "multi_scale_deformable_attention": (
            multi_scale_deformable_attention,
            [value[..., :5], shapes, starts, location, weight],
            (0, 3, 4),
        ),
        "fused_floyd_attention": (fused_floyd_attention, floyd(rng, dtype), tuple(range(5))),
    }


NAMES = tuple(calls(np.random.default_rng(0), jnp.float32))
FUNCTIONS = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def float64() -> Any:
    """float64 as JAX has it where it is asked to."""
    with jax.enable_x64(True):
        yield


@FUNCTIONS
def test_float64_runs_here_and_agrees_with_differences(float64: Any, rng: Any, name: str) -> None:
    function, operands, wanted = calls(rng, jnp.float64)[name]
    policies = Policies(on_refused="local")
    fixed = dict(enumerate(operands))

    def run(*floats: Any) -> Any:
        given = {**fixed, **dict(zip(wanted, floats, strict=True))}
        return function(*given.values(), client=dead, policies=policies)

    floats = [operands[number] for number in wanted]
    with Client(NOWHERE, timeout_s=5) as dead:
        # The second order takes many seconds to trace, so two of them stand for all.
        order = 2 if name in ("group_norm", "multi_scale_deformable_attention") else 1
        check_grads(jax.jit(run), floats, order=order, modes=["rev"], eps=1e-6)
    rows = policies.summary().rows
    assert rows
    assert not any(row.is_sent for row in rows)
    assert run(*floats).dtype == jnp.float64


@FUNCTIONS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_small_is_computed_here_and_compiles(rng: Any, name: str, dtype: Any) -> None:
    function, operands, wanted = calls(rng, dtype)[name]
    if name == "multi_scale_deformable_attention":
        operands[0] = deformable(rng, dtype)[0]
    policies = Policies(on_refused="local", min_bytes=2**30)
    with Client(NOWHERE, timeout_s=5) as dead:
        loss = partial(function, client=dead, policies=policies)
        grads = jax.jit(jax.grad(lambda *o: squared(loss(*o)), argnums=wanted))(*operands)
    assert [grad.dtype for grad in grads] == [dtype] * len(wanted)
    assert all(np.isfinite(np.asarray(grad, np.float32)).all() for grad in grads)
    assert [(row.is_sent, row.why) for row in policies.summary().rows] == [(False, "smaller than min_bytes")]


def test_what_the_documents_refuse_is_told_once(client: Client, rng: Any) -> None:
    function, operands, wanted = calls(rng, jnp.float32)["multi_scale_deformable_attention"]
    policies = Policies()
    gradient = jax.grad(lambda *o: squared(function(*o, client=client, policies=policies)), argnums=wanted)
    with pytest.warns(RemoteWarning, match="because the service refuses it: .*value: found") as said:
        assert len([gradient(*operands) for _ in range(2)]) == 2
    assert len(said) == 1
    assert said[0].filename == __file__
    (row,) = policies.summary().rows
    assert (row.is_sent, row.calls) == (False, 2)


def test_or_raised_when_it_is_traced(client: Client, rng: Any) -> None:
    function, operands, _ = calls(rng, jnp.float32)["multi_scale_deformable_attention"]
    with pytest.raises(InvalidOperand, match="value: found"):
        function(*operands, client=client, policies=Policies(on_refused="raise"))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_is_sent_is_counted_and_the_services_own(client: Client, rng: Any, wrap: Any) -> None:
    x = normal(rng, 2, 8, 5)
    policies = Policies()

    def loss(x: Any, policies: Any) -> Any:
        return squared(group_norm(x, groups=4, client=client, policies=policies))

    got = wrap(jax.grad(partial(loss, policies=policies)))(x)
    np.testing.assert_array_equal(got, wrap(jax.grad(partial(loss, policies=None)))(x))
    (row,) = policies.summary().rows
    assert (row.operator, row.is_sent, row.calls) == ("group_norm_backward", True, 1)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["group_norm", "layer_norm", "grid_sample"])
def test_a_failure_of_the_service_may_be_made_good_here(
    client: Client, rng: Any, name: str, wrap: Any
) -> None:
    function, operands, wanted = calls(rng, jnp.float32)[name]
    policies, sent = Policies(on_error="local"), Policies()
    with Client(NOWHERE, retry=None) as dead:

        def gradient(client: Client, policies: Policies) -> Any:
            return wrap(
                jax.grad(lambda *o: squared(function(*o, client=client, policies=policies)), argnums=wanted)
            )

        failing = gradient(dead, policies)
        with pytest.warns(
            RemoteWarning, match="runs locally because the service failed: .*cannot reach"
        ) as said:
            got = [jax.block_until_ready(failing(*operands)) for _ in range(2)]
    assert len([each for each in said if each.category is RemoteWarning]) == 1
    assert policies.summary().failed == 2
    expected = gradient(client, sent)(*operands)
    assert sent.summary().sent == 1
    for one in got:
        for a, b in zip(one, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(1, float(abs(b).max())))


def test_failures_are_made_good_under_vmap(rng: Any) -> None:
    x = normal(rng, 3, 2, 8, 5)
    policies = Policies(on_error="local", on_refused="local")

    def loss(x: Any, client: Client, policies: Policies) -> Any:
        return squared(group_norm(x, groups=4, client=client, policies=policies))

    with Client(NOWHERE, retry=None) as dead, warnings.catch_warnings():
        warnings.simplefilter("ignore", RemoteWarning)
        got = jax.vmap(jax.grad(partial(loss, client=dead, policies=policies)))(x)
        here = Policies(min_bytes=2**30)
        expected = jax.vmap(jax.grad(partial(loss, client=dead, policies=here)))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert policies.summary().failed == 3


@pytest.mark.parametrize("name", ["group_norm", "multi_scale_deformable_attention"])
def test_mixed_types_are_sent_as_float32(client: Client, rng: Any, name: str) -> None:
    function, operands, wanted = calls(rng, jnp.float32)[name]
    if name == "multi_scale_deformable_attention":
        operands[0] = deformable(rng)[0]
    operands[0] = operands[0].astype(jnp.bfloat16)
    policies = Policies(on_refused="raise")
    out, back = jax.vjp(
        lambda *floats: function(
            *{**dict(enumerate(operands)), **dict(zip(wanted, floats, strict=True))}.values(),
            client=client,
            policies=policies,
        ),
        *(operands[number] for number in wanted),
    )
    grads = back(jnp.ones_like(out))
    assert out.dtype == jnp.bfloat16
    assert [grad.dtype for grad in grads] == [operands[number].dtype for number in wanted]
    assert (policies.summary().as_float32, policies.summary().local) == (1, 0)


MISFITS: dict[str, Any] = {
    "channels of a scale": lambda c, rng, how: group_norm(
        normal(rng, 2, 4, 5), normal(rng, 3), groups=2, client=c, **how
    ),
    "groups": lambda c, rng, how: group_norm(normal(rng, 2, 4, 5), groups=3, client=c, **how),
    "axes": lambda c, rng, how: layer_norm(normal(rng, 2, 4), axes=3, client=c, **how),
    "batch": lambda c, rng, how: grid_sample(
        normal(rng, 1, 2, 4, 4), normal(rng, 2, 3, 3, 2), client=c, **how
    ),
    "bicubic": lambda c, rng, how: grid_sample(
        normal(rng, 1, 2, 4, 4), normal(rng, 1, 3, 3, 2), mode=2, client=c, **how
    ),
    "points": lambda c, rng, how: multi_scale_deformable_attention(
        *(*deformable(rng)[:4], deformable(rng)[4][..., :1]), client=c, **how
    ),
    "nothing": lambda c, rng, how: multi_scale_deformable_attention(*[None] * 5, client=c, **how),
    "keys": lambda c, rng, how: fused_floyd_attention(
        *(*floyd(rng, jnp.float32)[:4], normal(rng, 2, 1, 1, 4, 2)), client=c, **how
    ),
}


@pytest.mark.parametrize("call", MISFITS.values(), ids=MISFITS)
def test_what_means_nothing_is_refused_whatever_the_policy(rng: Any, call: Any) -> None:
    with Client(NOWHERE, timeout_s=5) as dead, pytest.raises(NpugradError, match="found") as refused:
        call(dead, rng, {"policies": Policies(on_refused="local")})
    assert isinstance(refused.value, NullOperand) or getattr(refused.value, "code", None) in (161002, 561002)


@FUNCTIONS
def test_a_policy_that_needs_the_time_of_a_call_here_is_refused(client: Client, rng: Any, name: str) -> None:
    function, operands, _ = calls(rng, jnp.float32)[name]
    with pytest.raises(ValueError, match=r"^policies: policy: found 'faster'; expected 'always' under JAX$"):
        function(*operands, client=client, policies=Policies(policy="faster"))
