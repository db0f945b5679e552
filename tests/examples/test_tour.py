"""The notebook runs from top to bottom in a real kernel, draws its pictures, and ends what it started."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.examples.run import EXAMPLES

pytestmark = pytest.mark.torch
NOTEBOOK = EXAMPLES / "tour.ipynb"
PNG = b"\x89PNG\r\n\x1a\n"


def cells() -> list[dict[str, Any]]:
    """The cells as they are committed."""
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return found


def test_it_is_committed_without_outputs() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert len(code) >= 8
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []


@pytest.mark.deep
@pytest.mark.slow
# The kernel's libraries warn of each other's plans; nothing of it is ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
def test_it_runs_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for folder in (
        "IPYTHONDIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_RUNTIME_DIR",
        "MPLCONFIGDIR",
    ):
        monkeypatch.setenv(folder, str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    run = nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3", cwd=tmp_path)
    run.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "from cpu:0 cpu" in printed
    assert "161002 group_norm_backward: c, group: found" in printed
    assert re.search(r"^grid_sampler_2d_backward +sent +- +150 ", printed, re.M)
    assert re.search(r"^group_norm_backward +sent +- +300 ", printed, re.M)
    assert "the server ended with status 0" in printed
    pictures = [output.data["image/png"] for output in outputs if output.output_type == "display_data"]
    assert len(pictures) == 3
    assert all(base64.b64decode(picture).startswith(PNG) for picture in pictures)
