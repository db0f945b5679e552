"""The JAX functions: their own forward passes, gradients from the service, policies; compiled and not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from allpairspy import AllPairs
from tests.client.docstrings import come_true, documented
from tests.client.fake_service import UNARY, fake_service
from tests.client.public_names import shown
from tests.fix_server import ServerProcess

from npugrad_client import (
    AsyncClient,
    Client,
    InvalidOperand,
    MalformedRequest,
    NullOperand,
    OperatorError,
    WrongType,
    WrongValue,
)

jax = pytest.importorskip("jax", reason="jax is not installed: `make test-jax` has it")

import jax.numpy as jnp
from jax.test_util import check_grads

import npugrad_client.jax as adapter
from npugrad_client.jax import (
    Policies,
    _deformable,
    _floyd,
    _grid_sample,
    fused_floyd_attention,
    grid_sample,
    group_norm,
    layer_norm,
    multi_scale_deformable_attention,
    remote_gradient,
)

NOWHERE = "127.0.0.1:1"
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
TOLERANCE: dict[Any, Any] = {
    F32: {"rtol": 1e-3, "atol": 1e-4},
    F16: {"rtol": 2e-2, "atol": 2e-2},
    BF16: {"rtol": 6e-2, "atol": 6e-2},
}


def eager(function: Any) -> Any:
    """As `jax.jit`, without compiling: one test of each function does."""
    return function


WRAPS = pytest.mark.parametrize("wrap", [eager, jax.jit], ids=["eager", "jit"])


def normal(rng: Any, *shape: int, dtype: Any = F32) -> Any:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def close(got: Any, expected: Any, dtype: Any) -> None:
    """Each array within the tolerance of its type, relative to the largest element too."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a / scale, b / scale, **TOLERANCE[dtype])


def squared(out: Any) -> Any:
    return (out.astype(F32) ** 2).sum() + jnp.sin(out.astype(F32)).sum()


# ------------------------------------------------------------------------ the functions, and their operands


def plain_norm(x: Any, scale: Any, bias: Any, groups: int | None = None) -> Any:
    """Normalises groups of channels, or the last two axes; what scales them is one of each of these."""
    split = x.astype(F32).reshape(x.shape[0], groups or x.shape[1], -1)
    normed = (split - split.mean(-1, keepdims=True)) / jnp.sqrt(split.var(-1, keepdims=True) + 1e-5)
    aligned = (1, -1) + (1,) * (x.ndim - 2) if groups else x.shape[2:]
    out = normed.reshape(x.shape)
    out = out if scale is None else out * scale.astype(F32).reshape(aligned)
    out = out if bias is None else out + bias.astype(F32).reshape(aligned)
    return out.astype(x.dtype)


def points_in(rng: Any, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Grid points inside cells of an image or a volume, and of its mirrors, near no kink."""
    extent = np.array(sizes[::-1])
    cells = rng.uniform(0.2, 0.8, (*shape, len(sizes))) + rng.integers(-2, extent + 1, (*shape, len(sizes)))
    return jnp.asarray((2 * cells + 1) / extent - 1, F32)


def sampled(rng: Any, dtype: Any = F32) -> list[Any]:
    return [normal(rng, 1, 2, 4, 4, dtype=dtype), points_in(rng, (4, 4), (1, 3, 2)).astype(dtype)]


def deformable(rng: Any, dtype: Any = F32) -> list[Any]:
    shapes = np.array([[5, 7], [3, 4]], np.int32)
    cells = rng.uniform(0.2, 0.8, (2, 6, 2, 2, 3, 2)) + rng.integers(-1, 4, (2, 6, 2, 2, 3, 2)) - 0.5
    where = (cells + 0.5) / shapes[:, None, ::-1]
    floats = (rng.standard_normal((2, 47, 2, 8)), where, rng.uniform(size=(2, 6, 2, 2, 3)))
    value, location, weight = (jnp.asarray(each, dtype) for each in floats)
    return [value, jnp.asarray(shapes), jnp.array([0, 35], jnp.int32), location, weight]


def floyd(rng: Any, dtype: Any = F16, sizes: tuple[int, ...] = (1, 2, 16, 128, 128, 32)) -> list[Any]:
    b, h, n, m, k, d = sizes
    shapes = ((b, h, n, m, d), (b, h, n, k, d), (b, h, n, k, d), (b, h, k, m, d), (b, h, k, m, d))
    return [normal(rng, *shape, dtype=dtype) for shape in shapes]


@dataclass(frozen=True)
class Differentiable:
    """A function, and what these tests need of it.

    Attributes:
        function: The function.
        plain: The same in JAX alone.
        operands: Legal operands of a type.
        wanted: Which of them have gradients.
    """

    function: Any
    plain: Any
    operands: Callable[..., list[Any]]
    wanted: tuple[int, ...]

    def gradient(self, call: list[Any], wrap: Any, plain: bool = False, **how: Any) -> Any:
        """Value and gradients of a fixed loss."""
        function = partial(self.plain if plain else self.function, **how)
        return wrap(jax.value_and_grad(lambda *o: squared(function(*o)), argnums=self.wanted))(*call)


def of_norm(rng: Any, dtype: Any = F32, shape: tuple[int, ...] = (8,), scale: Any = None) -> list[Any]:
    x = normal(rng, 2, 8, 5, 4, dtype=dtype)
    return [x, *(normal(rng, *shape, dtype=scale or dtype) for _ in range(2))]


NAMED = {
    "group_norm": Differentiable(
        partial(group_norm, groups=4), partial(plain_norm, groups=4), of_norm, (0, 1, 2)
    ),
    "layer_norm": Differentiable(
        partial(layer_norm, axes=2), plain_norm, partial(of_norm, shape=(5, 4)), (0, 1, 2)
    ),
    "grid_sample": Differentiable(
        grid_sample, lambda image, grid: _grid_sample.sample(image, grid, 0, 0, False), sampled, (0, 1)
    ),
    "multi_scale_deformable_attention": Differentiable(
        multi_scale_deformable_attention, _deformable.attend, deformable, (0, 3, 4)
    ),
    "fused_floyd_attention": Differentiable(
        fused_floyd_attention, lambda *o: _floyd.attend(*o, mask=None, scale=32**-0.5)[0], floyd, (*range(5),)
    ),
}
DEFORMABLE, FLOYD = NAMED["multi_scale_deformable_attention"], NAMED["fused_floyd_attention"]
NAMES = pytest.mark.parametrize("name", NAMED)


def odd(name: str, rng: Any, dtype: Any = F32) -> list[Any]:
    """Operands of a function; of the attentions those of sizes that no document allows."""
    if name == "fused_floyd_attention":
        return floyd(rng, dtype, (2, 1, 3, 4, 5, 2))
    call = NAMED[name].operands(rng, dtype)
    return [call[0][..., :5], *call[1:]] if NAMED[name] is DEFORMABLE else call


# -------------------------------------------------------------------------------- gradients of the service


@pytest.mark.parametrize(
    ("name", "dtype", "given", "wrap"),
    [
        *(("group_norm", F32, given, jax.jit) for given in ((1, 0), (0, 1), (0, 0))),
        *(
            ("group_norm", *each)
            for each in ((F32, (1, 1), eager), (F16, (1, 1), jax.jit), (BF16, (1, 1), jax.jit))
        ),
        *(("layer_norm", F32, given, jax.jit) for given in itertools.product((1, 0), repeat=2)),
        *(("layer_norm", dtype, given, jax.jit) for dtype in (F16, BF16) for given in ((1, 1), (F32, F32))),
        # Without a scale, results are inferred in the type of x.
        *(("layer_norm", dtype, given, jax.jit) for dtype in (F16, BF16) for given in ((F32, 0), (0, F32))),
        *((name, F32, (), eager) for name in ("grid_sample", "multi_scale_deformable_attention")),
        *((name, F16, (), jax.jit) for name in ("grid_sample", "multi_scale_deformable_attention")),
        *((name, BF16, (), jax.jit) for name in ("grid_sample", "multi_scale_deformable_attention")),
        pytest.param("fused_floyd_attention", F16, (), eager, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients(client: Client, rng: Any, name: str, dtype: Any, given: Any, wrap: Any) -> None:
    """`given` says whether scale and bias of a norm are there, and in which type if not in that of x."""
    tested, wide = NAMED[name], F32 in given
    call = tested.operands(rng, dtype, **({"scale": F32} if wide else {}))
    call[1:] = [
        each if not given or here else None for each, here in zip(call[1:], given or call[1:], strict=True)
    ]
    got = tested.gradient(call, wrap, client=client)
    expected = tested.gradient(call, jax.jit, plain=True)
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-2)
    close(got[1], expected[1], dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "forward", "attrs"),
    [
        ("silu_backward", jax.nn.silu, {}),
        ("gelu_backward_v2", partial(jax.nn.gelu, approximate=True), {"approximate": "tanh"}),
        ("softmax_backward", jax.nn.softmax, {"dim": -1}),
    ],
)
def test_gradients_by_the_operands_that_a_record_names(
    client: Client, rng: Any, operator: str, forward: Any, attrs: Any
) -> None:
    policies = Policies()
    function = remote_gradient(forward, operator, client=client, policies=policies, **attrs)
    x, upstream = normal(rng, 3, 7), normal(rng, 3, 7)
    found = jax.jit(jax.vjp(function, x)[1])(upstream)
    close(found, jax.vjp(forward, x)[1](upstream), F32)
    assert policies.summary().sent == 1
    with pytest.raises(WrongValue, match="found group_norm_backward, which needs grad_out, input, mean"):
        remote_gradient(forward, "group_norm_backward", client=client)


def test_floyd_attention_with_a_mask(client: Client, rng: Any) -> None:
    call, mask = floyd(rng, BF16), jnp.asarray(rng.uniform(size=(1, 1, 16, 1, 128)) < 0.3)
    mask = mask.at[:, :, 2:5].set(True)  # rows without any key
    got = FLOYD.gradient(call, jax.jit, client=client, atten_mask=mask)
    assert not np.asarray(got[1][0][:, :, 2:5]).any(), "their results are means of the values"
    loss = lambda *o: squared(_floyd.attend(*o, mask=mask, scale=32**-0.5)[0])  # noqa: E731
    close(got[1], jax.jit(jax.grad(loss, argnums=FLOYD.wanted))(*call), BF16)


MODES: list[list[Any]] = [
    [(5, 7), (4, 5, 7)],
    ["bilinear", "nearest"],
    ["zeros", "border", "reflection"],
    [False, True],
]
MODE_NAMES = ("sizes", "mode", "padding_mode", "align_corners")


def numbers_of(mode: str, padding_mode: str, align_corners: bool) -> tuple[int, int, bool]:
    return _grid_sample._MODES[mode], _grid_sample._PADDINGS[padding_mode], align_corners


@pytest.mark.parametrize(MODE_NAMES, list(AllPairs(MODES)))
def test_modes_of_grid_sample(
    client: Client, rng: Any, sizes: tuple[int, ...], mode: str, padding_mode: str, align_corners: bool
) -> None:
    image, grid = normal(rng, 2, 3, *sizes), points_in(rng, sizes, (2, 4, 3, 2)[: len(sizes) + 1])
    if align_corners:  # the same cells, in the other way of counting
        extent = np.array(sizes[::-1])
        grid = (((grid + 1) * extent - 1) / (extent - 1) - 1).astype(F32)
    how: Any = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    got = NAMED["grid_sample"].gradient([image, grid], jax.jit, client=client, **how)
    numbers = numbers_of(mode, padding_mode, align_corners)
    plain = jax.grad(lambda x, at: squared(_grid_sample.sample(x, at, *numbers)), argnums=(0, 1))
    close(got[1], jax.jit(plain)(image, grid), F32)
    by_number = grid_sample(
        image, grid, client=client, mode=numbers[0], padding_mode=numbers[1], align_corners=align_corners
    )
    np.testing.assert_array_equal(by_number, grid_sample(image, grid, client=client, **how))


@pytest.mark.parametrize(MODE_NAMES, list(itertools.product(*MODES)))
def test_sampling_is_that_of_pytorch(
    rng: Any, sizes: tuple[int, ...], mode: str, padding_mode: str, align_corners: bool
) -> None:
    torch = pytest.importorskip("torch")
    image = rng.standard_normal((2, 3, *sizes)).astype(np.float32)
    grid = rng.uniform(-3, 3, (2, *(6, 5, 3)[: len(sizes)], len(sizes))).astype(np.float32)
    first = (0,) * (len(sizes) + 1)
    grid[first] = np.inf
    numbers = numbers_of(mode, padding_mode, align_corners)
    got = np.array(_grid_sample.sample(jnp.asarray(image), jnp.asarray(grid), *numbers))
    grid[first] = 40.5 if padding_mode != "border" else 1e6
    sample = torch.nn.functional.grid_sample
    expected = sample(torch.tensor(image), torch.tensor(grid), mode, padding_mode, align_corners).numpy()
    if padding_mode == "reflection":  # an infinite point has no reflection and reads nothing
        assert not got[0].reshape(3, -1)[:, 0].any()
        got[0].reshape(3, -1)[:, 0] = expected[0].reshape(3, -1)[:, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_group_norm_by_differences(client: Client, rng: Any) -> None:
    operands = (normal(rng, 2, 4, 6), normal(rng, 4), normal(rng, 4))
    norm = partial(group_norm, groups=2, client=client)
    check_grads(norm, operands, 1, ["rev"], eps=1e-2, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shape", [(0, 8, 5), (2, 8, 0), (2, 0, 5)])
def test_group_norm_of_nothing(client: Client, shape: Any) -> None:
    operands = (jnp.ones(shape), jnp.ones(shape[1]), jnp.ones(shape[1]))
    out, back = jax.vjp(lambda *o: group_norm(*o, groups=4, client=client), *operands)
    assert out.shape == shape
    for grad, operand in zip(back(out), operands, strict=True):
        np.testing.assert_array_equal(grad, jnp.zeros_like(operand))


def attending(client: Client, shapes: Any, starts: Any, *floats: Any) -> tuple[Any, ...]:
    """The result, and gradients of value, location and weight for ones."""

    def attention(value: Any, location: Any, weight: Any) -> Any:
        return multi_scale_deformable_attention(value, shapes, starts, location, weight, client=client)

    out, back = jax.vjp(attention, *floats)
    return out, *back(jnp.ones_like(out))


@pytest.mark.parametrize(("bs", "nq", "nk"), [(0, 6, 47), (2, 0, 47), (2, 6, 0)])
def test_deformable_attention_of_nothing(client: Client, rng: Any, bs: int, nq: int, nk: int) -> None:
    value, shapes, starts, location, weight = deformable(rng)
    if not nk:
        shapes, starts = jnp.zeros_like(shapes), jnp.zeros_like(starts)
    floats = (value[:bs, :nk], location[:bs, :nq], weight[:bs, :nq])
    out, *grads = attending(client, shapes, starts, *floats)
    np.testing.assert_array_equal(out, np.zeros((bs, nq, 16)))
    for grad, operand in zip(grads, floats, strict=True):
        np.testing.assert_array_equal(grad, jnp.zeros_like(operand))


def test_the_weight_of_a_point_outside_is_not_read(client: Client, rng: Any) -> None:
    for outside, weird in AllPairs([[np.nan, np.inf, 1e30, -3.0], [np.nan, np.inf, -np.inf]]):
        value, shapes, starts, location, weight = deformable(rng)
        location = location.at[0, 1, 1, 0, 1, 0].set(outside)
        weights = (weight.at[0, 1, 1, 0, 1].set(number) for number in (0.0, weird))
        found = [attending(client, shapes, starts, value, location, weight) for weight in weights]
        for without, got in zip(*found, strict=True):
            np.testing.assert_array_equal(got, without)
            assert np.isfinite(got).all()


def test_a_point_outside_reads_nothing_not_even_what_is_not_finite(rng: Any) -> None:
    value, shapes, starts, location, weight = deformable(rng)
    value = value.at[:, 0].set(jnp.inf).at[:, -1].set(jnp.nan)
    got = _deformable.attend(value, shapes, starts, jnp.full_like(location, -3), weight)
    np.testing.assert_array_equal(got, np.zeros((2, 6, 16)))


def test_deformable_attention_is_that_of_its_definition(rng: Any) -> None:
    """Level by level and point by point, with grid sampling of each."""
    value, shapes, starts, location, weight = deformable(rng)
    location = location.at[0, 0, 0, 0, 0].set(jnp.nan).at[1, 0, 0, 1, 0].set(1e9)
    got = _deformable.attend(value, shapes, starts, location, weight)
    expected = np.zeros((2, 6, 2, 8))
    for level, ((h, w), start) in enumerate(zip(shapes.tolist(), starts.tolist(), strict=True)):
        for head in range(2):
            maps = value[:, start : start + h * w, head].reshape(2, h, w, 8).transpose(0, 3, 1, 2)
            read = _grid_sample.sample(maps, 2 * location[:, :, head, level] - 1, 0, 0, False)
            expected[:, :, head] += np.einsum("bcqp,bqp->bqc", read, weight[:, :, head, level])
    np.testing.assert_allclose(got, expected.reshape(2, 6, 16), rtol=1e-4, atol=1e-5)


def test_floyd_forward_is_that_of_its_definition(rng: Any) -> None:
    operands = floyd(rng, F32, (2, 1, 3, 4, 5, 2))
    q, k1, v1, k2, v2 = (np.asarray(each, np.float64) for each in operands)
    mask = rng.uniform(size=(2, 1, 3, 1, 5)) < 0.4
    mask[0, 0, 1] = True
    score = 0.7 * (np.einsum("bhnmd,bhnkd->bhnmk", q, k1) + np.einsum("bhnmd,bhkmd->bhnmk", q, k2))
    score = np.where(mask, np.finfo(np.float32).min, score)
    weight = np.exp(score - score.max(-1, keepdims=True))
    total = weight.sum(-1)
    weight /= total[..., None]
    out = np.einsum("bhnmk,bhnkd->bhnmd", weight, v1) + np.einsum("bhnmk,bhkmd->bhnmd", weight, v2)
    got = _floyd.attend(*operands, mask=jnp.asarray(mask), scale=0.7)
    for one, other in zip(got, (out, score.max(-1), total), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------- transforms, options


def test_vmap_calls_for_each(client: Client, rng: Any) -> None:
    x, scale = normal(rng, 3, 2, 8, 5), normal(rng, 8)

    def loss(x: Any) -> Any:
        return squared(group_norm(x, scale, groups=4, client=client))

    together = jax.jit(jax.vmap(jax.grad(loss)))(x)
    close(together, jnp.stack([jax.grad(loss)(each) for each in x]), F32)


def test_large_arrays_in_a_compiled_loop_in_several_threads(client: Client, rng: Any) -> None:
    """A callback that waits for JAX would hang here, where every thread of its pool may be taken."""
    x = normal(rng, 2, 32, 128, 128)
    failures: list[BaseException] = []

    @jax.jit  # type: ignore[untyped-decorator]
    def train(x: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            grad = jax.grad(lambda x: squared(group_norm(x, groups=8, client=client)))(x)
            return x - 0.1 * grad, (grad @ grad.swapaxes(-1, -2)).sum()

        return jax.lax.scan(step, x, None, length=3)

    def work() -> None:
        try:
            assert np.isfinite(np.asarray(train(x)[1])).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["group_norm", "grid_sample", "multi_scale_deformable_attention"])
def test_options_reach_the_service(rng: Any, name: str, deterministic: bool) -> None:
    how: Any = {"deterministic": deterministic, "priority": 3, "label": "run", "verify": True}
    with fake_service() as seen, Client(seen.address, timeout_s=20, stream_from_bytes=UNARY) as client:
        jax.block_until_ready(NAMED[name].gradient(NAMED[name].operands(rng), eager, client=client, **how))
    (request,) = seen.headers
    options = request.options
    assert (options.deterministic, options.priority) == (deterministic, 3)
    assert (options.label, options.verify) == ("run", True)


# ------------------------------------------------------------------------------------------------ errors


def test_refusals_come_when_the_function_is_traced(rng: Any) -> None:
    with Client(NOWHERE, timeout_s=5) as dead:
        x, images, (value, *rest) = normal(rng, 2, 8, 5), sampled(rng), deformable(rng)
        norm, sample = partial(group_norm, groups=4, client=dead), partial(grid_sample, client=dead)
        attend = partial(multi_scale_deformable_attention, client=dead)
        with pytest.raises(
            InvalidOperand, match="group: found c 8, group 3; expected c divisible"
        ) as refused:
            jax.jit(lambda x: group_norm(x, groups=3, client=dead))(x)
        assert refused.value.code == 161002
        with pytest.raises(InvalidOperand, match="gamma: found"):
            norm(x, None, normal(rng, 7))
        with pytest.raises(InvalidOperand):
            layer_norm(normal(rng, 2, 3), normal(rng, 3), axes=2, client=dead)
        with pytest.raises(InvalidOperand, match="rank 2; expected 3"):
            layer_norm(normal(rng, 2, 3), axes=3, client=dead)
        with pytest.raises(MalformedRequest, match="padding_mode: found 'wrap'"):
            sample(*images, padding_mode="wrap")
        with pytest.raises(InvalidOperand, match="interpolation_mode: found 2"):
            sample(*images, mode=2)
        with pytest.raises(InvalidOperand, match="query: found dtype float32"):
            fused_floyd_attention(*floyd(rng, F32), client=dead)
        with pytest.raises(OperatorError, match="found") as unsupported:
            fused_floyd_attention(*(each[:, :, :15] for each in floyd(rng)), client=dead)
        assert unsupported.value.code == 561002
        with pytest.raises(InvalidOperand, match="value: found"):
            attend(value[..., :5], *rest)
        with pytest.raises(TypeError, match=r"group_norm_backward: gamma: found .*key.*; expected"):
            norm(x, jax.random.split(jax.random.key(0), 8))
        with pytest.raises(TypeError, match=r"grid_sampler_2d_backward: input: found float8_e4m3b11fnuz"):
            sample(images[0].astype(jnp.float8_e4m3b11fnuz), images[1])


def test_what_is_missing_is_the_callers_operand(rng: Any) -> None:
    names = {"group_norm": ["input"], "grid_sample": ["input", "grid"]}
    names["multi_scale_deformable_attention"] = ["value", "spatial_shape"]
    names["fused_floyd_attention"] = ["query", "key1", "value1", "key2", "value2"]
    with Client(NOWHERE, timeout_s=5) as dead:
        for name, missing in names.items():
            for position, operand in enumerate(missing):
                call = NAMED[name].operands(rng)
                call[position] = None
                for how in ({}, {"scale": 0.2}) if name == "fused_floyd_attention" else ({},):
                    with pytest.raises(NullOperand, match=f": {operand}: found null") as refused:
                        NAMED[name].function(*call, client=dead, **how)
                    assert refused.value.code == 161001


@NAMES
def test_a_misspelt_argument_is_told(rng: Any, name: str) -> None:
    expected = f"^{name}: unknown argument 'timeout'; did you mean 'timeout_s'\\?"
    with pytest.raises(WrongType, match=expected):
        NAMED[name].function(*NAMED[name].operands(rng), client=None, timeout=5)


@NAMES
def test_a_wrong_client_is_told_before_anything_is_traced(rng: Any, name: str) -> None:
    nothing = [None] * len(NAMED[name].operands(rng))
    for wrong in (NOWHERE, AsyncClient(NOWHERE)):
        expected = f"^{name}: client: found {type(wrong).__name__}; expected a Client$"
        with pytest.raises(TypeError, match=expected):
            NAMED[name].function(*nothing, client=wrong)


@pytest.mark.filterwarnings("default")
def test_a_failure_of_the_service_names_its_class(rng: Any) -> None:
    """JAX has one exception for all that goes wrong in a callback; ours is in its text."""
    x = normal(rng, 2, 8, 5)
    with Client(NOWHERE, retry=None) as dead, pytest.raises(Exception, match=r"ConnectError.*cannot reach"):
        jax.block_until_ready(jax.jit(jax.grad(lambda x: squared(group_norm(x, groups=4, client=dead))))(x))


# ---------------------------------------------------------------------------------------- the public names


def test_the_public_list_is_what_the_package_shows() -> None:
    assert shown(adapter) == set(adapter.__all__)


EXAMPLES = documented("npugrad_client.jax")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_come_out_as_written(name: str, server: ServerProcess) -> None:
    come_true(EXAMPLES[name], "npugrad_client.jax", server.address)
