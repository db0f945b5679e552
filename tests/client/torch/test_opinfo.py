"""PyTorch's own samples of the operators: their gradients through `remote`, in every type, against float64.

Each backward operator that autograd calls is compared on the very operands it was called with. What the
documents refuse must run locally, with a warning that says why, and give PyTorch's own bits.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch.testing._internal imports it")

from collections.abc import Iterator

from tests.client.torch.agreement import Golden

from npugrad_client import Client
from npugrad_client.torch import RemoteWarning, remote

pytestmark = [pytest.mark.torch, pytest.mark.slow]

OPERATORS = (
    *("nn.functional.grid_sample", "grid_sampler_2d", "nn.functional.group_norm", "native_group_norm"),
    *("nn.functional.layer_norm", "native_layer_norm"),
)
DOCUMENTED = (torch.float32, torch.float16, torch.bfloat16)
VOLUMES = {"nn.functional.grid_sample": 5}


@cache
def info(name: str) -> Any:
    """PyTorch's record of an operator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
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


def first_output(name: str, sample: Any) -> Any:
    """The result that a model uses: of native_group_norm the normalised values, not the statistics."""
    out = info(name).op(sample.input, *sample.args, **sample.kwargs)
    return out[0] if isinstance(out, tuple) else out


def gradients(name: str, sample: Any) -> list[Any]:
    """Gradients of all leaves under a fixed gradient of the output."""
    out = first_output(name, sample)
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


@pytest.mark.parametrize("dtype", DOCUMENTED, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_pytorchs_own_samples(client: Client, name: str, dtype: Any) -> None:
    counts: Counter[str] = Counter()
    for sample in samples(name, dtype):
        refused = is_refused(name, sample)
        mode, golden = remote(client, min_bytes=0), Golden()
        # PyTorch's own are held to nothing: its bicubic in 16 bits is 13 times our tolerance off.
        with warnings.catch_warnings(record=True) as said, mode, nullcontext() if refused else golden:
            warnings.simplefilter("always")
            got = gradients(name, sample)
        summary = mode.summary()
        counts["refused" if refused else "sent"] += 1
        if refused:
            assert (summary.sent, summary.local) == (0, 1), summary
            assert [w.category for w in said] == [RemoteWarning]
            expected = gradients(name, sample)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        else:
            assert (summary.sent, summary.local) == (1, 0), f"{sample.summary()}\n{summary}"
            assert golden.compared == 1
            assert [grad.dtype for grad in got] == [t.dtype for t in leaves(sample) if t.requires_grad]
    assert counts["sent"] > 0
    assert (counts["refused"] > 0) == ("grid" in name)


@pytest.mark.parametrize("name", OPERATORS)
def test_float64_runs_locally_but_of_volumes(client: Client, name: str) -> None:
    mode, count, sent = remote(client, min_bytes=0), 0, 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for sample in samples(name, torch.float64):
            refused = is_refused(name, sample)
            count += refused
            sent += not refused
            with mode:
                got = gradients(name, sample)
            expected = gradients(name, sample)
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=0 if refused else 1e-10, atol=0 if refused else 1e-10
                )
    assert (mode.summary().sent, mode.summary().local) == (sent, count)
    assert (sent > 0) == (name in VOLUMES)
    assert {w.category for w in said} == {RemoteWarning}
    assert len(said) == sum(not row.is_sent for row in mode.summary().rows)


def test_statistics_with_gradients_run_locally(client: Client) -> None:
    """Autograd has no single operator then, so there is nothing to send."""
    x = torch.randn(2, 6, 5, requires_grad=True)

    def loss() -> Any:
        out, mean, rstd = torch.native_group_norm(x, None, None, 2, 6, 5, 3, 1e-5)
        return out.square().sum() + mean.sum() + rstd.sum()

    (expected,) = torch.autograd.grad(loss(), x)
    mode = remote(client, min_bytes=0)
    with (
        mode,
        pytest.warns(
            RemoteWarning, match="norm_backward runs locally because it is decomposed for a gradient of mean"
        ),
    ):
        (got,) = torch.autograd.grad(loss(), x)
    assert torch.equal(got, expected)
    assert (mode.summary().sent, mode.summary().local) == (0, 1)
