"""`npugrad advise`: a user's script is run, measured and left as it is; each mistake is one line."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from typing import Any

import pytest
from tests.client.cli.command import NOWHERE, failed, process, run

from npugrad_client._cli import terminal

torch = pytest.importorskip("torch")

from pathlib import Path

from tests.client.torch.composed_attention import library
from tests.fix_server import ServerProcess

pytestmark = pytest.mark.torch

MODEL = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 1), torch.nn.GroupNorm(4, 16), torch.nn.LayerNorm(12))
x = torch.randn(2, 3, 10, 12)
"""
STEPS = """
for step in range(10):
    model(x).square().mean().backward()
    print("step", step)
"""
NORMS = ["group_norm_backward", "layer_norm_backward"]


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text), "utf-8")
        return str(path)

    return write


def advice(server: ServerProcess, *arguments: str) -> Any:
    ran = run("advise", "--json", *arguments, target=server.address)
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_it_tells_what_each_operator_takes_here_and_there(server: ServerProcess, script: Any) -> None:
    found = advice(server, script(MODEL + STEPS))
    assert (found["passes"], found["is_warm"]) == (3, True)
    kinds = {row["operator"]: row["kind"] for row in found["rows"]}
    assert kinds == dict.fromkeys(NORMS, "float32[2,16,10,12]")
    won_s = 0.0
    for row in found["rows"]:
        assert row["calls"] == 1
        assert row["bytes"] >= 3 * 4 * 2 * 16 * 10 * 12
        assert row["local_s"] > 0
        assert row["remote_s"] > 0
        assert row["send"] is (row["remote_s"] < 0.95 * row["local_s"])
        won_s += row["won_s"]
    assert found["known_s"] == pytest.approx(sum(row["local_s"] for row in found["rows"]))
    assert 0 < found["backward_s"] < found["step_s"]
    assert found["all_sent_s"] == pytest.approx(found["backward_s"] - won_s)


def test_a_person_gets_a_table_and_sentences(
    server: ServerProcess, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal.out(), "width", 200)
    ran = run("advise", script(MODEL + STEPS), target=server.address)
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.splitlines()
    assert lines[:5] == [f"step {number}" for number in range(5)]  # the sixth backward pass is the last
    lines = lines[5:]
    assert "3 backward passes, after one to warm up; server " in lines[0]
    columns = ["operator", "kind", "calls", "MiB", "ms here", "ms sent", "saved ms", "advice"]
    assert re.split(" {2,}", lines[1].strip()) == columns
    assert sorted(line.split()[0] for line in lines[2:-3]) == NORMS
    assert lines[-3].startswith("A backward pass takes ")
    assert lines[-2].startswith("With all of these sent, it would take about ")
    ends = ("Send nothing: every operator is faster here.", "Sending only those that save time")
    assert lines[-1].startswith(ends)
    monkeypatch.setattr(terminal.out(), "width", 80)  # a narrow terminal gets every number
    ran = run("advise", script(MODEL + STEPS), target=server.address)
    assert "advice" in ran.stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in ran.stdout


def test_what_a_script_prints_is_not_in_the_json(server: ServerProcess, script: Any) -> None:
    ran = run("advise", "--json", script(MODEL + STEPS), target=server.address)
    json.loads(ran.stdout)
    assert "step 0\n" in ran.stderr


def test_its_arguments_are_the_scripts_own(server: ServerProcess, script: Any) -> None:
    program = MODEL + "assert sys.argv[1:] == ['--steps', '1', '--json', 'x'], sys.argv\n" + STEPS
    before = sys.argv, sys.path[:]
    assert advice(server, "--steps", "2", script(program), "--steps", "1", "--json", "x")["passes"] == 1
    assert (sys.argv, sys.path) == before


def test_a_module_beside_the_script_is_found_and_zero_steps_let_it_run_to_its_end(
    server: ServerProcess, script: Any, tmp_path: Path
) -> None:
    (tmp_path / "beside_the_script.py").write_text(MODEL, "utf-8")
    program = "from beside_the_script import *\nassert __name__ == '__main__'\n" + STEPS
    assert advice(server, "--steps", "0", script(program))["passes"] == 5


def test_torch_is_as_before_afterwards(server: ServerProcess, script: Any) -> None:
    before = torch.autograd.backward, torch.autograd.grad
    advice(server, script(MODEL + STEPS))
    failed(run("advise", script("raise SystemExit(3)"), target=server.address), 1)
    assert (torch.autograd.backward, torch.autograd.grad) == before


GRADIENTS = """
for _ in range(3):
    torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
"""
CHECKPOINT = """
from torch.utils.checkpoint import checkpoint
x.requires_grad_()
for _ in range(3):
    checkpoint(model, x, use_reentrant=True).square().mean().backward()
"""


@pytest.mark.parametrize("steps", [GRADIENTS, CHECKPOINT], ids=["grad", "reentrant checkpoint"])
def test_other_ways_to_a_backward_pass(server: ServerProcess, script: Any, steps: str) -> None:
    found = advice(server, script(MODEL + steps))
    assert found["passes"] == 1
    assert [row["calls"] for row in found["rows"]] == [1, 1]


REMOTE = """
from concurrent.futures import ThreadPoolExecutor
from npugrad_client import Client
from npugrad_client.torch import remote
def step():
    model.zero_grad()
    model(x).square().mean().backward()
def train():
    with Client("ADDRESS") as client, remote(client, min_bytes=0) as mode:
        for _ in range(3):
            step()
    assert mode.summary().rows == (), str(mode.summary())
"""
HERE = """
step()
expected = [parameter.grad.clone() for parameter in model.parameters()]
train()
for parameter, gradient in zip(model.parameters(), expected):
    assert torch.equal(parameter.grad, gradient)
"""
IN_A_THREAD = """
with ThreadPoolExecutor(1) as pool:
    pool.submit(train).result()
"""
ATTENTION = """
import sys
home = sys.modules["mmcv.ops.multi_scale_deform_attn"]
from tests.client.torch.composed_attention import operands
call = operands()
def step():
    home.multi_scale_deformable_attn_pytorch(*call).sum().backward()
train()
"""


@pytest.mark.parametrize(
    ("way", "operators", "passes"),
    [(HERE, NORMS, 2), (IN_A_THREAD, NORMS, 1), (ATTENTION, ["grid_sampler_2d_backward"], 1)],
    ids=["here", "in a thread", "deformable attention"],
)
def test_a_remote_of_the_script_sends_nothing_and_gradients_are_pytorchs_own(
    server: ServerProcess,
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    operators: list[str],
    passes: int,
) -> None:
    library(monkeypatch)
    program = MODEL + REMOTE.replace("ADDRESS", server.address) + way
    found = advice(server, "--steps", "0", script(program))
    assert found["passes"] == passes
    assert sorted({row["operator"] for row in found["rows"]}) == operators
    assert all(row["calls"] >= 1 and row["remote_s"] > 0 for row in found["rows"])


@pytest.mark.slow
def test_a_process_that_the_script_forks_is_its_own(server: ServerProcess, script: Any) -> None:
    program = """
    import os
    child = os.fork()
    for _ in range(2 if child else 4):
        model(x).square().mean().backward()
    if not child:
        os._exit(7)  # which it does not reach if its passes are counted
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    model(x).square().mean().backward()
    raise SystemExit("was not ended")
    """
    path = script("import torch\ntorch.set_num_threads(1)\n" + MODEL + textwrap.dedent(program))
    ran = process("advise", "--steps", "3", path, target=server.address)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert "1 backward pass, after one to warm up" in ran.stdout


def test_what_the_documents_refuse_is_told_with_its_number(server: ServerProcess, script: Any) -> None:
    program = MODEL + "model, x = model.double(), x.double()\n" + STEPS
    rows = advice(server, script(program))["rows"]
    assert [row["remote_s"] for row in rows] == [None, None]
    assert all(row["why"].startswith("refused with 161002, ") for row in rows)
    assert run("advise", script(program), target=server.address).stdout.endswith(
        "There is nothing to send.\n"
    )


# ---------------------------------------------------------------------------------------------- bad input


def test_a_script_without_a_backward_pass_is_told(server: ServerProcess, script: Any) -> None:
    path = script(MODEL + "model(x)\n")
    message = failed(run("advise", path, target=server.address), 1)
    assert message.startswith(f"{path}: there was no backward pass; it must call backward()")


def test_a_backward_pass_without_a_known_operator_is_an_answer(server: ServerProcess, script: Any) -> None:
    path = script("import torch\n(torch.ones(3, requires_grad=True) ** 2).sum().backward()\n")
    ran = run("advise", path, target=server.address)
    assert ran.exit_code == 0
    assert ran.stdout.endswith("There is nothing to send.\n")
    assert advice(server, path)["rows"] == []


def test_a_script_that_fails_shows_its_own_traceback(server: ServerProcess, script: Any) -> None:
    path = script(MODEL + "def inner():\n    return 1 / 0\ninner()\n")
    ran = run("advise", path, target=server.address)
    assert ran.exit_code == 1
    lines = ran.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{path}", line ')
    assert "runpy" not in ran.stderr
    assert "ZeroDivisionError: division by zero" in lines
    assert lines[-1] == f"{path} failed with ZeroDivisionError, see above, so there is no advice"
    ran = run("advise", script("def (:\n"), target=server.address)
    assert ran.exit_code == 1
    assert "SyntaxError: invalid syntax" in ran.stderr


@pytest.mark.parametrize(("code", "shown"), [("3", "3"), ("'no data'", "'no data'")])
def test_a_script_that_ends_with_a_status_is_no_measurement(
    server: ServerProcess, script: Any, code: str, shown: str
) -> None:
    path = script(f"import sys\nsys.exit({code})\n")
    message = failed(run("advise", path, target=server.address), 1)
    assert message == f"{path} ended with {shown}, so there is no advice\n"


def test_a_script_that_ends_by_exit_is_measured(server: ServerProcess, script: Any) -> None:
    program = MODEL + "model(x).square().mean().backward()\nsys.exit(0)\n"
    found = advice(server, script(program))
    assert (found["passes"], found["is_warm"], found["step_s"]) == (1, False, None)


def test_without_a_server_the_script_is_not_run(script: Any, tmp_path: Path) -> None:
    path = script(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert f"cannot reach {NOWHERE}: " in failed(run("advise", path), 1)
    assert not (tmp_path / "ran").exists()


def test_a_failure_of_the_service_is_one_line(server: ServerProcess, script: Any) -> None:
    program = MODEL + "from npugrad_client import ConnectError\nraise ConnectError('gone')\n"
    assert "gone" in failed(run("advise", script(program), target=server.address), 1)


@pytest.mark.parametrize("name", ["missing.py", "."])
def test_what_is_no_file_is_wrong_usage(tmp_path: Path, name: str) -> None:
    message = failed(run("advise", str(tmp_path / name)), 2)
    assert message.startswith("SCRIPT: there is no file ")
