"""Each example runs as its documentation says, unmodified, and fails where no service is."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client import programs
from tests.fix_server import ServerProcess, StartServer, run_quick_server
from tests.fix_tls import Certificates

from npugrad_client import Client

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "examples"
NOWHERE = "no.such.invalid:1"
PNG = b"\x89PNG\r\n\x1a\n"


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs an example to its end, as a process of its own."""
    code = f"import runpy; runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    # More threads of PyTorch only wait for each other where other tests run.
    return programs.run(code, *arguments, OMP_NUM_THREADS="1")


def printed(name: str, *arguments: object) -> str:
    """What an example prints that ends well."""
    done = run(name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("quickstart.py", ["--target", NOWHERE]),
        ("quickstart_async.py", ["--target", NOWHERE]),
        ("several_servers.py", ["--targets", NOWHERE, "--calls", "2"]),
        pytest.param(
            *("register_images.py", ["--target", NOWHERE, "--out", "out.png"]), marks=pytest.mark.deep
        ),
        pytest.param(
            *("deformable_detector.py", ["--target", NOWHERE]), marks=[pytest.mark.deep, pytest.mark.torch]
        ),
        pytest.param("load_test.py", ["--target", "unix:/nonexistent"], marks=pytest.mark.deep),
    ],
)
def test_without_a_service_it_fails(
    name: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(name, *arguments)
    assert done.returncode == (6 if name == "load_test.py" else 1)
    assert "cannot reach" in done.stderr or "ConnectError" in done.stderr
    assert not (tmp_path / "out.png").exists()


def test_quickstart(server: ServerProcess) -> None:
    text = printed("quickstart.py", "--target", server.address)
    assert "grad_input (2, 8, 6, 6) from cpu:0" in text
    assert "refused with 161002: group_norm_backward: c, group: found" in text


def test_quickstart_async(start_server: StartServer) -> None:
    # Large enough for the call that is given up; it must not be done within 50 ms.
    server = start_server("--input-arena-bytes", "640MiB", "--output-arena-bytes", "256MiB")
    done = run("quickstart_async.py", "--target", server.address, "--calls", "30")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for said in ("30 calls side by side: all right", "in a batch, 8 at a time: all right", "one: right"):
        assert said in done.stdout


def test_several_servers_may_be_given_and_a_lost_one_among_them(server: ServerProcess) -> None:
    lost = "unix:/nonexistent/npugrad.sock"
    text = printed("several_servers.py", "--targets", lost, server.address, "--calls", "20")
    assert "20 of 20 right" in text
    assert "killed" not in text


@pytest.mark.deep
@pytest.mark.slow
def test_no_call_is_lost_when_one_of_several_servers_is_killed() -> None:
    done = run("several_servers.py", "--calls", "300")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert re.search(r"^killed 127\.0\.0\.1:\d+ after 150 answers$", done.stdout, re.MULTILINE)
    (again,) = re.findall(r"^300 of 300 right, (\d+) sent again$", done.stdout, re.MULTILINE)
    assert int(again) >= 1, "nothing was in flight on the victim"


@pytest.mark.parametrize("mutual", [False, True], ids=["server", "mutual"])
def test_secure_connection(
    start_server: StartServer, certificates: Certificates, tmp_path: Path, mutual: bool
) -> None:
    flags = certificates.mutual_flags if mutual else certificates.flags
    caller = certificates.caller()
    server = start_server(*flags, credentials=certificates.credentials(caller if mutual else None))
    own: list[str] = []
    for option, pem in zip(("--key", "--certificate"), caller, strict=True) if mutual else ():
        (tmp_path / option).write_bytes(pem)
        own += [option, str(tmp_path / option)]
    target = ["--target", server.address, "--ca"]
    text = printed("secure_connection.py", *target, certificates.authority, *own)
    assert "grad_beta from cpu:0" in text
    assert float(text.split(", ")[1].split(" from")[0]) < 1e-2
    # Without a certificate of its own, or trusting an authority that has not signed the server's.
    done = run("secure_connection.py", *target, certificates.authority if mutual else certificates.client_ca)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "refused: " in done.stderr


# ------------------------------------------------------------------------------------------ load test


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Each call takes 60 ms by a timer, whatever else the machine does."""
    with run_quick_server(tmp_path_factory.mktemp("known") / "server.log", devices="test:2?ms=60") as running:
        yield running


@pytest.mark.deep
@pytest.mark.slow
def test_objectives_that_are_met(known: ServerProcess, tmp_path: Path) -> None:
    load = ["--rate", "10", "--duration", "1s", "--shared", "--slo", "p50=30s,errors=0.1%"]
    done = run("load_test.py", "--target", known.address, "--out", tmp_path, *load)
    assert done.stdout.count("met: p50: ") == 3, done.stdout + done.stderr
    made = "operands made by the server, not sent: grid_sampler_2d_backward float32 medium recipe"
    assert made in done.stdout
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    verdicts = {0: "no difference", 3: "slower", 4: "inconclusive"}  # the machine is shared
    assert verdicts[done.returncode] in done.stdout or "faster" in done.stdout


@pytest.mark.slow
def test_a_missed_objective_ends_it(known: ServerProcess, tmp_path: Path) -> None:
    load = ["--rate", "10", "--duration", "1s", "--shared", "--slo", "p50=30ms"]
    done = run("load_test.py", "--target", known.address, "--out", tmp_path, *load)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count("$ npugrad bench") == 1
    assert "MISSED: p50: " in done.stdout


# ------------------------------------------------------------------------------------- what learns


@pytest.mark.deep
@pytest.mark.slow
def test_registration_at_least_halves_the_error_and_writes_a_picture(
    server: ServerProcess, tmp_path: Path
) -> None:
    io = pytest.importorskip("skimage.io")
    picture = tmp_path / "out.png"
    text = printed("register_images.py", "--target", server.address, "--out", picture)
    (times,) = re.findall(r"\(([\d.]+) times smaller\)", text)
    assert float(times) >= 2
    pixels = io.imread(picture)
    assert pixels.shape == (2 * 250, 3 * 370, 3)
    assert pixels.std() > 10


@pytest.mark.torch
@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.long
def test_the_detector_learns_to_find_shapes(server: ServerProcess) -> None:
    pytest.importorskip("torch")
    # Not as a fork: it may take longer than these.
    command = [sys.executable, str(EXAMPLES / "deformable_detector.py"), "--target", server.address]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=one, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    (difference,) = re.findall(r"one step: ([\d.e+-]+) from PyTorch's own", text)
    assert 0 < float(difference) <= 1e-4  # not 0: somebody else has computed them
    measured = re.findall(r"^(?:shapes found|overlap.*): ([\d.]+) before, ([\d.]+) after$", text, re.M)
    (found_before, found), (overlap_before, overlap) = (tuple(map(float, pair)) for pair in measured)
    assert found_before < 0.2
    assert found >= 0.85
    assert overlap_before < 0.5
    assert overlap >= 0.75
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", text)]
    assert losses[-1] < losses[0] / 4
    sent = dict(re.findall(r"^(\w+_backward) +sent +- +(\d+) ", text, re.M))
    expected = {"grid_sampler_2d_backward": 160, "group_norm_backward": 800, "layer_norm_backward": 640}
    loss = {"nll_loss_backward": 160, "softmax_backward": 320}
    assert {name: int(count) for name, count in sent.items()} == expected | loss
    assert not re.search(r"^\w+_backward +local ", text, re.M)


@pytest.mark.torch
@pytest.mark.deep
@pytest.mark.slow
def test_the_spatial_transformer_learns(server: ServerProcess) -> None:
    pytest.importorskip("torch")
    text = printed("spatial_transformer.py", "--target", server.address)
    before, after = map(float, re.findall(r"accuracy ([\d.]+) before, ([\d.]+) after", text)[0])
    assert before < 0.5
    assert after >= 0.9
    assert re.search(r"^grid_sampler_2d_backward +sent +- +80 ", text, re.M)


@pytest.mark.torch
def test_gradients_of_the_spatial_transformer_are_those_of_autograd(server: ServerProcess) -> None:
    torch = pytest.importorskip("torch")
    from npugrad_client.torch import remote

    path = EXAMPLES / "spatial_transformer.py"
    spec: Any = importlib.util.spec_from_file_location("spatial_transformer", path)
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
    assert mode.summary().sent == 2  # the sampler and the loss
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


# --------------------------------------------------------------------------------------- the notebook


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 8
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []


@pytest.mark.torch
@pytest.mark.deep
@pytest.mark.slow
# The kernel's libraries warn of each other's plans; nothing of it is ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
def test_the_notebook_runs_in_a_real_kernel_draws_and_ends_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for folder in ("DATA_DIR", "CONFIG_DIR", "RUNTIME_DIR"):
        monkeypatch.setenv(f"JUPYTER_{folder}", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3", cwd=tmp_path).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "from cpu:0 cpu" in text
    assert "161002 group_norm_backward: c, group: found" in text
    (summary,) = (output.data["text/html"] for output in outputs if output.output_type == "execute_result")
    for operator, calls in (("grid_sampler_2d_backward", 150), ("group_norm_backward", 300)):
        assert f"<tr><td>{operator}</td><td>sent</td><td>-</td><td>{calls}</td>" in summary
    assert "the server ended with status 0" in text
    pictures = [output.data["image/png"] for output in outputs if output.output_type == "display_data"]
    assert len(pictures) == 3
    assert all(base64.b64decode(picture).startswith(PNG) for picture in pictures)
