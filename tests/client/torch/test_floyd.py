"""Floyd attention as a function: forward here, in blocks, and gradient from the service."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.client.torch.agreement import assert_close

from npugrad_client import Client, InvalidOperand, NullOperand, TilingError
from npugrad_client.torch import (
    Policies,
    RemoteWarning,
    _floyd,
    _floyd_gradient,
    fused_floyd_attention,
)

pytestmark = pytest.mark.torch
Tensor = Any  # with its own type, each `grad` would have to be shown not to be None
SIZES = {"b": 1, "h": 2, "n": 16, "m": 128, "k": 128, "d": 32}


def operands(dtype: Any = torch.float16, *, b: int, h: int, n: int, m: int, k: int, d: int) -> list[Tensor]:
    shapes = ((b, h, n, m, d), (b, h, n, k, d), (b, h, n, k, d), (b, h, k, m, d), (b, h, k, m, d))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def composed(q: Tensor, k1: Tensor, v1: Tensor, k2: Tensor, v2: Tensor, *, mask: Any, scale: float) -> Any:
    """The plain composition, with every score in memory: attention, largest score and sum of each row."""
    score = torch.einsum("bhnmd,bhnkd->bhnmk", q, k1) + torch.einsum("bhnmd,bhkmd->bhnmk", q, k2)
    score = score * scale
    if mask is not None:
        score = score.masked_fill(mask.bool(), torch.finfo(torch.float32).min)
    largest = score.amax(-1)
    total = (score - largest[..., None]).exp().sum(-1)
    weight = score.softmax(-1)
    out = torch.einsum("bhnmk,bhnkd->bhnmd", weight, v1) + torch.einsum("bhnmk,bhkmd->bhnmd", weight, v2)
    return out, largest, total


def doubled(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize(
    "block_bytes", [4, 4 * 6 * 5, 4 * 6 * 5 * 2, 2**20], ids=["row", "m", "two", "whole"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_forward_in_blocks_against_float64(masked: bool, block_bytes: int) -> None:
    call = operands(torch.float32, b=2, h=2, n=4, m=5, k=6, d=3)
    mask = torch.rand(2, 1, 4, 1, 6) < 0.4 if masked else None
    if mask is not None:
        mask[1, 0, 2] = True  # a row without any key: all its scores are the same
    got = _floyd.forward(*call, mask=mask, scale=0.7, block_bytes=block_bytes)
    golden = composed(*doubled(call), mask=mask, scale=0.7)
    for name, one, other in zip(("attention", "largest", "total"), vars(got).values(), golden, strict=True):
        assert_close(one.detach(), other.detach(), name)


def test_no_block_of_scores_is_larger_than_was_asked_for() -> None:
    for n, m, k, limit in ((16, 128, 128, 2**16), (3, 7, 5, 64), (2, 2, 100, 8)):
        blocks = list(_floyd_gradient.blocks(n, m, 4 * k, limit))
        covered = {(i, j) for rows, cols in blocks for i in range(n)[rows] for j in range(m)[cols]}
        assert len(covered) == n * m
        largest = max(len(range(n)[rows]) * len(range(m)[cols]) * k * 4 for rows, cols in blocks)
        assert largest <= max(limit, 4 * k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_against_local_autograd_in_float64(client: Client, dtype: Any, masked: bool) -> None:
    call = operands(dtype, **SIZES)
    mask = torch.rand(1, 1, 16, 1, 128) < 0.3 if masked else None
    got = fused_floyd_attention(*call, atten_mask=mask, client=client)
    golden_call = doubled(call)
    golden = composed(*golden_call, mask=mask, scale=1 / math.sqrt(32))[0]
    assert_close(got.detach(), golden.detach(), "forward")
    grad = torch.randn(got.shape).to(dtype)
    got.backward(grad)
    golden.backward(grad.double())
    # The attention that is saved is rounded to the type, and so is its product with the gradient.
    eps = torch.finfo(dtype).eps
    for name, one, other in zip(("q", "k1", "v1", "k2", "v2"), call, golden_call, strict=True):
        assert one.grad.dtype is dtype
        assert_close(one.grad, other.grad, name, extra=eps * float(other.grad.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_against_local_autograd_in_the_type(client: Client, dtype: Any) -> None:
    """As exact as the plain composition in this type is, or better."""
    call = operands(dtype, **SIZES)
    plain = [t.detach().clone().requires_grad_() for t in call]
    golden = doubled(call)
    fused_floyd_attention(*call, client=client).float().square().sum().backward()
    composed(*plain, mask=None, scale=32**-0.5)[0].float().square().sum().backward()
    composed(*golden, mask=None, scale=32**-0.5)[0].square().sum().backward()
    for one, other, true in zip(call, plain, golden, strict=True):
        error = (one.grad.double() - true.grad).norm() / true.grad.norm()
        assert error <= (other.grad.double() - true.grad).norm() / true.grad.norm() * 1.05


def test_what_is_saved_is_what_the_documents_want(client: Client) -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    call = operands(**SIZES)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = fused_floyd_attention(*call, client=client, scale=0.2)
    _, largest, total = composed(*doubled(call), mask=None, scale=0.2)
    lanes = [t for t in saved if t.dtype is torch.float32]
    assert [tuple(t.shape) for t in lanes] == [(1, 2, 16, 128, 8)] * 2
    assert all(t.untyped_storage().nbytes() == 2 * 16 * 128 * 4 for t in lanes)
    for got, golden in zip(lanes, (largest, total), strict=True):
        assert_close(got[..., 7].detach(), golden.detach())
    assert any(torch.equal(t, out) for t in saved if t.shape == out.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_need_a_compute_dtype(client: Client, dtype: Any) -> None:
    call = operands(dtype, **SIZES)
    with pytest.raises(
        InvalidOperand, match=r"fused_floyd_attention_grad: query: found dtype float.*; expected float16"
    ) as refused:
        fused_floyd_attention(*call, client=client)
    assert refused.value.code == 161002
    out = fused_floyd_attention(*call, client=client, compute_dtype=torch.bfloat16)
    assert out.dtype is dtype
    out.sum().backward()
    assert {t.grad.dtype for t in call} == {dtype}
    golden = doubled([t.bfloat16() for t in call])
    composed(*golden, mask=None, scale=32**-0.5)[0].sum().backward()
    assert_close(call[2].grad.bfloat16(), golden[2].grad, extra=2**-7 * float(golden[2].grad.abs().max()))


def test_scale_is_what_is_given(client: Client) -> None:
    call = operands(**SIZES)
    got = fused_floyd_attention(*call, client=client, scale=0.0)
    golden = composed(*doubled(call), mask=None, scale=0.0)[0]
    assert_close(got.detach(), golden.detach())


def test_autocast_computes_as_without(client: Client) -> None:
    call = operands(**SIZES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fused_floyd_attention(*call, client=client)
    assert torch.equal(got, fused_floyd_attention(*call, client=client))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_pytorchs_default_type_changes_nothing(client: Client, default_dtype: Any, default: Any) -> None:
    call = operands(**SIZES)
    expected = fused_floyd_attention(*call, client=client)
    (gradient,) = torch.autograd.grad(expected.sum(), call[0])
    default_dtype(default)
    got = fused_floyd_attention(*call, client=client)
    assert torch.equal(got, expected)
    assert torch.equal(torch.autograd.grad(got.sum(), call[0])[0], gradient)


@pytest.mark.parametrize("name", ["query", "value2", "atten_mask"])
@pytest.mark.parametrize("compute_dtype", [None, torch.float16])
def test_what_is_no_tensor_is_named(client: Client, name: str, compute_dtype: Any) -> None:
    names = ("query", "key1", "value1", "key2", "value2")
    call = dict(zip(names, operands(**SIZES), strict=True))
    call["atten_mask"] = torch.zeros((1, 1, 16, 1, 128), dtype=torch.bool)
    call[name] = call[name].detach().numpy()
    expected = f"^fused_floyd_attention_grad: {name}: found ndarray; expected a torch CPU tensor$"
    with pytest.raises(TypeError, match=expected):
        fused_floyd_attention(**call, client=client, compute_dtype=compute_dtype)


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("compute_dtype", [None, torch.float16])
def test_a_missing_operand_is_null(position: int, scale: Any, compute_dtype: Any) -> None:
    call = operands(**SIZES)
    call[position] = None
    name = ("query", "key1", "value1", "key2", "value2")[position]
    expected = f"^fused_floyd_attention_grad: {name}: found null; expected"
    with Client("127.0.0.1:1", timeout_s=10) as dead, pytest.raises(NullOperand, match=expected) as refused:
        fused_floyd_attention(*call, scale=scale, compute_dtype=compute_dtype, client=dead)
    assert refused.value.code == 161001


BROKEN = {
    "n": (lambda c: [t[:, :, :15] if i < 3 else t for i, t in enumerate(c)], TilingError, 561002),
    "k of key2": (lambda c: [*c[:3], c[3][:, :, :64], c[4]], TilingError, 561002),
    "rank": (lambda c: [c[0][0], *c[1:]], (TilingError, InvalidOperand), None),
    "types": (lambda c: [c[0].bfloat16(), *c[1:]], InvalidOperand, 161002),
    "d": (lambda c: [t[..., :16] for t in c], TilingError, 561002),
}


@pytest.mark.parametrize(("change", "cls", "code"), BROKEN.values(), ids=BROKEN)
def test_a_broken_call_is_refused_before_anything_is_done(change: Any, cls: Any, code: Any) -> None:
    call = change(operands(**SIZES))
    with (
        Client("127.0.0.1:1", timeout_s=10) as dead,
        pytest.raises(cls, match=r"^fused_floyd_attention_grad: .*: found .*; expected") as refused,
    ):
        fused_floyd_attention(*call, client=dead)
    assert code in (None, refused.value.code)


def test_a_mask_of_the_wrong_shape_is_refused(client: Client) -> None:
    with pytest.raises(TilingError, match="atten_mask: found"):
        fused_floyd_attention(
            *operands(**SIZES), atten_mask=torch.zeros(1, 1, 16, 128, dtype=torch.bool), client=client
        )


def test_the_gradients_gradient_is_computed_here(client: Client) -> None:
    call = operands(torch.bfloat16, **SIZES)
    golden = doubled(call)
    found = []
    for out, leaves in (
        (fused_floyd_attention(*call, client=client), call),
        (composed(*golden, mask=None, scale=32**-0.5)[0], golden),
    ):
        first = torch.autograd.grad(out.double().square().sum(), leaves[0], create_graph=True)[0]
        found.append(torch.autograd.grad(first.double().square().sum(), leaves[0])[0])
    error = (found[0].double() - found[1]).norm() / found[1].norm()
    assert error < 5e-2


# ------------------------------------------------------------------------------------ what runs here

ODD_SIZES = {"b": 2, "h": 1, "n": 3, "m": 4, "k": 5, "d": 2}


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_and_gradgradcheck_of_what_runs_here(client: Client, masked: bool) -> None:
    mask = torch.rand(2, 1, 3, 1, 5) < 0.4 if masked else None
    policies = Policies(on_refused="local")

    def attention(*call: Tensor) -> Any:
        return fused_floyd_attention(*call, client=client, atten_mask=mask, policies=policies)

    call = operands(torch.float64, **ODD_SIZES)
    assert torch.autograd.gradcheck(attention, call, fast_mode=True)
    assert torch.autograd.gradgradcheck(attention, call, fast_mode=True)
    assert policies.summary().sent == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_bytes", [4, 2**20], ids=["rows", "whole"])
def test_what_runs_here_agrees_with_float64(
    client: Client, monkeypatch: pytest.MonkeyPatch, dtype: Any, block_bytes: int
) -> None:
    monkeypatch.setattr(_floyd_gradient, "_BLOCK_BYTES", block_bytes)
    call, policies = operands(dtype, **ODD_SIZES), Policies()
    mask = (torch.rand(2, 1, 3, 1, 5) < 0.4).to(torch.uint8)
    golden = doubled(call)
    out = fused_floyd_attention(*call, client=client, atten_mask=mask, policies=policies)
    grad = torch.randn(out.shape).to(dtype)
    with pytest.warns(RemoteWarning, match="fused_floyd_attention_grad runs locally because .*; expected"):
        out.backward(grad)
    composed(*golden, mask=mask, scale=2**-0.5)[0].backward(grad.double())
    for name, one, other in zip(("q", "k1", "v1", "k2", "v2"), call, golden, strict=True):
        assert one.grad.dtype is dtype
        assert_close(one.grad, other.grad, name)
    assert (policies.summary().sent, policies.summary().local) == (0, 1)


def test_a_failure_of_the_service_may_be_made_good_here() -> None:
    call, policies = operands(**SIZES), Policies(on_error="local")
    golden = doubled(call)
    with Client("127.0.0.1:1", retry=None) as dead:
        out = fused_floyd_attention(*call, client=dead, policies=policies)
        with pytest.warns(RemoteWarning, match="runs locally because the service failed"):
            out.sum().backward()
    composed(*golden, mask=None, scale=32**-0.5)[0].sum().backward()
    assert_close(call[2].grad, golden[2].grad)
    assert policies.summary().failed == 1


def test_what_is_sent_is_counted(client: Client) -> None:
    call, policies = operands(**SIZES), Policies(on_refused="raise")
    fused_floyd_attention(*call, client=client, policies=policies).sum().backward()
    (row,) = policies.summary().rows
    assert (row.operator, row.is_sent, row.calls) == ("fused_floyd_attention_grad", True, 1)
    assert row.bytes > 3 * sum(t.nbytes for t in call) // 2


MISFITS = {
    "k of key2": lambda c: [*c[:3], c[3][:, :, :2], c[4]],
    "rank": lambda c: [c[0][0], *c[1:]],
    "no keys": lambda c: [c[0], *(t[:, :, :, :0] for t in c[1:3]), *(t[:, :, :0] for t in c[3:])],
    "whole numbers": lambda c: [t.long() for t in c],
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_together_is_refused_whatever_the_policy(client: Client, change: Any) -> None:
    call = change([t.detach() for t in operands(**ODD_SIZES)])
    with pytest.raises((InvalidOperand, TilingError), match="expected"):
        fused_floyd_attention(*call, client=client, policies=Policies(on_refused="local"))
