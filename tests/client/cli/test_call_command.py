"""`npugrad call`: from file to file, for each operator and type; and what each mistake is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.calls import sample
from tests.client.cli.command import failed, process, run
from tests.client.fake_service import Gate, abort_with, fake_service, group_norm
from tests.client.terminal import Terminal
from tests.fix_server import ServerProcess
from typer.testing import Result

from npugrad import OPERATORS, Product
from npugrad.errors import InvalidOperand, ServerBusy

CASES = [
    pytest.param(record.name, str(dtype), by_key, id=f"{record.name}-{dtype}-{'key' if by_key else 'flag'}")
    for record in OPERATORS.values()
    for dtype in record.inputs[0].dtypes[Product.ATLAS_A2]
    for by_key in ([True, False] if dtype == "bfloat16" else [True])
]


def is_bf16(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == ml_dtypes.bfloat16


def saved(path: Path, arrays: dict[str, Any], by_key: bool = True) -> str:
    """A call in a file; bfloat16 by the suffix of its key, or as NumPy saves it."""
    keyed = {
        f"{name}:bfloat16" if is_bf16(value) and by_key else name: (
            value.view(np.uint16) if is_bf16(value) and by_key else value
        )
        for name, value in arrays.items()
    }
    np.savez(path, **keyed)
    return str(path)


def call(file: str, out: Path, *arguments: str, target: str = "") -> Result:
    return run("call", "group_norm_backward", file, "-o", str(out), *arguments, target=target)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return saved(tmp_path / "in.npz", group_norm())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.npz"


# ------------------------------------------------------------------------------------------ what comes out


@pytest.mark.parametrize(("operator", "dtype", "by_key"), CASES)
def test_a_call_goes_from_file_to_file_bit_for_bit(
    server: ServerProcess, tmp_path: Path, out: Path, operator: str, dtype: str, by_key: bool
) -> None:
    made = sample(operator, dtype=dtype)
    arrays = {n: a for n, a in made.arrays.items() if a is not None}
    attrs = {n: np.array(v) for n, v in made.call.attrs.items() if v is not None}
    file = saved(tmp_path / "in.npz", {**arrays, **attrs}, by_key)
    raw = [] if by_key else [n for n, a in arrays.items() if is_bf16(a)]
    told = [text for name in raw for text in ("--dtype", f"{name}=bfloat16")]
    result = run("call", operator, file, "-o", str(out), *told, target=server.address)
    assert result.exit_code == 0, result.output
    with np.load(out) as archive:
        found = {key.removesuffix(":bfloat16"): archive[key].tobytes() for key in archive.files}
        assert all(key.endswith(":bfloat16") is (dtype == "bfloat16") for key in archive.files)
    assert found == made.reference()
    assert "on cpu:0 (cpu" in result.stdout
    assert "transport" not in result.stdout
    assert result.stdout.endswith(f"written to {out}\n")


@pytest.mark.parametrize("timeline", [False, True])
def test_a_call_is_json_for_scripts(server: ServerProcess, file: str, out: Path, timeline: bool) -> None:
    """Where the results are and what made them; nothing but JSON is printed."""
    flags = ["--json", "--verify", "--no-progress", *(["--timeline"] if timeline else [])]
    result = call(file, out, *flags, target=server.address)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["file"] == str(out)
    with np.load(out) as archive:
        shapes = {name: (str(archive[name].dtype), list(archive[name].shape)) for name in archive.files}
        norms = {name: pytest.approx(np.linalg.norm(archive[name].ravel())) for name in archive.files}
    told = {n: o for n, o in found["outputs"].items() if o is not None}
    assert {n: (o["dtype"], o["shape"]) for n, o in told.items()} == shapes
    assert {n: o["norm"] for n, o in told.items()} == norms
    assert set(found["outputs"]) == {p.name for p in OPERATORS["group_norm_backward"].outputs}
    assert found["info"]["device"] == "cpu:0"
    assert found["info"]["product"] == "atlas-a2"
    assert found["info"]["verified"]
    assert ("timeline" in found) is timeline


def test_masked_out_results_are_left_out_of_the_file_and_told(
    server: ServerProcess, file: str, tmp_path: Path
) -> None:
    result = call(file, tmp_path / "o", "--attr", "output_mask=false,true,false", target=server.address)
    assert result.exit_code == 0
    assert re.search("grad_input: masked out\ngrad_gamma: .*\ngrad_beta: masked out\n", result.stdout)
    assert f"written to {tmp_path / 'o.npz'}" in result.stdout
    with np.load(tmp_path / "o.npz") as archive:
        assert archive.files == ["grad_gamma"]


def test_without_a_file_for_them_the_results_are_shown_by_shape_and_norm(
    server: ServerProcess, file: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    result = run("call", "group_norm_backward", file, target=server.address)
    assert result.exit_code == 0, result.output
    assert re.search(r"^grad_gamma: float32\[4\], norm \d", result.stdout, re.MULTILINE)
    assert "written to" not in result.stdout
    assert (
        json.loads(run("call", "group_norm_backward", file, "--json", target=server.address).stdout)["file"]
        is None
    )
    assert sorted(tmp_path.iterdir()) == before


def test_flags_stand_above_the_file_and_options_reach_the_server(file: str, out: Path) -> None:
    flags = ("--deterministic", "--verify", "--attr", "output_mask=true,false,false")
    with fake_service() as service:
        assert call(file, out, *flags, target=service.address).exit_code == 0
    (request,) = service.headers
    assert (request.options.deterministic, request.options.verify) == (True, True)
    assert list(request.output_mask.values) == [True, False, False]


# ------------------------------------------------------------------------------------------ progress


@pytest.fixture
def large_file(tmp_path: Path) -> str:
    """Operands of 16 MiB and some."""
    return saved(tmp_path / "large.npz", group_norm(hxw=2**18))


def on_a_terminal(file: str, out: Path, *flags: str, waits_for: str) -> str:
    """What a terminal shows of a call, which the service holds until it has shown this."""
    service = Gate()
    command = ("-m npugrad_client.cli", "call", "group_norm_backward", file, "-o", str(out), *flags)
    with (
        fake_service(service.unary, service.execute) as fake,
        Terminal(*command, NPUGRAD_TARGET=fake.address) as terminal,
    ):
        service.wait_for_call()
        terminal.wait_for(waits_for)
        service.open()
        status, output, shown = terminal.end()
    assert status == 0, shown
    assert "on test:0" in output
    assert output.endswith(f"written to {out}\n")
    assert "group_norm_backward" not in output
    return shown


def test_a_large_call_shows_its_progress_on_a_terminal(large_file: str, out: Path) -> None:
    on_a_terminal(large_file, out, waits_for="group_norm_backward sending .* of 16 MiB")


@pytest.mark.parametrize(
    ("size", "flags", "shown"),
    [
        (2**18, ["--no-progress"], ""),
        (8, [], ""),
        (8, ["--progress"], "group_norm_backward waiting for the result"),
    ],
)
def test_progress_is_shown_of_what_is_large_or_asked_for(
    tmp_path: Path, out: Path, size: int, flags: list[str], shown: str
) -> None:
    file = saved(tmp_path / "in.npz", group_norm(hxw=size))
    found = on_a_terminal(file, out, *flags, waits_for=shown)
    assert bool(found) is bool(shown)


@pytest.mark.parametrize("flags", [(), ("--progress",)])
def test_no_progress_is_shown_where_there_is_no_terminal(
    large_file: str, out: Path, flags: tuple[str, ...]
) -> None:
    command = ("call", "group_norm_backward", large_file, "-o", str(out), *flags)
    with fake_service() as service:
        ended = process(*command, target=service.address)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith(f"written to {out}\n")


# ------------------------------------------------------------------------------------------ what is refused


def test_a_missing_operand_is_null(server: ServerProcess, tmp_path: Path, out: Path) -> None:
    without = {name: value for name, value in group_norm().items() if name != "mean"}
    told = failed(call(saved(tmp_path / "in.npz", without), out, target=server.address), 1)
    assert told.startswith("ACLNN_ERR_PARAM_NULLPTR 161001: group_norm_backward: mean: found null; expected")
    assert " (request " in told
    assert told.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ServerBusy("the queue is full", operator="x"), "QUEUE_FULL: the queue is full (request abc123)\n"),
        (InvalidOperand("x: y", code=161002), "ACLNN_ERR_PARAM_INVALID 161002: x: y (request abc123)\n"),
    ],
    ids=["busy", "invalid"],
)
def test_an_error_of_the_server_is_one_line_with_the_request(
    file: str, out: Path, error: Any, line: str
) -> None:
    with fake_service(lambda record, request, context: abort_with(context, error)) as service:
        assert failed(call(file, out, target=service.address), 1) == line


def test_what_cannot_be_written_is_told_before_the_call(file: str, tmp_path: Path) -> None:
    """The target is where no server listens: a call would fail otherwise."""
    (tmp_path / "file").write_text("")
    assert "out.npz: cannot be written" in failed(call(file, tmp_path / "file" / "out.npz"), 2)


def test_what_makes_no_call_is_told(tmp_path: Path, out: Path) -> None:
    some = {name: value for name, value in group_norm().items() if name not in ("n", "output_mask")}
    told = failed(call(saved(tmp_path / "in.npz", some), out), 2)
    assert told.startswith("group_norm_backward: no value for n, output_mask; set --attr n=VALUE")
    file = saved(tmp_path / "in.npz", {**group_norm(), "gamma": np.array(["a"])})
    assert failed(call(file, out), 2).startswith("group_norm_backward: gamma: found dtype <U1; expected")


def test_the_timeline_is_printed_where_it_is_asked_for(server: ServerProcess, file: str, out: Path) -> None:
    shown = call(file, out, "--timeline", target=server.address).stdout.splitlines()
    heading = next(number for number, line in enumerate(shown) if line.startswith("group_norm_backward: "))
    stages = [line.split()[0] for line in shown[heading + 2 : -1]]
    assert stages[0] == "pack"
    assert {"run", "transport"} <= {*stages}
