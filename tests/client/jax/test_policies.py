"""The JAX functions with policies: what goes to the service, what is computed here, what is said."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

from npugrad_client import Client, InvalidOperand, NpugradError, NullOperand

jax = pytest.importorskip("jax", reason="jax is not installed: `make test-jax` has it")

import jax.numpy as jnp
from jax.test_util import check_grads
from tests.client.jax import test_jax
from tests.client.jax.test_jax import (
    BF16,
    DEFORMABLE,
    F32,
    FLOYD,
    NAMED,
    NAMES,
    NOWHERE,
    WRAPS,
    deformable,
    eager,
    normal,
    odd,
    of_norm,
    sampled,
    squared,
)
from tests.fix_server import ServerProcess

from npugrad_client.jax import Policies, RemoteWarning, grid_sample, group_norm, layer_norm


@pytest.fixture
def float64() -> Any:
    """float64 as JAX has it where it is asked to."""
    with jax.enable_x64(True):
        yield


@NAMES
def test_float64_runs_here_and_agrees_with_differences(
    float64: Any, rng: Any, name: str, server: ServerProcess
) -> None:
    """By the server's pages none takes it; by those of newer releases of CANN one does, so it is asked."""
    tested, operands = NAMED[name], odd(name, rng, jnp.float64)
    policies, fixed = Policies(on_refused="local"), dict(enumerate(operands))

    def run(*floats: Any) -> Any:
        given = {**fixed, **dict(zip(tested.wanted, floats, strict=True))}
        return tested.function(*given.values(), client=client, policies=policies)

    floats = [operands[number] for number in tested.wanted]
    with Client(server.address, timeout_s=60) as client:
        # The second order takes many seconds to trace, so two of them stand for all.
        order = 2 if name in ("group_norm", "multi_scale_deformable_attention") else 1
        check_grads(jax.jit(run), floats, order=order, modes=["rev"], eps=1e-6)
        assert run(*floats).dtype == jnp.float64
    rows = policies.summary().rows
    assert rows
    assert not any(row.is_sent for row in rows)


@NAMES
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_what_is_small_is_computed_here_and_compiles(rng: Any, name: str, dtype: Any) -> None:
    tested, policies = NAMED[name], Policies(on_refused="local", min_bytes=2**30)
    operands = odd(name, rng, dtype) if tested is FLOYD else tested.operands(rng, dtype)
    with Client(NOWHERE, timeout_s=5) as dead:
        _, grads = tested.gradient(operands, jax.jit, client=dead, policies=policies)
    assert [grad.dtype for grad in grads] == [dtype] * len(tested.wanted)
    assert all(np.isfinite(np.asarray(grad, np.float32)).all() for grad in grads)
    assert [(row.is_sent, row.why) for row in policies.summary().rows] == [(False, "smaller than min_bytes")]


def test_what_the_documents_refuse_is_told_once_or_raised_when_it_is_traced(client: Client, rng: Any) -> None:
    operands, policies = odd("multi_scale_deformable_attention", rng), Policies()
    with pytest.warns(RemoteWarning, match="because the service refuses it: .*value: found") as said:
        [DEFORMABLE.gradient(operands, eager, client=client, policies=policies) for _ in range(2)]
    assert len(said) == 1
    assert said[0].filename == test_jax.__file__  # where the function is called
    (row,) = policies.summary().rows
    assert (row.is_sent, row.calls) == (False, 2)
    with pytest.raises(InvalidOperand, match="value: found"):
        DEFORMABLE.function(*operands, client=client, policies=Policies(on_refused="raise"))


@WRAPS
def test_what_is_sent_is_counted_and_the_services_own(client: Client, rng: Any, wrap: Any) -> None:
    call, policies, tested = of_norm(rng), Policies(), NAMED["group_norm"]
    got = tested.gradient(call, wrap, client=client, policies=policies)
    jax.tree.map(np.testing.assert_array_equal, got, tested.gradient(call, wrap, client=client))
    (row,) = policies.summary().rows
    assert (row.operator, row.is_sent, row.calls) == ("group_norm_backward", True, 1)


@WRAPS
@pytest.mark.parametrize("name", ["group_norm", "layer_norm", "grid_sample"])
def test_a_failure_of_the_service_may_be_made_good_here(
    client: Client, rng: Any, name: str, wrap: Any
) -> None:
    tested, operands = NAMED[name], NAMED[name].operands(rng)
    policies, sent = Policies(on_error="local"), Policies()
    told = "runs locally because the service failed: .*cannot reach"
    dead = Client(NOWHERE, retry=None)
    gradient = partial(tested.gradient, operands, wrap, client=dead, policies=policies)
    with dead, pytest.warns(RemoteWarning, match=told) as said:
        got = [jax.block_until_ready(gradient())[1] for _ in range(2)]
    assert len([each for each in said if each.category is RemoteWarning]) == 1
    assert policies.summary().failed == 2
    expected = tested.gradient(operands, wrap, client=client, policies=sent)[1]
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
    tested, policies = NAMED[name], Policies(on_refused="raise")
    operands = tested.operands(rng)
    operands[0] = operands[0].astype(BF16)
    assert tested.function(*operands, client=client, policies=policies).dtype == BF16
    _, grads = tested.gradient(operands, eager, client=client, policies=policies)
    assert [grad.dtype for grad in grads] == [operands[number].dtype for number in tested.wanted]
    assert (policies.summary().as_float32, policies.summary().local) == (1, 0)


MISFITS: dict[str, Any] = {
    "scale": lambda rng, **how: group_norm(normal(rng, 2, 4, 5), normal(rng, 3), groups=2, **how),
    "groups": lambda rng, **how: group_norm(normal(rng, 2, 4, 5), groups=3, **how),
    "axes": lambda rng, **how: layer_norm(normal(rng, 2, 4), axes=3, **how),
    "batch": lambda rng, **how: grid_sample(normal(rng, 1, 2, 4, 4), normal(rng, 2, 3, 3, 2), **how),
    "bicubic": lambda rng, **how: grid_sample(*sampled(rng), mode=2, **how),
    "points": lambda rng, **how: DEFORMABLE.function(*deformable(rng)[:4], normal(rng, 2, 6, 2, 2, 1), **how),
    "nothing": lambda rng, **how: DEFORMABLE.function(*[None] * 5, **how),
    "keys": lambda rng, **how: FLOYD.function(
        *odd("fused_floyd_attention", rng)[:4], normal(rng, 2, 1, 1, 4, 2), **how
    ),
}


@pytest.mark.parametrize("call", MISFITS.values(), ids=MISFITS)
def test_what_means_nothing_is_refused_whatever_the_policy(rng: Any, call: Any) -> None:
    with Client(NOWHERE, timeout_s=5) as dead, pytest.raises(NpugradError, match="found") as refused:
        call(rng, client=dead, policies=Policies(on_refused="local"))
    assert isinstance(refused.value, NullOperand) or getattr(refused.value, "code", None) in (161002, 561002)


@NAMES
def test_a_policy_that_needs_the_time_of_a_call_here_is_refused(client: Client, rng: Any, name: str) -> None:
    policies = Policies(policy="faster")
    with pytest.raises(ValueError, match=r"^policies: policy: found 'faster'; expected 'always' under JAX$"):
        NAMED[name].function(*NAMED[name].operands(rng), client=client, policies=policies)
