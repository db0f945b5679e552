"""The detector learns from remote gradients, which are those of autograd."""

from __future__ import annotations

import re

import pytest
from tests.examples.run import run_example
from tests.fix_server import ServerProcess

pytestmark = pytest.mark.torch
NAME = "deformable_detector.py"


@pytest.mark.deep
@pytest.mark.slow
def test_it_learns_to_find_shapes(server: ServerProcess) -> None:
    pytest.importorskip("torch")
    done = run_example(NAME, "--target", server.address, limit_s=540)
    assert done.returncode == 0, done.stdout + done.stderr
    (difference,) = re.findall(r"one step: ([\d.e+-]+) from PyTorch's own", done.stdout)
    assert 0 < float(difference) <= 1e-4  # not 0: somebody else has computed them
    measured = re.findall(r"^(?:shapes found|overlap.*): ([\d.]+) before, ([\d.]+) after$", done.stdout, re.M)
    (found_before, found), (overlap_before, overlap) = (tuple(map(float, pair)) for pair in measured)
    assert found_before < 0.2
    assert found >= 0.85
    assert overlap_before < 0.5
    assert overlap >= 0.75
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 4
    sent = dict(re.findall(r"^(\w+_backward) +sent +- +(\d+) ", done.stdout, re.M))
    expected = {"grid_sampler_2d_backward": 160, "group_norm_backward": 800, "layer_norm_backward": 640}
    assert {name: int(count) for name, count in sent.items()} == expected
    assert not re.search(r"^\w+_backward +local ", done.stdout, re.M)


def test_unreachable_service_fails() -> None:
    pytest.importorskip("torch")
    done = run_example(NAME, "--target", "no.such.invalid:1")
    assert done.returncode != 0
    assert "ConnectError" in done.stderr
