"""PyTorch's own samples of the operators: their gradients through `remote`, in every type, against float64.

Each backward operator that autograd calls is compared on the very operands it was called with. What the
documents refuse must run locally, with a warning that says why, and give PyTorch's own bits.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch.testing._internal imports it")

from tests.client.torch.agreement import Golden

from npugrad_client import Client
from npugrad_client.torch import RemoteWarning, remote

pytestmark = pytest.mark.torch

OPERATORS = (
    *("nn.functional.grid_sample", "grid_sampler_2d", "nn.functional.group_norm", "native_group_norm"),
    *("nn.functional.layer_norm", "native_layer_norm"),
)
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
VOLUMES = {"nn.functional.grid_sample": 5}


@cache
def info(name: str) -> Any:
    """PyTorch's record of an operator."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of its imports
        # SciPy takes seconds, and is for samples of others.
        patch.setattr("torch.testing._internal.common_utils.TEST_SCIPY", False)
        from torch.testing._internal.common_methods_invocations import op_db
    (found,) = [op for op in op_db if op.name == name and not op.variant_test_name]
    return found


def samples(name: str, dtype: Any) -> Iterator[Any]:
    """Samples with something to differentiate."""
    for sample in info(name).sample_inputs("cpu", dtype, requires_grad=True):
        if any(tensor.requires_grad for tensor in leaves(sample)):
            yield sample


def leaves(sample: Any) -> list[Any]:
    """Tensors of a sample, in order."""
    values = (sample.input, *sample.args, *sample.kwargs.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def gradients(name: str, sample: Any) -> list[Any]:
    """Gradients of all leaves under a fixed gradient of what a model uses: no statistics."""
    out = info(name).op(sample.input, *sample.args, **sample.kwargs)
    out = out[0] if isinstance(out, tuple) else out
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    needed = [tensor for tensor in leaves(sample) if tensor.requires_grad]
    return list(torch.autograd.grad(out, needed, grad, allow_unused=True))


def is_refused(name: str, sample: Any) -> bool:
    """Whether the documents do not have it: bicubic, and float64 but of volumes."""
    modes = (*sample.args, *sample.kwargs.values())
    if sample.input.dtype == torch.float64:
        return bool(sample.input.dim() != VOLUMES.get(name))
    return name.startswith(("grid", "nn.functional.grid")) and (
        "bicubic" in modes or (name == "grid_sampler_2d" and sample.args[1] == 2)
    )


def check(client: Client, name: str, sample: Any) -> None:
    refused, dtype = is_refused(name, sample), sample.input.dtype
    # Not fused: what it replaces is looked for in every module, and samplers are called directly here.
    mode, golden = remote(client, min_bytes=0, fused=False), Golden()
    # PyTorch's own are held to nothing: its bicubic in 16 bits is 13 times our tolerance off.
    with warnings.catch_warnings(record=True) as said, mode, nullcontext() if refused else golden:
        warnings.simplefilter("always")
        got = gradients(name, sample)

    def shown(more: str = "") -> str:
        return f"{name} {sample.summary()}\n{mode.summary()}\n{more}"

    assert (mode.summary().sent, mode.summary().local) == (not refused, refused), shown()
    assert [w.category for w in said] == [RemoteWarning] * refused, shown()
    assert golden.compared == (not refused), shown()
    assert [grad.dtype for grad in got] == [t.dtype for t in leaves(sample) if t.requires_grad], shown()
    if refused or dtype is torch.float64:
        least = 0 if refused else 1e-10
        for one, other in zip(got, gradients(name, sample), strict=True):
            torch.testing.assert_close(one, other, rtol=least, atol=least, msg=shown)


@pytest.mark.slow
@pytest.mark.parametrize("names", [OPERATORS[:1], pytest.param(OPERATORS[1:], marks=pytest.mark.deep)])
def test_gradients_of_pytorchs_own_samples(client: Client, names: tuple[str, ...]) -> None:
    """Those with two names have half of the types by each."""
    for name, dtype in itertools.product(names, TYPES):
        if name != OPERATORS[0] and (OPERATORS.index(name) + TYPES.index(dtype)) % 2:
            continue
        counts: Counter[bool] = Counter()
        for sample in samples(name, dtype):
            check(client, name, sample)
            counts[is_refused(name, sample)] += 1
        assert (counts[False] > 0) == (dtype is not torch.float64 or name in VOLUMES), (name, dtype)
        assert (counts[True] > 0) == (dtype is torch.float64 or "grid" in name), (name, dtype)


def test_statistics_with_gradients_run_locally(client: Client) -> None:
    """Autograd has no single operator then, so there is nothing to send."""
    x = torch.randn(2, 6, 5, requires_grad=True)

    def loss() -> Any:
        out, mean, rstd = torch.native_group_norm(x, None, None, 2, 6, 5, 3, 1e-5)
        return out.square().sum() + mean.sum() + rstd.sum()

    (expected,) = torch.autograd.grad(loss(), x)
    mode = remote(client, min_bytes=0)
    told = "norm_backward runs locally because it is decomposed for a gradient of mean"
    with mode, pytest.warns(RemoteWarning, match=told):
        (got,) = torch.autograd.grad(loss(), x)
    assert torch.equal(got, expected)
    assert (mode.summary().sent, mode.summary().local) == (0, 1)
