"""Multi-scale deformable attention as a function: forward here, in blocks, and gradient from the service."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.client.torch.agreement import assert_close

from npugrad_client import Client, ConnectError, InvalidOperand, NullOperand, UnsafeLevels
from npugrad_client.torch import (
    Policies,
    RemoteWarning,
    _deformable,
    _deformable_gradient,
    multi_scale_deformable_attention,
)

pytestmark = pytest.mark.torch
Tensor = Any  # with its own type, each `grad` would have to be shown not to be None
LEVELS = ((5, 7), (3, 4), (1, 1))
FLOAT32_IS_MEANT = pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")


def operands(
    dtype: Any = torch.float32, *, bs: int = 2, nq: int = 6, nh: int = 2, ch: int = 8, points: int = 3
) -> Any:
    """Operands whose points are near no kink: inside cells of every level, and some far outside."""
    shapes = torch.tensor(LEVELS)
    sizes = shapes.prod(1)
    starts = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)[:-1]))
    value = torch.randn(bs, int(sizes.sum()), nh, ch)
    cells = torch.rand(bs, nq, nh, len(LEVELS), points, 2) * 0.7 + 0.15
    cells = cells + torch.randint(-1, 7, cells.shape) % shapes.flip(1)[:, None] - 0.5
    location = (cells + torch.rand(()) * 0 + 0.5) / shapes.flip(1)[:, None]
    location[0, 0, 0, 0, 0] = 7.5
    weight = torch.rand(bs, nq, nh, len(LEVELS), points)
    floats = [t.to(dtype).requires_grad_() for t in (value, location, weight)]
    return floats[0], shapes, starts, floats[1], floats[2]


def composed(value: Tensor, shapes: Tensor, starts: Tensor, location: Tensor, weight: Tensor) -> Any:
    """The plain composition of `grid_sample`, as the papers' own code has it, in the operands' type."""
    bs, _, nh, ch = value.shape
    nq, points = location.shape[1], location.shape[4]
    sampled = []
    for level, ((h, w), start) in enumerate(zip(shapes.tolist(), starts.tolist(), strict=True)):
        maps = value[:, start : start + h * w].permute(0, 2, 3, 1).reshape(bs * nh, ch, h, w)
        grid = (2 * location[:, :, :, level] - 1).transpose(1, 2).reshape(bs * nh, nq, points, 2)
        sampled.append(F.grid_sample(maps, grid, align_corners=False))
    weights = weight.permute(0, 2, 1, 3, 4).reshape(bs * nh, 1, nq, -1)
    out = (torch.cat(sampled, -1) * weights).sum(-1)
    return out.reshape(bs, nh * ch, nq).transpose(1, 2)


def in_float64(call: Any) -> Any:
    """The same values in float64."""
    return [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in call]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forward_and_gradients_against_float64(client: Client, dtype: Any) -> None:
    call = operands(dtype)
    got = multi_scale_deformable_attention(*call, client=client)
    golden_call = in_float64(call)
    golden = composed(*golden_call)
    assert got.dtype is dtype
    assert_close(got.detach(), golden.detach(), "forward")
    grad = torch.randn(got.shape).to(dtype)
    got.backward(grad)
    golden.backward(grad.double())
    for number in (0, 3, 4):
        assert call[number].grad.dtype is dtype
        assert_close(call[number].grad, golden_call[number].grad, f"gradient {number}")


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    call = operands(nq=23)
    whole = _deformable.forward(*call)
    monkeypatch.setattr(_deformable, "_BLOCK_BYTES", 5 * 4 * 8 * 2 * 3)  # five queries
    torch.testing.assert_close(_deformable.forward(*call), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_pytorchs_default_type_changes_nothing(default_dtype: Any, default: Any) -> None:
    call = operands()
    expected = _deformable.forward(*call)
    default_dtype(default)
    assert torch.equal(_deformable.forward(*call), expected)


@pytest.mark.parametrize("wild", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 100.0])
def test_a_point_outside_reads_nothing(wild: float) -> None:
    value, shapes, starts, location, weight = operands()
    with torch.no_grad():
        location[1, 2, 1, 0, 1, 0] = wild
        without = weight.clone()
        without[1, 2, 1, 0, 1] = 0
    expected = _deformable.forward(
        value, shapes, starts, operands()[3] * 0 + location.nan_to_num(9, 9, 9), without
    )
    assert torch.equal(_deformable.forward(value, shapes, starts, location, weight), expected)


@pytest.mark.parametrize("weird", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("outside", [float("nan"), float("inf"), 1e30, 1.125, -0.125])  # 4 and -1 in pixels
def test_the_weight_of_a_point_outside_is_not_read(
    client: Client, outside: float, axis: int, weird: float
) -> None:
    """As in the CUDA kernels of Deformable-DETR and mmcv, forward and backward."""
    value = torch.randn(1, 16, 2, 8, requires_grad=True)
    shapes, starts = torch.tensor([[4, 4]]), torch.tensor([0])
    location, weight = torch.rand(1, 3, 2, 1, 2, 2), torch.rand(1, 3, 2, 1, 2)
    location[0, 1, 1, 0, 1, axis] = outside
    weight[0, 1, 1, 0, 1] = 0
    found = []
    for number in (0.0, weird):
        weight = weight.detach().clone()
        weight[0, 1, 1, 0, 1] = number
        floats = (value, location.requires_grad_(), weight.requires_grad_())
        out = multi_scale_deformable_attention(value, shapes, starts, *floats[1:], client=client)
        found.append((out, *torch.autograd.grad(out.sum(), floats)))
    for without, got in zip(*found, strict=True):
        assert torch.equal(got, without)
        assert got.isfinite().all()


def test_the_weight_of_a_point_just_inside_is_read() -> None:
    value, shapes, starts = torch.randn(1, 16, 1, 8), torch.tensor([[4, 4]]), torch.tensor([0])
    for x in (-0.1249, 1.1249):
        weight = torch.full((1, 1, 1, 1, 1), float("nan"))
        got = _deformable.forward(value, shapes, starts, torch.full((1, 1, 1, 1, 1, 2), x), weight)
        assert got.isnan().all()


def test_int32_levels_with_gaps_between_them(client: Client) -> None:
    value, shapes, starts, location, weight = operands()
    spread = torch.zeros(2, value.shape[1] + 9, 2, 8)
    moved = starts + torch.tensor([2, 5, 9])
    for (h, w), old, new in zip(LEVELS, starts.tolist(), moved.tolist(), strict=True):
        spread[:, new : new + h * w] = value.detach()[:, old : old + h * w]
    spread.requires_grad_()
    got = multi_scale_deformable_attention(spread, shapes.int(), moved.int(), location, weight, client=client)
    torch.testing.assert_close(got, composed(value, shapes, starts, location, weight), rtol=1e-4, atol=1e-5)
    got.sum().backward()
    assert not spread.grad[:, :2].any()


@FLOAT32_IS_MEANT
def test_gradcheck(client: Client) -> None:
    value, shapes, starts, location, weight = operands(bs=1, nq=2, points=2)

    def attention(*floats: Tensor) -> Any:
        return multi_scale_deformable_attention(floats[0], shapes, starts, *floats[1:], client=client)

    floats = (value, location, weight)
    # A step of 1e-2 in location is at most 0.07 of a cell here, and points lie 0.15 inside of theirs.
    assert torch.autograd.gradcheck(attention, floats, eps=1e-2, atol=5e-3, rtol=2e-2, fast_mode=True)


def test_only_wanted_gradients(client: Client) -> None:
    value, shapes, starts, location, weight = operands()
    location.requires_grad_(False)
    multi_scale_deformable_attention(value, shapes, starts, location, weight, client=client).sum().backward()
    assert location.grad is None
    assert value.grad is not None
    with torch.no_grad(), Client("127.0.0.1:1", timeout_s=10) as dead:
        out = multi_scale_deformable_attention(value, shapes, starts, location, weight, client=dead)
    assert not out.requires_grad


def test_compute_dtype_takes_other_and_mixed_types(client: Client) -> None:
    value, shapes, starts, location, weight = operands()
    mixed = (
        value.detach().double().requires_grad_(),
        shapes,
        starts,
        location,
        weight.detach().half().requires_grad_(),
    )
    with pytest.raises(InvalidOperand, match="multi_scale_deformable_attention_grad: ") as refused:
        multi_scale_deformable_attention(*mixed, client=client)
    assert refused.value.code == 161002
    out = multi_scale_deformable_attention(*mixed, client=client, compute_dtype=torch.float32)
    out.sum().backward()
    assert (out.dtype, mixed[0].grad.dtype, mixed[4].grad.dtype) == (
        torch.float64,
        torch.float64,
        torch.float16,
    )
    golden = in_float64(mixed)
    composed(*golden).sum().backward()
    assert_close(mixed[0].grad.float(), golden[0].grad)


def test_autocast_computes_in_the_types_given(client: Client) -> None:
    call = operands()
    expected = multi_scale_deformable_attention(*call, client=client)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = multi_scale_deformable_attention(*call, client=client)
    assert torch.equal(got, expected)


def test_the_gradients_gradient_is_computed_here(client: Client) -> None:
    call = operands()
    found = []
    for function in (partial(multi_scale_deformable_attention, client=client), composed):
        floats = [call[0], call[3], call[4]]
        first = torch.autograd.grad(function(*call).pow(3).sum(), floats, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), floats))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("ch", [1, 5, 8])
def test_gradcheck_and_gradgradcheck_of_what_runs_here(client: Client, ch: int) -> None:
    value, shapes, starts, location, weight = in_float64(operands(bs=1, nq=2, points=2, ch=ch))
    policies = Policies(on_refused="local")

    def attention(*floats: Tensor) -> Any:
        return multi_scale_deformable_attention(
            floats[0], shapes, starts, *floats[1:], client=client, policies=policies
        )

    assert torch.autograd.gradcheck(attention, (value, location, weight))
    assert torch.autograd.gradgradcheck(attention, (value, location, weight), fast_mode=True)
    assert policies.summary().sent == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_runs_here_agrees_with_float64(client: Client, dtype: Any) -> None:
    call = operands(dtype, ch=5)
    policies = Policies()
    out = multi_scale_deformable_attention(*call, client=client, policies=policies)
    golden_call = in_float64(call)
    golden = composed(*golden_call)
    tiny = {"rtol": 1e-14, "atol": 1e-14} if dtype is torch.float64 else {}
    torch.testing.assert_close(out, golden.to(dtype), **tiny)
    grad = torch.randn(out.shape).to(dtype)
    with pytest.warns(RemoteWarning, match="value: found .*; expected"):
        out.backward(grad)
    golden.backward(grad.double())
    assert (policies.summary().sent, policies.summary().local) == (0, 1)
    for number in (0, 3, 4):
        assert call[number].grad.dtype is dtype
        if dtype is torch.float64:
            torch.testing.assert_close(call[number].grad, golden_call[number].grad, rtol=1e-11, atol=1e-11)
        else:
            assert_close(call[number].grad, golden_call[number].grad, f"gradient {number}")


def test_blocks_do_not_change_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    call = [*operands(nq=23), torch.randn(2, 23, 16)]
    whole = _deformable_gradient.gradients(*call)
    monkeypatch.setattr(_deformable_gradient, "_BLOCK_BYTES", 5 * 4 * 8 * 2 * 3)  # five queries
    for one, other in zip(_deformable_gradient.gradients(*call), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wild", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 100.0])
def test_the_gradients_of_a_point_outside_are_zero_here_as_well(wild: float) -> None:
    call: Any = [t.detach() for t in operands()]
    call[3][1, 2, 1, 0, 1, 0], call[4][1, 2, 1, 0, 1] = wild, float("nan")
    call.append(torch.randn(2, 6, 16))
    grads = _deformable_gradient.gradients(*call)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][1, 2, 1, 0, 1].any()
    assert grads[2][1, 2, 1, 0, 1] == 0


@pytest.mark.parametrize("empty", ["bs", "nq", "points", "keys", "levels"])
def test_nothing_to_attend_to_runs_here(empty: str) -> None:
    value, shapes, starts, location, weight = (t.detach() for t in operands())
    if empty == "bs":
        value, location, weight = value[:0], location[:0], weight[:0]
    if empty == "nq":
        location, weight = location[:, :0], weight[:, :0]
    if empty == "points":
        location, weight = location[..., :0, :], weight[..., :0]
    if empty == "keys":
        value, shapes, starts = value[:, :0], shapes * 0, starts * 0
    if empty == "levels":
        shapes, starts, location, weight = shapes[:0], starts[:0], location[:, :, :, :0], weight[:, :, :, :0]
    call: Any = (value, shapes, starts, location, weight)
    out = _deformable.forward(*call)
    assert not out.any()
    assert torch.equal(_deformable_gradient.attend(*call), out)
    call = (*call, torch.ones_like(out))
    for grad, operand in zip(_deformable_gradient.gradients(*call), (value, location, weight), strict=True):
        assert grad.shape == operand.shape
        assert not grad.any()


def test_policies_are_shared_and_counted(client: Client) -> None:
    policies = Policies(min_bytes=2**20)
    for nq in (6, 4096):
        multi_scale_deformable_attention(*operands(nq=nq), client=client, policies=policies).sum().backward()
    assert [(row.is_sent, row.why, row.calls) for row in policies.summary().rows] == [
        (True, "", 1),
        (False, "smaller than min_bytes", 1),
    ]


def test_a_failure_of_the_service_may_be_made_good_here() -> None:
    call = operands()
    policies = Policies(on_error="local")
    with Client("127.0.0.1:1", retry=None) as dead:
        out = multi_scale_deformable_attention(*call, client=dead, policies=policies)
        with pytest.warns(RemoteWarning, match="runs locally because the service failed"):
            out.sum().backward()
    golden = in_float64(call)
    composed(*golden).sum().backward()
    assert_close(call[0].grad, golden[0].grad)
    assert policies.summary().failed == 1


def test_mixed_types_are_sent_as_float32(client: Client) -> None:
    value, shapes, starts, location, weight = operands()
    mixed = (value.detach().bfloat16().requires_grad_(), shapes, starts, location, weight)
    policies = Policies(on_refused="raise")
    out = multi_scale_deformable_attention(*mixed, client=client, policies=policies)
    out.float().square().sum().backward()
    assert out.dtype is torch.bfloat16
    assert (policies.summary().as_float32, policies.summary().local) == (1, 0)
    assert [t.grad.dtype for t in (mixed[0], location, weight)] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]


BROKEN = {
    "channels": (lambda c: (c[0][..., :5], *c[1:]), InvalidOperand, r"value: found .*5.*; expected"),
    "rank": (lambda c: (c[0][0], *c[1:]), InvalidOperand, r"value: found .*; expected"),
    "points": (lambda c: (*c[:4], c[4][..., :1]), InvalidOperand, r"attn_weight.*: found .*; expected"),
    "level type": (
        lambda c: (c[0], c[1].float(), *c[2:]),
        InvalidOperand,
        r"spatial_shape: found dtype float32",
    ),
    "batch": (lambda c: (c[0][:1], *c[1:]), InvalidOperand, r": found .*; expected"),
}


@pytest.mark.parametrize(("change", "cls", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_call_is_refused_before_anything_is_done(change: Any, cls: Any, message: str) -> None:
    call = change(operands())
    with (
        Client("127.0.0.1:1", timeout_s=10) as dead,
        pytest.raises(cls, match=f"^multi_scale_deformable_attention_grad: .*{message}") as refused,
    ):
        multi_scale_deformable_attention(*call, client=dead)
    assert refused.value.code == 161002
    assert not isinstance(refused.value, NullOperand)


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("compute_dtype", [None, torch.float32])
def test_what_is_no_tensor_is_named(client: Client, position: int, compute_dtype: Any) -> None:
    call = list(operands())
    call[position] = call[position].detach().numpy()
    name = ("value", "spatial_shape", "level_start_index", "location", "attn_weight")[position]
    expected = f"^multi_scale_deformable_attention_grad: {name}: found ndarray; expected a torch CPU tensor$"
    with pytest.raises(TypeError, match=expected):
        multi_scale_deformable_attention(*call, client=client, compute_dtype=compute_dtype)


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("compute_dtype", [None, torch.float32])
def test_a_missing_operand_is_null(position: int, compute_dtype: Any) -> None:
    call = list(operands())
    call[position] = None
    name = ("value", "spatial_shape", "level_start_index", "location", "attn_weight")[position]
    expected = f"^multi_scale_deformable_attention_grad: {name}: found null; expected"
    with Client("127.0.0.1:1", timeout_s=10) as dead, pytest.raises(NullOperand, match=expected) as refused:
        multi_scale_deformable_attention(*call, compute_dtype=compute_dtype, client=dead)
    assert refused.value.code == 161001


def test_a_level_outside_of_value() -> None:
    value, shapes, starts, location, weight = operands()
    with pytest.raises(
        UnsafeLevels, match=r"spatial_shape: found level 2 of 1 x 1 from key 47; .* has 47 keys"
    ):
        _deformable.forward(value[:, :47], shapes, starts, location, weight)


def test_a_failure_comes_out_of_backward() -> None:
    call = operands()
    with Client("127.0.0.1:1", retry=None) as dead:
        out = multi_scale_deformable_attention(*call, client=dead)
        with pytest.raises(ConnectError):
            out.sum().backward()
