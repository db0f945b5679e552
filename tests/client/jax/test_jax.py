"""The JAX functions: their own forward passes, gradients from the service, compiled and not."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.client.fake_service import UNARY, fake_service

from npugrad_client import AsyncClient, Client, InvalidOperand, MalformedRequest, NullOperand, TilingError

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'npugrad[jax]'")

import jax.numpy as jnp
from jax.test_util import check_grads

from npugrad_client.jax import (
    _deformable,
    _floyd,
    _grid_sample,
    fused_floyd_attention,
    grid_sample,
    group_norm,
    layer_norm,
    multi_scale_deformable_attention,
)

NOWHERE = "127.0.0.1:1"
TOLERANCE: dict[Any, Any] = {
    jnp.float32: {"rtol": 1e-3, "atol": 1e-4},
    jnp.float16: {"rtol": 2e-2, "atol": 2e-2},
    jnp.bfloat16: {"rtol": 6e-2, "atol": 6e-2},
}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)


def eager(function: Any) -> Any:
    """As `jax.jit`, without compiling: one test of each function does."""
    return function


def normal(rng: Any, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def close(got: Any, expected: Any, dtype: Any) -> None:
    """Each array within the tolerance of its type, relative to the largest element too."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a / scale, b / scale, **TOLERANCE[dtype])


def plain_group_norm(x: Any, scale: Any, bias: Any, groups: int) -> Any:
    split = x.astype(jnp.float32).reshape(x.shape[0], groups, -1)
    normed = (split - split.mean(-1, keepdims=True)) / jnp.sqrt(split.var(-1, keepdims=True) + 1e-5)
    channel = (1, -1) + (1,) * (x.ndim - 2)
    out = normed.reshape(x.shape)
    out = out if scale is None else out * scale.astype(jnp.float32).reshape(channel)
    out = out if bias is None else out + bias.astype(jnp.float32).reshape(channel)
    return out.astype(x.dtype)


def squared(out: Any) -> Any:
    return (out.astype(jnp.float32) ** 2).sum() + jnp.sin(out.astype(jnp.float32)).sum()


# --------------------------------------------------------------------------------------------- group_norm


@pytest.mark.parametrize(
    ("dtype", "given", "wrap"),
    [
        (jnp.float32, (True, True), eager),
        (jnp.float32, (True, False), jax.jit),
        (jnp.float32, (False, True), jax.jit),
        (jnp.float32, (False, False), jax.jit),
        (jnp.float16, (True, True), jax.jit),
        (jnp.bfloat16, (True, True), jax.jit),
    ],
)
def test_group_norm(client: Client, rng: Any, dtype: Any, given: Any, wrap: Any) -> None:
    x = normal(rng, 2, 8, 5, 4, dtype=dtype)
    scale, bias = (normal(rng, 8, dtype=dtype) if wanted else None for wanted in given)

    def loss(x: Any, scale: Any, bias: Any) -> Any:
        return squared(group_norm(x, scale, bias, groups=4, client=client))

    def plain(x: Any, scale: Any, bias: Any) -> Any:
        return squared(plain_group_norm(x, scale, bias, 4))

    got = wrap(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, scale, bias)
    expected = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(x, scale, bias)
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-2)
    close(got[1], expected[1], dtype)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "given"),
    [
        *((jnp.float32, jnp.float32, given) for given in ((1, 1), (1, 0), (0, 1), (0, 0))),
        *((dtype, scale, (1, 1)) for dtype in (jnp.float16, jnp.bfloat16) for scale in (dtype, jnp.float32)),
        # Without a scale, results are inferred in the type of x.
        *((dtype, jnp.float32, given) for dtype in (jnp.float16, jnp.bfloat16) for given in ((1, 0), (0, 1))),
    ],
)
def test_layer_norm(client: Client, rng: Any, dtype: Any, scale_dtype: Any, given: Any) -> None:
    x = normal(rng, 2, 8, 5, 4, dtype=dtype)
    scale, bias = (normal(rng, 5, 4, dtype=scale_dtype) if wanted else None for wanted in given)

    def plain(x: Any, scale: Any, bias: Any) -> Any:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean((2, 3), keepdims=True)
        out = centred / jnp.sqrt(wide.var((2, 3), keepdims=True) + 1e-5)
        out = out if scale is None else out * scale.astype(jnp.float32)
        out = out if bias is None else out + bias.astype(jnp.float32)
        return squared(out.astype(x.dtype))

    def loss(x: Any, scale: Any, bias: Any) -> Any:
        return squared(layer_norm(x, scale, bias, axes=2, client=client))

    got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, scale, bias)
    expected = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(x, scale, bias)
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-2)
    close(got[1], expected[1], dtype)


def test_layer_norm_refuses_more_axes_than_there_are(rng: Any) -> None:
    with Client(NOWHERE, timeout_s=5) as dead, pytest.raises(InvalidOperand):
        layer_norm(normal(rng, 2, 3), normal(rng, 3), axes=2, client=dead)
    with Client(NOWHERE, timeout_s=5) as dead, pytest.raises(InvalidOperand, match="rank 2; expected 3"):
        layer_norm(normal(rng, 2, 3), axes=3, client=dead)


@pytest.mark.parametrize("shape", [(0, 8, 5), (2, 8, 0), (2, 0, 5)])
def test_group_norm_of_nothing(client: Client, shape: Any) -> None:
    operands = (jnp.ones(shape), jnp.ones(shape[1]), jnp.ones(shape[1]))
    out, back = jax.vjp(lambda *o: group_norm(*o, groups=4, client=client), *operands)
    assert out.shape == shape
    for grad, operand in zip(back(out), operands, strict=True):
        np.testing.assert_array_equal(grad, jnp.zeros_like(operand))


def test_group_norm_by_differences(client: Client, rng: Any) -> None:
    operands = (normal(rng, 2, 4, 6), normal(rng, 4), normal(rng, 4))
    check_grads(
        lambda *o: group_norm(*o, groups=2, client=client),
        operands,
        1,
        ["rev"],
        eps=1e-2,
        atol=2e-2,
        rtol=2e-2,
    )


# -------------------------------------------------------------------------------------------- grid_sample


def points(rng: Any, n: int, height: int, width: int, *shape: int) -> Any:
    """Grid points inside cells of an image, and of its mirrors, near no kink."""
    return points_in(rng, (height, width), (n, *shape))


def points_in(rng: Any, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """The same for any number of axes, of which the sizes are those of the image."""
    extent = np.array(sizes[::-1])
    cells = rng.uniform(0.2, 0.8, (*shape, len(sizes))) + rng.integers(-2, extent + 1, (*shape, len(sizes)))
    return jnp.asarray((2 * cells + 1) / extent - 1, jnp.float32)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("sizes", [(5, 7), (4, 5, 7)], ids=["images", "volumes"])
def test_grid_sample(
    client: Client, rng: Any, sizes: tuple[int, ...], mode: str, padding_mode: str, align_corners: bool
) -> None:
    image, grid = normal(rng, 2, 3, *sizes), points_in(rng, sizes, (2, 4, 3, 2)[: len(sizes) + 1])
    if align_corners:  # the same cells, in the other way of counting
        extent = np.array(sizes[::-1])
        grid = ((grid + 1) * extent - 1) / (extent - 1) - 1
        grid = grid.astype(jnp.float32)
    how: Any = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}

    def loss(image: Any, grid: Any) -> Any:
        return squared(grid_sample(image, grid, client=client, **how))

    def plain(image: Any, grid: Any) -> Any:
        numbers = (_grid_sample._MODES[mode], _grid_sample._PADDINGS[padding_mode], align_corners)
        return squared(_grid_sample.sample(image, grid, *numbers))

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(image, grid)
    close(got, jax.jit(jax.grad(plain, argnums=(0, 1)))(image, grid), jnp.float32)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("sizes", [(5, 7), (4, 5, 7)], ids=["images", "volumes"])
def test_sampling_is_that_of_pytorch(
    rng: Any, sizes: tuple[int, ...], mode: str, padding_mode: str, align_corners: bool
) -> None:
    torch = pytest.importorskip("torch")
    image = rng.standard_normal((2, 3, *sizes)).astype(np.float32)
    grid = rng.uniform(-3, 3, (2, *(6, 5, 3)[: len(sizes)], len(sizes))).astype(np.float32)
    first = (0,) * (len(sizes) + 1)
    grid[first] = np.inf
    numbers = (_grid_sample._MODES[mode], _grid_sample._PADDINGS[padding_mode], align_corners)
    got = _grid_sample.sample(jnp.asarray(image), jnp.asarray(grid), *numbers)
    grid[first] = 40.5 if padding_mode != "border" else 1e6
    expected = torch.nn.functional.grid_sample(
        torch.tensor(image), torch.tensor(grid), mode, padding_mode, align_corners
    ).numpy()
    got, expected = np.array(got), np.array(expected)
    if padding_mode == "reflection":  # an infinite point has no reflection and reads nothing
        assert not got[0].reshape(3, -1)[:, 0].any()
        got[0].reshape(3, -1)[:, 0] = expected[0].reshape(3, -1)[:, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_modes_by_number_are_those_by_name(client: Client, rng: Any) -> None:
    image, grid = normal(rng, 1, 2, 4, 4), points(rng, 1, 4, 4, 3, 2)
    by_name = grid_sample(image, grid, client=client, mode="nearest", padding_mode="border")
    by_number = grid_sample(image, grid, client=client, mode=1, padding_mode=1)
    np.testing.assert_array_equal(by_number, by_name)


@TYPES
def test_grid_sample_in_every_type(client: Client, rng: Any, dtype: Any) -> None:
    image, grid = normal(rng, 1, 2, 4, 4, dtype=dtype), points(rng, 1, 4, 4, 3, 2).astype(dtype)
    got = jax.grad(lambda *o: squared(grid_sample(*o, client=client)), argnums=(0, 1))(image, grid)
    plain = jax.grad(lambda *o: squared(_grid_sample.sample(o[0], o[1], 0, 0, False)), argnums=(0, 1))
    close(got, jax.jit(plain)(image, grid), dtype)


# -------------------------------------------------------------------------------- deformable attention


def deformable(rng: Any, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    shapes = np.array([[5, 7], [3, 4]], np.int32)
    starts = np.array([0, 35], np.int32)
    cells = rng.uniform(0.2, 0.8, (2, 6, 2, 2, 3, 2)) + rng.integers(-1, 4, (2, 6, 2, 2, 3, 2)) - 0.5
    where = (cells + 0.5) / shapes[:, None, ::-1]
    floats = (rng.standard_normal((2, 47, 2, 8)), where, rng.uniform(size=(2, 6, 2, 2, 3)))
    value, location, weight = (jnp.asarray(each, dtype) for each in floats)
    return value, jnp.asarray(shapes), jnp.asarray(starts), location, weight


@TYPES
def test_deformable_attention(client: Client, rng: Any, dtype: Any) -> None:
    wrap = eager if dtype is jnp.float32 else jax.jit
    call = deformable(rng, dtype)

    def loss(*operands: Any) -> Any:
        return squared(multi_scale_deformable_attention(*operands, client=client))

    def plain(*operands: Any) -> Any:
        return squared(_deformable.attend(*operands))

    got = wrap(jax.grad(loss, argnums=(0, 3, 4)))(*call)
    close(got, jax.jit(jax.grad(plain, argnums=(0, 3, 4)))(*call), dtype)


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


def test_a_point_outside_reads_nothing_not_even_what_is_not_finite(rng: Any) -> None:
    value, shapes, starts, location, weight = deformable(rng)
    value = value.at[:, 0].set(jnp.inf).at[:, -1].set(jnp.nan)
    got = _deformable.attend(value, shapes, starts, jnp.full_like(location, -3), weight)
    np.testing.assert_array_equal(got, np.zeros((2, 6, 16)))


@pytest.mark.parametrize("weird", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("outside", [np.nan, np.inf, 1e30, -3.0])
def test_the_weight_of_a_point_outside_is_not_read(
    client: Client, rng: Any, outside: float, weird: float
) -> None:
    value, shapes, starts, location, weight = deformable(rng)
    location = location.at[0, 1, 1, 0, 1, 0].set(outside)

    def attention(*floats: Any) -> Any:
        return multi_scale_deformable_attention(floats[0], shapes, starts, *floats[1:], client=client)

    found = []
    for number in (0.0, weird):
        out, back = jax.vjp(attention, value, location, weight.at[0, 1, 1, 0, 1].set(number))
        found.append((out, *back(jnp.ones_like(out))))
    for without, got in zip(*found, strict=True):
        np.testing.assert_array_equal(got, without)
        assert np.isfinite(got).all()


@pytest.mark.parametrize(("bs", "nq", "nk"), [(0, 6, 47), (2, 0, 47), (2, 6, 0)])
def test_deformable_attention_of_nothing(client: Client, rng: Any, bs: int, nq: int, nk: int) -> None:
    value, shapes, starts, location, weight = deformable(rng)
    if not nk:
        shapes, starts = jnp.zeros_like(shapes), jnp.zeros_like(starts)
    floats = (value[:bs, :nk], location[:bs, :nq], weight[:bs, :nq])

    def attention(value: Any, location: Any, weight: Any) -> Any:
        return multi_scale_deformable_attention(value, shapes, starts, location, weight, client=client)

    out, back = jax.vjp(attention, *floats)
    np.testing.assert_array_equal(out, np.zeros((bs, nq, 16)))
    for grad, operand in zip(back(out), floats, strict=True):
        np.testing.assert_array_equal(grad, jnp.zeros_like(operand))


# --------------------------------------------------------------------------------------------- floyd


def floyd(rng: Any, dtype: Any) -> tuple[Any, ...]:
    b, h, n, m, k, d = 1, 2, 16, 128, 128, 32
    shapes = ((b, h, n, m, d), (b, h, n, k, d), (b, h, n, k, d), (b, h, k, m, d), (b, h, k, m, d))
    return tuple(normal(rng, *shape, dtype=dtype) for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "masked", "wrap"), [(jnp.float16, False, eager), (jnp.bfloat16, True, jax.jit)]
)
def test_floyd_attention(client: Client, rng: Any, dtype: Any, masked: bool, wrap: Any) -> None:
    call = floyd(rng, dtype)
    mask = jnp.asarray(rng.uniform(size=(1, 1, 16, 1, 128)) < 0.3) if masked else None

    def loss(*operands: Any) -> Any:
        return squared(fused_floyd_attention(*operands, client=client, atten_mask=mask))

    def plain(*operands: Any) -> Any:
        return squared(_floyd.attend(*operands, mask=mask, scale=32**-0.5)[0])

    got = wrap(jax.grad(loss, argnums=range(5)))(*call)
    close(got, jax.jit(jax.grad(plain, argnums=range(5)))(*call), dtype)


def test_floyd_forward_is_that_of_its_definition(rng: Any) -> None:
    shapes = ((2, 1, 3, 4, 2), (2, 1, 3, 5, 2), (2, 1, 3, 5, 2), (2, 1, 5, 4, 2), (2, 1, 5, 4, 2))
    q, k1, v1, k2, v2 = (rng.standard_normal(shape) for shape in shapes)
    mask = rng.uniform(size=(2, 1, 3, 1, 5)) < 0.4
    mask[0, 0, 1] = True
    score = 0.7 * (np.einsum("bhnmd,bhnkd->bhnmk", q, k1) + np.einsum("bhnmd,bhkmd->bhnmk", q, k2))
    score = np.where(mask, np.finfo(np.float32).min, score)
    weight = np.exp(score - score.max(-1, keepdims=True))
    total = weight.sum(-1)
    weight /= total[..., None]
    out = np.einsum("bhnmk,bhnkd->bhnmd", weight, v1) + np.einsum("bhnmk,bhkmd->bhnmd", weight, v2)
    operands = (jnp.asarray(each, jnp.float32) for each in (q, k1, v1, k2, v2))
    got = _floyd.attend(*operands, mask=jnp.asarray(mask), scale=0.7)
    for one, other in zip(got, (out, score.max(-1), total), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------ transforms and errors


def test_vmap_calls_for_each(client: Client, rng: Any) -> None:
    x, scale = normal(rng, 3, 2, 8, 5), normal(rng, 8)

    def loss(x: Any) -> Any:
        return squared(group_norm(x, scale, groups=4, client=client))

    together = jax.jit(jax.vmap(jax.grad(loss)))(x)
    close(together, jnp.stack([jax.grad(loss)(each) for each in x]), jnp.float32)


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
    how = {"deterministic": deterministic, "priority": 3, "label": "run", "verify": True}
    calls: dict[str, Any] = {
        "group_norm": (partial(group_norm, groups=4), (normal(rng, 2, 8, 5),)),
        "grid_sample": (grid_sample, (normal(rng, 1, 1, 2, 2), normal(rng, 1, 2, 2, 2))),
        "multi_scale_deformable_attention": (multi_scale_deformable_attention, deformable(rng)),
    }
    function, call = calls[name]
    with fake_service() as seen, Client(seen.address, timeout_s=20, stream_from_bytes=UNARY) as client:
        gradient = jax.grad(lambda first: function(first, *call[1:], client=client, **how).sum())
        jax.block_until_ready(gradient(call[0]))
    (request,) = seen.headers
    options = request.options
    assert (options.deterministic, options.priority) == (deterministic, 3)
    assert (options.label, options.verify) == ("run", True)


def test_refusals_come_when_the_function_is_traced(rng: Any) -> None:
    with Client(NOWHERE, timeout_s=5) as dead:
        x = normal(rng, 2, 8, 5)
        with pytest.raises(
            InvalidOperand, match="group: found c 8, group 3; expected c divisible"
        ) as refused:
            jax.jit(lambda x: group_norm(x, groups=3, client=dead))(x)
        assert refused.value.code == 161002
        with pytest.raises(InvalidOperand, match="gamma: found"):
            group_norm(x, None, normal(rng, 7), groups=4, client=dead)
        with pytest.raises(MalformedRequest, match="padding_mode: found 'wrap'"):
            grid_sample(normal(rng, 1, 1, 2, 2), normal(rng, 1, 2, 2, 2), client=dead, padding_mode="wrap")
        with pytest.raises(InvalidOperand, match="interpolation_mode: found 2"):
            grid_sample(normal(rng, 1, 1, 2, 2), normal(rng, 1, 2, 2, 2), client=dead, mode=2)
        with pytest.raises(InvalidOperand, match="query: found dtype float32"):
            fused_floyd_attention(*floyd(rng, jnp.float32), client=dead)
        with pytest.raises(TilingError, match="found"):
            fused_floyd_attention(*(each[:, :, :15] for each in floyd(rng, jnp.float16)), client=dead)
        value, *rest = deformable(rng)
        with pytest.raises(InvalidOperand, match="value: found"):
            multi_scale_deformable_attention(value[..., :5], *rest, client=dead)
        with pytest.raises(NullOperand, match="spatial_shape: found null"):
            multi_scale_deformable_attention(value, None, *rest[1:], client=dead)
        with pytest.raises(TypeError, match=r"group_norm_backward: gamma: found .*key.*; expected"):
            group_norm(x, jax.random.split(jax.random.key(0), 8), groups=4, client=dead)
        with pytest.raises(TypeError, match=r"grid_sampler_2d_backward: input: found float8_e4m3b11fnuz"):
            grid_sample(x[None].astype(jnp.float8_e4m3b11fnuz), normal(rng, 1, 2, 2, 2), client=dead)


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("scale", [None, 0.2])
def test_a_missing_operand_of_floyd_attention_is_null(rng: Any, position: int, scale: Any) -> None:
    call: list[Any] = list(floyd(rng, jnp.float16))
    call[position] = None
    name = ("query", "key1", "value1", "key2", "value2")[position]
    expected = f"^fused_floyd_attention_grad: {name}: found null; expected"
    with Client(NOWHERE, timeout_s=5) as dead, pytest.raises(NullOperand, match=expected) as refused:
        fused_floyd_attention(*call, scale=scale, client=dead)
    assert refused.value.code == 161001


@pytest.mark.parametrize(
    ("function", "operands", "how"),
    [
        (fused_floyd_attention, 5, {}),
        (grid_sample, 2, {}),
        (group_norm, 3, {"groups": 1}),
        (layer_norm, 3, {}),
        (multi_scale_deformable_attention, 5, {}),
    ],
)
def test_a_wrong_client_is_told_before_anything_is_traced(function: Any, operands: int, how: Any) -> None:
    for wrong in (NOWHERE, AsyncClient(NOWHERE)):
        expected = f"^{function.__name__}: client: found {type(wrong).__name__}; expected a Client$"
        with pytest.raises(TypeError, match=expected):
            function(*[None] * operands, client=wrong, **how)


@pytest.mark.filterwarnings("default")
def test_a_failure_of_the_service_names_its_class(rng: Any) -> None:
    """JAX has one exception for all that goes wrong in a callback; ours is in its text."""
    x = normal(rng, 2, 8, 5)
    with Client(NOWHERE, retry=None) as dead, pytest.raises(Exception, match=r"ConnectError.*cannot reach"):
        jax.block_until_ready(jax.jit(jax.grad(lambda x: squared(group_norm(x, groups=4, client=dead))))(x))


@pytest.mark.parametrize(
    ("function", "operands", "missing"),
    [(group_norm, (None,), "input"), (grid_sample, (None, 1), "input"), (grid_sample, (1, None), "grid")],
    ids=["group_norm", "grid_sample input", "grid_sample grid"],
)
def test_what_is_missing_is_the_callers_operand(
    rng: Any, function: Any, operands: tuple[int | None, ...], missing: str
) -> None:
    given = (None if each is None else normal(rng, 1, 2, 2, 2) for each in operands)
    options = {"groups": 1} if function is group_norm else {}
    with (
        Client(NOWHERE, timeout_s=5) as dead,
        pytest.raises(NullOperand, match=f": {missing}: found null") as refused,
    ):
        function(*given, client=dead, **options)
    assert refused.value.code == 161001
