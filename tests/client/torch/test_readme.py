"""The README's model runs as it stands, and so does the loop of the client's page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from tests.fix_server import ServerProcess

    from npugrad_client import Client

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[3]


def block(page: str, imported: str) -> str:
    """The Python of a page that imports something."""
    text = (ROOT / page).read_text("utf-8")
    found: str
    (found,) = [code for code in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M) if imported in code]
    return found


@pytest.mark.slow
def test_the_model_of_the_readme(server: ServerProcess, tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    source = block("README.md", "npugrad_client.torch import remote")
    script.write_text(source.replace("127.0.0.1:50051", server.address), "utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    header, line = done.stdout.partition("\n\n")[0].splitlines()
    assert header.split() == ["operator", "where", "why", "calls", "MiB", "seconds"]
    assert line.split()[:4] == ["group_norm_backward", "sent", "-", "1"]


def test_the_loop_of_the_clients_page(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 1), torch.nn.GroupNorm(4, 16), torch.nn.Flatten())
    names: dict[str, Any] = {
        "client": client,
        "model": model,
        "criterion": lambda out, labels: (out.mean(1) - labels).square().sum(),
        "loader": [(torch.randn(2, 3, 32, 48), torch.zeros(2))] * 2,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    exec(block("client/README.md", "npugrad_client.torch import remote"), names)
    assert re.search(r"^group_norm_backward +sent +- +2 ", capsys.readouterr().out, re.M)
