"""The two attentions as functions: forward here, in blocks, and gradient from the service.

What is true of both is written once, for an `Attention`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from allpairspy import AllPairs

torch = pytest.importorskip("torch")

from tests.client.torch.agreement import assert_close
from tests.client.torch.deformable_detr import composed as deformable_composed

from npugrad_client import Client, ConnectError, InvalidOperand, NullOperand, TilingError, UnsafeLevels
from npugrad_client.torch import (
    Policies,
    RemoteWarning,
    _deformable,
    _deformable_gradient,
    _floyd,
    _floyd_gradient,
    fused_floyd_attention,
    multi_scale_deformable_attention,
)

pytestmark = pytest.mark.torch
Tensor = Any  # with its own type, each `grad` would have to be shown not to be None
NAN, INF = float("nan"), float("inf")
LEVELS = ((5, 7), (3, 4), (1, 1))
SIZES = {"b": 1, "h": 2, "n": 16, "m": 128, "k": 128, "d": 32}
ODD_SIZES = {"b": 2, "h": 1, "n": 3, "m": 4, "k": 5, "d": 2}


def operands(
    dtype: Any = torch.float32, *, bs: int = 2, nq: int = 6, nh: int = 2, ch: int = 8, points: int = 3
) -> Any:
    """Of deformable attention, near no kink: points inside cells of every level, and some far outside."""
    shapes = torch.tensor(LEVELS)
    sizes = shapes.prod(1)
    starts = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)[:-1]))
    value = torch.randn(bs, int(sizes.sum()), nh, ch)
    cells = torch.rand(bs, nq, nh, len(LEVELS), points, 2) * 0.7 + 0.15
    cells = cells + torch.randint(-1, 7, cells.shape) % shapes.flip(1)[:, None]
    location = cells / shapes.flip(1)[:, None]
    location[0, 0, 0, 0, 0] = 7.5
    weight = torch.rand(bs, nq, nh, len(LEVELS), points)
    floats = [t.to(dtype).requires_grad_() for t in (value, location, weight)]
    return [floats[0], shapes, starts, floats[1], floats[2]]


def floyd(dtype: Any = torch.float16, *, b: int, h: int, n: int, m: int, k: int, d: int) -> list[Tensor]:
    shapes = ((b, h, n, m, d), (b, h, n, k, d), (b, h, n, k, d), (b, h, k, m, d), (b, h, k, m, d))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def floyd_composed(
    q: Tensor, k1: Tensor, v1: Tensor, k2: Tensor, v2: Tensor, *, atten_mask: Any = None, scale: Any = None
) -> Any:
    """The plain composition, with every score in memory: attention, largest score and sum of each row."""
    score = torch.einsum("bhnmd,bhnkd->bhnmk", q, k1) + torch.einsum("bhnmd,bhkmd->bhnmk", q, k2)
    score = score * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if atten_mask is not None:
        score = score.masked_fill(atten_mask.bool(), torch.finfo(torch.float32).min)
    largest = score.amax(-1)
    total = (score - largest[..., None]).exp().sum(-1)
    weight = score.softmax(-1)
    out = torch.einsum("bhnmk,bhnkd->bhnmd", weight, v1) + torch.einsum("bhnmk,bhkmd->bhnmd", weight, v2)
    return out, largest, total


@dataclass(frozen=True)
class Attention:
    """One of the functions, and what these tests need of it.

    Attributes:
        operator: What its gradient is.
        function: The function.
        composed: The plain composition, of the same operands.
        legal: Operands that the service takes.
        odd: Operands that it refuses for their sizes.
        names: What the operands are called.
        floats: Which of them have gradients.
        rounds: Whether what is saved is rounded to the type, and so is its product with the gradient.
    """

    operator: str
    function: Any
    composed: Any
    legal: Callable[..., list[Tensor]]
    odd: Callable[..., list[Tensor]]
    names: tuple[str, ...]
    floats: tuple[int, ...]
    rounds: bool

    def of(self, call: list[Tensor]) -> list[Tensor]:
        """Those with gradients."""
        return [call[number] for number in self.floats]

    def extra(self, golden: Tensor, dtype: Any) -> float:
        return torch.finfo(dtype).eps * float(golden.abs().max()) if self.rounds else 0.0


DEFORMABLE = Attention(
    "multi_scale_deformable_attention_grad",
    multi_scale_deformable_attention,
    deformable_composed,
    operands,
    partial(operands, ch=5),
    ("value", "spatial_shape", "level_start_index", "location", "attn_weight"),
    (0, 3, 4),
    rounds=False,
)
FLOYD = Attention(
    "fused_floyd_attention_grad",
    fused_floyd_attention,
    lambda *call, **how: floyd_composed(*call, **how)[0],
    partial(floyd, **SIZES),
    partial(floyd, **ODD_SIZES),
    ("query", "key1", "value1", "key2", "value2"),
    tuple(range(5)),
    rounds=True,
)
BOTH = pytest.mark.parametrize("attention", [DEFORMABLE, FLOYD], ids=["deformable", "floyd"])


def doubled(call: list[Tensor]) -> list[Tensor]:
    """The same values in float64."""
    return [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in call]


def wide_mask(n: int, k: int, b: int = 1) -> Any:
    return torch.rand(b, 1, n, 1, k) < 0.4


# ---------------------------------------------------------------------------------- what the service gives


@pytest.mark.parametrize(
    ("attention", "dtype", "masked"),
    [
        *((DEFORMABLE, dtype, False) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
        *((FLOYD, torch.float16, False), (FLOYD, torch.bfloat16, True)),
    ],
)
def test_forward_and_gradients_against_float64(
    client: Client, attention: Attention, dtype: Any, masked: bool
) -> None:
    call, how = attention.legal(dtype), {"atten_mask": wide_mask(16, 128)} if masked else {}
    if masked:
        how["atten_mask"][:, :, 2:5] = True  # rows without any key
    got = attention.function(*call, client=client, **how)
    golden_call = doubled(call)
    golden = attention.composed(*golden_call, **how)
    assert got.dtype is dtype
    assert_close(got.detach(), golden.detach(), "forward")
    grad = torch.randn(got.shape).to(dtype)
    got.backward(grad)
    golden.backward(grad.double())
    names, pairs = attention.of(list(attention.names)), (attention.of(call), attention.of(golden_call))
    for name, one, other in zip(names, *pairs, strict=True):
        assert one.grad.dtype is dtype
        assert_close(one.grad, other.grad, name, attention.extra(other.grad, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_floyd_are_as_exact_as_autograds_in_the_type(client: Client, dtype: Any) -> None:
    call = FLOYD.legal(dtype)
    plain, golden = [t.detach().clone().requires_grad_() for t in call], doubled(call)
    FLOYD.function(*call, client=client).float().square().sum().backward()
    FLOYD.composed(*plain).float().square().sum().backward()
    FLOYD.composed(*golden).square().sum().backward()
    for one, other, true in zip(call, plain, golden, strict=True):
        error = (one.grad.double() - true.grad).norm() / true.grad.norm()
        assert error <= (other.grad.double() - true.grad).norm() / true.grad.norm() * 1.05


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
def test_gradcheck_of_what_the_service_computes(client: Client) -> None:
    value, shapes, starts, location, weight = operands(bs=1, nq=2, points=2)

    def attention(*floats: Tensor) -> Any:
        return multi_scale_deformable_attention(floats[0], shapes, starts, *floats[1:], client=client)

    floats = (value, location, weight)
    # A step of 1e-2 in location is at most 0.07 of a cell here, and points lie 0.15 inside of theirs.
    assert torch.autograd.gradcheck(attention, floats, eps=1e-2, atol=5e-3, rtol=2e-2, fast_mode=True)


@BOTH
def test_the_gradients_gradient_is_computed_here(client: Client, attention: Attention) -> None:
    call = attention.legal(torch.bfloat16) if attention.rounds else attention.legal()
    golden = doubled(call)
    found = []
    for function, leaves in (
        (partial(attention.function, client=client), call),
        (attention.composed, golden),
    ):
        floats = attention.of(leaves)
        first = torch.autograd.grad(function(*leaves).double().pow(3).sum(), floats, create_graph=True)
        loss = sum(each.double().square().sum() for each in first)
        found.append(torch.autograd.grad(loss, floats))
    for one, other in zip(*found, strict=True):
        assert (one.double() - other).norm() / other.norm() < 5e-2
        if not attention.rounds:
            largest = float(other.abs().max())
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3 * largest)


def test_only_wanted_gradients(client: Client) -> None:
    call = operands()
    call[3].requires_grad_(False)
    multi_scale_deformable_attention(*call, client=client).sum().backward()
    assert call[3].grad is None
    assert call[0].grad is not None
    with torch.no_grad(), Client("127.0.0.1:1", timeout_s=10) as dead:
        out = multi_scale_deformable_attention(*call, client=dead)
    assert not out.requires_grad


def test_int32_levels_with_gaps_between_them(client: Client) -> None:
    value, shapes, starts, location, weight = operands()
    spread = torch.zeros(2, value.shape[1] + 9, 2, 8)
    moved = starts + torch.tensor([2, 5, 9])
    for (h, w), old, new in zip(LEVELS, starts.tolist(), moved.tolist(), strict=True):
        spread[:, new : new + h * w] = value.detach()[:, old : old + h * w]
    spread.requires_grad_()
    got = multi_scale_deformable_attention(spread, shapes.int(), moved.int(), location, weight, client=client)
    expected = deformable_composed(value, shapes, starts, location, weight)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    got.sum().backward()
    assert not spread.grad[:, :2].any()


def test_what_floyd_saves_is_what_the_documents_want(client: Client) -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    call = FLOYD.legal()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = fused_floyd_attention(*call, client=client, scale=0.2)
    _, largest, total = floyd_composed(*doubled(call), scale=0.2)
    lanes = [t for t in saved if t.dtype is torch.float32]
    assert [tuple(t.shape) for t in lanes] == [(1, 2, 16, 128, 8)] * 2
    assert all(t.untyped_storage().nbytes() == 2 * 16 * 128 * 4 for t in lanes)
    for got, golden in zip(lanes, (largest, total), strict=True):
        assert_close(got[..., 7].detach(), golden.detach())
    assert any(torch.equal(t, out) for t in saved if t.shape == out.shape)
    unscaled = fused_floyd_attention(*call, client=client, scale=0.0)
    assert_close(unscaled.detach(), floyd_composed(*doubled(call), scale=0.0)[0].detach())


# --------------------------------------------------------------------------------------------- types


@BOTH
def test_autocast_and_pytorchs_default_type_change_nothing(
    client: Client, default_dtype: Any, attention: Attention
) -> None:
    call = attention.legal()
    expected = attention.function(*call, client=client)
    (gradient,) = torch.autograd.grad(expected.sum(), call[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention.function(*call, client=client), expected)
    for default in (torch.float64, torch.bfloat16):
        default_dtype(default)
        got = attention.function(*call, client=client)
        assert torch.equal(got, expected)
        assert torch.equal(torch.autograd.grad(got.sum(), call[0])[0], gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_of_floyd_need_a_compute_dtype(client: Client, dtype: Any) -> None:
    call = FLOYD.legal(dtype)
    expected = r"fused_floyd_attention_grad: query: found dtype float.*; expected float16"
    with pytest.raises(InvalidOperand, match=expected) as refused:
        fused_floyd_attention(*call, client=client)
    assert refused.value.code == 161002
    out = fused_floyd_attention(*call, client=client, compute_dtype=torch.bfloat16)
    assert out.dtype is dtype
    out.sum().backward()
    assert {t.grad.dtype for t in call} == {dtype}
    golden = doubled([t.bfloat16() for t in call])
    FLOYD.composed(*golden).sum().backward()
    assert_close(call[2].grad.bfloat16(), golden[2].grad, extra=2**-7 * float(golden[2].grad.abs().max()))


def test_compute_dtype_takes_mixed_types(client: Client) -> None:
    mixed = operands()
    mixed[0] = mixed[0].detach().double().requires_grad_()
    mixed[4] = mixed[4].detach().half().requires_grad_()
    with pytest.raises(InvalidOperand, match="multi_scale_deformable_attention_grad: ") as refused:
        multi_scale_deformable_attention(*mixed, client=client)
    assert refused.value.code == 161002
    out = multi_scale_deformable_attention(*mixed, client=client, compute_dtype=torch.float32)
    out.sum().backward()
    assert [t.dtype for t in (out, mixed[0].grad, mixed[4].grad)] == [torch.float64] * 2 + [torch.float16]
    golden = doubled(mixed)
    deformable_composed(*golden).sum().backward()
    assert_close(mixed[0].grad.float(), golden[0].grad)


def test_or_they_are_sent_as_float32(client: Client) -> None:
    mixed, policies = operands(), Policies(on_refused="raise")
    mixed[0] = mixed[0].detach().bfloat16().requires_grad_()
    out = multi_scale_deformable_attention(*mixed, client=client, policies=policies)
    out.float().square().sum().backward()
    assert out.dtype is torch.bfloat16
    assert (policies.summary().as_float32, policies.summary().local) == (1, 0)
    assert [t.grad.dtype for t in DEFORMABLE.of(mixed)] == [torch.bfloat16, torch.float32, torch.float32]


# ------------------------------------------------------------------------------------------- in blocks


@pytest.mark.parametrize("block_bytes", [4, 4 * 6 * 5, 4 * 6 * 5 * 2, 2**20])
@pytest.mark.parametrize("masked", [False, True])
def test_floyds_forward_in_blocks_against_float64(masked: bool, block_bytes: int) -> None:
    """A row, an m, two and the whole."""
    call = floyd(torch.float32, b=2, h=2, n=4, m=5, k=6, d=3)
    mask = wide_mask(4, 6, 2) if masked else None
    if mask is not None:
        mask[1, 0, 2] = True  # a row without any key: all its scores are the same
    got = _floyd.forward(*call, mask=mask, scale=0.7, block_bytes=block_bytes)
    golden = floyd_composed(*doubled(call), atten_mask=mask, scale=0.7)
    for name, one, other in zip(("attention", "largest", "total"), vars(got).values(), golden, strict=True):
        assert_close(one.detach(), other.detach(), name)


def test_no_block_of_scores_is_larger_than_was_asked_for() -> None:
    for n, m, k, limit in ((16, 128, 128, 2**16), (3, 7, 5, 64), (2, 2, 100, 8)):
        blocks = list(_floyd_gradient.blocks(n, m, 4 * k, limit))
        covered = {(i, j) for rows, cols in blocks for i in range(n)[rows] for j in range(m)[cols]}
        assert len(covered) == n * m
        largest = max(len(range(n)[rows]) * len(range(m)[cols]) * k * 4 for rows, cols in blocks)
        assert largest <= max(limit, 4 * k)


def test_blocks_do_not_change_deformable_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    call, found = operands(nq=23), []
    graded: Any = (*call, torch.ones(2, 23, 16))
    for block_bytes in (2**20, 5 * 4 * 8 * 2 * 3):  # all of them, and five queries
        for module in (_deformable, _deformable_gradient):
            monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
        found.append([_deformable.forward(*call), *_deformable_gradient.gradients(*graded)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


# --------------------------------------------------------------------------------- points outside of a level


@pytest.mark.parametrize("wild", [NAN, INF, -INF, 1e30, -1e30, 100.0])
def test_a_point_outside_reads_nothing_and_its_gradients_are_zero(wild: float) -> None:
    call: Any = [t.detach() for t in operands()]
    without = [t.clone() for t in call]
    without[4][1, 2, 1, 0, 1] = 0
    call[3][1, 2, 1, 0, 1, 0] = wild
    assert torch.equal(_deformable.forward(*call), _deformable.forward(*without))
    call[4][1, 2, 1, 0, 1] = NAN
    call.append(torch.randn(2, 6, 16))
    grads = _deformable_gradient.gradients(*call)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][1, 2, 1, 0, 1].any()
    assert grads[2][1, 2, 1, 0, 1] == 0


def test_the_weight_of_a_point_outside_is_not_read(client: Client) -> None:
    """As in the CUDA kernels of Deformable-DETR and mmcv, forward and backward."""
    outsides = [NAN, INF, 1e30, 1.125, -0.125]  # 4 and -1 in pixels
    for outside, axis, weird in AllPairs([outsides, [0, 1], [NAN, INF, -INF]]):
        value = torch.randn(1, 16, 2, 8, requires_grad=True)
        shapes, starts = torch.tensor([[4, 4]]), torch.tensor([0])
        location, weight = torch.rand(1, 3, 2, 1, 2, 2), torch.rand(1, 3, 2, 1, 2)
        location[0, 1, 1, 0, 1, axis] = outside
        found = []
        for number in (0.0, weird):
            weight = weight.detach().clone()
            weight[0, 1, 1, 0, 1] = number
            floats = (value, location.requires_grad_(), weight.requires_grad_())
            out = multi_scale_deformable_attention(value, shapes, starts, *floats[1:], client=client)
            found.append((out, *torch.autograd.grad(out.sum(), floats)))
        for without, got in zip(*found, strict=True):
            assert torch.equal(got, without), (outside, axis, weird)
            assert got.isfinite().all(), (outside, axis, weird)


def test_the_weight_of_a_point_just_inside_is_read() -> None:
    value, shapes, starts = torch.randn(1, 16, 1, 8), torch.tensor([[4, 4]]), torch.tensor([0])
    for x in (-0.1249, 1.1249):
        weight = torch.full((1, 1, 1, 1, 1), NAN)
        got = _deformable.forward(value, shapes, starts, torch.full((1, 1, 1, 1, 1, 2), x), weight)
        assert got.isnan().all()


# ------------------------------------------------------------------------------------ what runs here


@BOTH
def test_gradcheck_and_gradgradcheck_of_what_runs_here(client: Client, attention: Attention) -> None:
    policies = Policies(on_refused="local")
    if attention is FLOYD:
        cases = [(floyd(torch.float64, **ODD_SIZES), mask) for mask in (None, wide_mask(3, 5, 2))]
    else:
        cases = [(operands(torch.float64, bs=1, nq=2, points=2, ch=ch), None) for ch in (1, 5, 8)]
    for call, mask in cases:

        def run(*floats: Tensor, call: Any = call, mask: Any = mask) -> Any:
            given = dict(enumerate(call)) | dict(zip(attention.floats, floats, strict=True))
            how = {} if mask is None else {"atten_mask": mask}
            return attention.function(*given.values(), client=client, policies=policies, **how)

        assert torch.autograd.gradcheck(run, attention.of(call), fast_mode=True)
        assert torch.autograd.gradgradcheck(run, attention.of(call), fast_mode=True)
    assert policies.summary().sent == 0


@pytest.mark.parametrize(
    ("attention", "dtype", "block_bytes"),
    [
        *((DEFORMABLE, t, 2**20) for t in (torch.float32, torch.float16, torch.bfloat16, torch.float64)),
        *((FLOYD, dtype, 4) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
        (FLOYD, torch.float32, 2**20),
    ],
)
def test_what_runs_here_agrees_with_float64(
    client: Client, monkeypatch: pytest.MonkeyPatch, attention: Attention, dtype: Any, block_bytes: int
) -> None:
    monkeypatch.setattr(_floyd_gradient, "_BLOCK_BYTES", block_bytes)
    call, policies = attention.odd(dtype), Policies()
    how = {"atten_mask": wide_mask(3, 5, 2).to(torch.uint8)} if attention is FLOYD else {}
    golden_call = doubled(call)
    golden = attention.composed(*golden_call, **how)
    out = attention.function(*call, client=client, policies=policies, **how)
    tiny = {"rtol": 1e-14, "atol": 1e-14} if dtype is torch.float64 else {}
    torch.testing.assert_close(out, golden.to(dtype), **tiny)
    grad = torch.randn(out.shape).to(dtype)
    with pytest.warns(RemoteWarning, match=f"{attention.operator} runs locally because .*; expected"):
        out.backward(grad)
    golden.backward(grad.double())
    for one, other in zip(attention.of(call), attention.of(golden_call), strict=True):
        assert one.grad.dtype is dtype
        if dtype is torch.float64:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-11)
        else:
            assert_close(one.grad, other.grad)
    assert (policies.summary().sent, policies.summary().local) == (0, 1)


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


@BOTH
def test_a_failure_comes_out_of_backward_or_is_made_good_here(attention: Attention) -> None:
    call, policies = attention.legal(), Policies(on_error="local")
    with Client("127.0.0.1:1", retry=None) as dead:
        with pytest.raises(ConnectError):
            attention.function(*call, client=dead).sum().backward()
        out = attention.function(*call, client=dead, policies=policies)
        with pytest.warns(RemoteWarning, match="runs locally because the service failed"):
            out.sum().backward()
    golden = doubled(call)
    attention.composed(*golden).sum().backward()
    number = 2 if attention is FLOYD else 0
    assert_close(call[number].grad, golden[number].grad)
    assert policies.summary().failed == 1


def test_policies_are_shared_and_counted(client: Client) -> None:
    policies = Policies(min_bytes=2**20, on_refused="raise")
    for nq in (6, 4096):
        multi_scale_deformable_attention(*operands(nq=nq), client=client, policies=policies).sum().backward()
    call = FLOYD.legal()
    fused_floyd_attention(*call, client=client, policies=policies).sum().backward()
    assert [(row.operator, row.is_sent, row.why, row.calls) for row in policies.summary().rows] == [
        (FLOYD.operator, True, "", 1),
        (DEFORMABLE.operator, True, "", 1),
        (DEFORMABLE.operator, False, "smaller than min_bytes", 1),
    ]
    assert policies.summary().rows[0].bytes > 3 * sum(t.nbytes for t in call) // 2


# -------------------------------------------------------------------------------------------- bad input

_D, _F = DEFORMABLE, FLOYD
BROKEN: dict[str, tuple[Attention, Any, Any, str]] = {
    "channels": (_D, lambda c: (c[0][..., :5], *c[1:]), InvalidOperand, r"value: found .*5.*"),
    "rank": (_D, lambda c: (c[0][0], *c[1:]), InvalidOperand, r"value: found .*"),
    "points": (_D, lambda c: (*c[:4], c[4][..., :1]), InvalidOperand, r"attn_weight.*: found .*"),
    "types of levels": (_D, lambda c: (c[0], c[1].float(), *c[2:]), InvalidOperand, "found dtype float32"),
    "batch": (_D, lambda c: (c[0][:1], *c[1:]), InvalidOperand, ": found .*"),
    "n": (_F, lambda c: [t[:, :, :15] if i < 3 else t for i, t in enumerate(c)], TilingError, ": found"),
    "k of key2": (_F, lambda c: [*c[:3], c[3][:, :, :64], c[4]], TilingError, "key2.*: found"),
    "rank of query": (_F, lambda c: [c[0][0], *c[1:]], (TilingError, InvalidOperand), ": found"),
    "types": (_F, lambda c: [c[0].bfloat16(), *c[1:]], InvalidOperand, ": found"),
    "d": (_F, lambda c: [t[..., :16] for t in c], TilingError, ": found"),
}


@pytest.mark.parametrize(("attention", "change", "cls", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_call_is_refused_before_anything_is_done(
    attention: Attention, change: Any, cls: Any, message: str
) -> None:
    call, expected = change(attention.legal()), f"^{attention.operator}: .*{message}.*; expected"
    with Client("127.0.0.1:1", timeout_s=10) as dead, pytest.raises(cls, match=expected) as refused:
        attention.function(*call, client=dead)
    assert refused.value.code == (561002 if isinstance(refused.value, TilingError) else 161002)
    assert not isinstance(refused.value, NullOperand)


def test_a_level_outside_of_value() -> None:
    value, *others = operands()
    message = r"level_start_index: level 2: found an end beyond the keys; .* num_keys = 47"
    with pytest.raises(UnsafeLevels, match=message):
        _deformable.forward(value[:, :47], *others)


@BOTH
def test_a_missing_operand_is_null_and_what_is_no_tensor_is_named(attention: Attention) -> None:
    types = (None, torch.float16 if attention is FLOYD else torch.float32)
    with Client("127.0.0.1:1", timeout_s=10) as dead:
        for position, compute_dtype in itertools.product(range(5), types):
            name, how = attention.names[position], {"compute_dtype": compute_dtype, "client": dead}
            call = attention.legal()
            call[position] = None
            expected = f"^{attention.operator}: {name}: found null; expected"
            with pytest.raises(NullOperand, match=expected) as refused:
                attention.function(*call, **how)
            assert refused.value.code == 161001
            call = attention.legal()
            call[position] = call[position].detach().numpy()
            expected = f"^{attention.operator}: {name}: found ndarray; expected a torch CPU tensor$"
            with pytest.raises(TypeError, match=expected):
                attention.function(*call, **how)


def test_nor_does_floyd_mistake_its_scale_and_mask(client: Client) -> None:
    call = FLOYD.legal()
    with pytest.raises(TypeError, match=r"atten_mask: found ndarray; expected a torch CPU tensor$"):
        fused_floyd_attention(*call, atten_mask=wide_mask(16, 128).numpy(), client=client)
    with pytest.raises(TilingError, match="atten_mask: found"):
        fused_floyd_attention(*call, atten_mask=torch.zeros(1, 1, 16, 128, dtype=torch.bool), client=client)
    for position in range(5):
        without: list[Any] = [None if number == position else t for number, t in enumerate(call)]
        with pytest.raises(NullOperand, match=f"{FLOYD.names[position]}: found null"):
            fused_floyd_attention(*without, scale=0.2, client=client)


MISFITS = {
    "k of key2": lambda c: [*c[:3], c[3][:, :, :2], c[4]],
    "rank": lambda c: [c[0][0], *c[1:]],
    "no keys": lambda c: [c[0], *(t[:, :, :, :0] for t in c[1:3]), *(t[:, :, :0] for t in c[3:])],
    "whole numbers": lambda c: [t.long() for t in c],
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_together_is_refused_whatever_the_policy(client: Client, change: Any) -> None:
    call = change([t.detach() for t in FLOYD.odd()])
    with pytest.raises((InvalidOperand, TilingError), match="expected"):
        fused_floyd_attention(*call, client=client, policies=Policies(on_refused="local"))
