"""The spatial transformer learns from remote gradients, which are those of autograd."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from tests.examples.run import EXAMPLES, run_example
from tests.fix_server import ServerProcess

from npugrad_client import Client

pytestmark = pytest.mark.torch
NAME = "spatial_transformer.py"


@pytest.mark.deep
@pytest.mark.slow
def test_it_learns(server: ServerProcess) -> None:
    pytest.importorskip("torch")
    done = run_example(NAME, "--target", server.address)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.findall(r"accuracy ([\d.]+) before, ([\d.]+) after", done.stdout)[0])
    assert before < 0.5
    assert after >= 0.9
    assert re.search(r"^grid_sampler_2d_backward +sent +- +80 ", done.stdout, re.M)


def test_remote_gradients_are_those_of_autograd(server: ServerProcess) -> None:
    torch = pytest.importorskip("torch")
    from npugrad_client.torch import remote

    spec = importlib.util.spec_from_file_location("spatial_transformer", EXAMPLES / NAME)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.SpatialTransformer()
    with torch.no_grad():  # away from the identity, where each sample is at a pixel, a kink
        model.localisation[-1].bias.add_(torch.linspace(-0.2, 0.23, 6))
    images, labels = example.make_images(4, torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    with Client(server.address) as client, remote(client, min_bytes=0) as mode:
        found = torch.autograd.grad(loss, parameters)
    assert mode.summary().sent == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
