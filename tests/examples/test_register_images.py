"""The registration of two photographs reaches its goal and writes a picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.examples.run import run_example
from tests.fix_server import ServerProcess

NAME = "register_images.py"


@pytest.mark.deep
@pytest.mark.slow
def test_error_at_least_halves_and_picture_is_written(server: ServerProcess, tmp_path: Path) -> None:
    io = pytest.importorskip("skimage.io")
    picture = tmp_path / "out.png"
    done = run_example(NAME, "--target", server.address, "--out", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    (times,) = re.findall(r"\(([\d.]+) times smaller\)", done.stdout)
    assert float(times) >= 2
    pixels = io.imread(picture)
    assert pixels.shape == (2 * 250, 3 * 370, 3)
    assert pixels.std() > 10


def test_unreachable_service_fails(tmp_path: Path) -> None:
    done = run_example(NAME, "--target", "no.such.invalid:1", "--out", str(tmp_path / "out.png"))
    assert done.returncode != 0
    assert not (tmp_path / "out.png").exists()
