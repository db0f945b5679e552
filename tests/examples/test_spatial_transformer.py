"""The spatial transformer learns from remote gradients, which are those of autograd."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples.run import EXAMPLES, run_example

from npugrad_client import Client

if TYPE_CHECKING:
    from tests.fix_server import ServerProcess

pytestmark = pytest.mark.torch
NAME = "spatial_transformer.py"


@pytest.mark.slow
def test_it_learns(server: ServerProcess) -> None:
    pytest.importorskip("torch")
    done = run_example(NAME, "--target", server.address)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.findall(r"accuracy ([\d.]+) before, ([\d.]+) after", done.stdout)[0])
    assert before < 0.5
    assert after >= 0.9


def test_remote_gradients_are_those_of_autograd(server: ServerProcess) -> None:
    torch = pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("spatial_transformer", EXAMPLES / NAME)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 8, 9, generator=generator, requires_grad=True)
    grid = (torch.rand(2, 5, 6, 2, generator=generator) * 2.4 - 1.2).requires_grad_()
    upstream = torch.randn(2, 3, 5, 6, generator=generator)
    local = torch.nn.functional.grid_sample(image, grid, align_corners=False)
    expected = torch.autograd.grad(local, (image, grid), upstream)
    with Client(server.address) as client:
        remote = example.RemoteGridSample.apply(client, image, grid)
        found = torch.autograd.grad(remote, (image, grid), upstream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
