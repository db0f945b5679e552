"""The command line as a user types it: output, exit status, one line for each mistake."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.client.cli.command import NOWHERE, failed, flags, process, run
from tests.client.fake_service import group_norm
from tests.fix_server import ServerProcess
from tests.operators import MSDA
from typer.testing import CliRunner

import npugrad
from npugrad import OPERATORS
from npugrad.dtypes import DType
from npugrad_client import OperatorInfo
from npugrad_client._cli import show
from npugrad_client._info import ParameterInfo
from npugrad_client.cli import app

LEGAL = ("grad_out=float32[2,3,4]", "input=float32[2,3,4]", "mean=float32[2]", "rstd=float32[2]")
ATTRS = ("n=2", "c=3", "hxw=4", "group=1", "output_mask=true,true,false")
NORM = ["validate", "group_norm_backward", *flags("--attr", ATTRS)]
LEGAL_NORM = [*NORM, *flags("--meta", LEGAL)]


# ------------------------------------------------------------------------------------------------ general


def test_without_arguments_it_shows_what_there_is() -> None:
    result = run()
    for command in ("info", "ops", "validate", "call", "explain", "demo", "bench", "advise"):
        assert f" {command} " in result.output


def test_it_tells_its_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"npugrad {npugrad.__version__}\n")


@pytest.mark.slow
def test_help_is_written_to_an_ascii_terminal_and_a_mistake_in_one_line() -> None:
    """All in one process; some words are cut short there, with a sign that ASCII has not."""
    program = """
    import sys
    from npugrad_client.cli import main
    for command in ("", "info", "ops", "validate", "call", "explain", "demo", "advise",
                    "bench", "bench compare", "bench report", "bench scenarios"):
        sys.argv = ["npugrad", *command.split(), "--help"]
        try:
            main()
        except SystemExit as end:
            assert end.code == 0, command
    sys.argv = ["npugrad", "validate", "group_norm"]
    main()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    ran = subprocess.run(command, capture_output=True, env=environment, timeout=550, check=False)
    assert ran.returncode == 2
    assert ran.stderr == b"OPERATOR: found 'group_norm'; did you mean group_norm_backward?\n"
    assert ran.stdout.isascii()
    assert ran.stdout.count(b"Usage: npugrad") == 12


@pytest.mark.slow
def test_as_a_process_it_reads_its_target_and_writes_lines_for_grep(server: ServerProcess) -> None:
    ran = process("ops", target=server.address, COLUMNS="")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    (line,) = [line for line in ran.stdout.splitlines() if "-> grad_input, grad_gamma" in line]
    assert line.strip().startswith("grad_out, input, mean, rstd, ")
    assert line.strip().endswith("-> grad_input, grad_gamma, grad_beta")


@pytest.mark.parametrize("command", [["info"], ["ops"], NORM])
def test_a_server_that_is_not_there_is_told_with_what_to_do(command: list[str]) -> None:
    message = failed(run(*command), 1)
    assert f"cannot reach {NOWHERE}: " in message
    assert message.endswith("Is a server listening there? Start one with: npugrad-server serve\n")


# -------------------------------------------------------------------------------------------- info and ops


def test_info_tells_what_a_person_asks(server: ServerProcess) -> None:
    result = run("info", "--target", server.address)
    assert result.exit_code == 0
    for piece in (f"at {server.address}, product atlas-a2, serving", "cpu:0", "ready", "queue: 0 of"):
        assert piece in result.stdout
    assert "results compared: NOT, but for calls with verify:" in result.stdout


def test_info_is_json_for_scripts(server: ServerProcess) -> None:
    found = json.loads(run("info", "--json", target=server.address).stdout)
    assert found["product"] == "atlas-a2"
    assert found["devices"][0]["name"] == "cpu:0"
    assert found["limits"]["max_queue_depth"] > 0
    assert found["operators"] == list(OPERATORS)


def test_ops_describes_the_servers_product_or_another(server: ServerProcess) -> None:
    mine = run("ops", target=server.address).stdout
    other = run("ops", "--product", "atlas-training", target=server.address).stdout
    for name in OPERATORS:
        assert f"{name}: aclnn" in mine
    assert mine.count("; constraints on the server's product: ") == len(OPERATORS)
    assert "NOT on this product" not in mine
    assert other.count("NOT on this product") == 2
    assert other.count("; constraints on atlas-training: ") == len(OPERATORS)


def test_ops_is_json_for_scripts(server: ServerProcess) -> None:
    listed = json.loads(run("ops", "--json", target=server.address).stdout)
    assert [o["name"] for o in listed] == list(OPERATORS)
    rules = [[c for c in s.constraints if c.applies(npugrad.Product.ATLAS_A2)] for s in OPERATORS.values()]
    assert [len(o["constraints"]) for o in listed] == [len(each) for each in rules]


def test_ops_shows_one_operator_in_full(server: ServerProcess) -> None:
    for operator, record in OPERATORS.items():
        result = run("ops", operator, target=server.address)
        assert result.exit_code == 0, result.output
        assert result.stdout.count(": aclnn") == 1
        for param in record.params:
            assert f"\n{param.name} " in result.stdout
        assert result.stdout.endswith(f"Its constraints on all products: npugrad explain {operator}\n")
    (found,) = json.loads(run("ops", operator, "--json", target=server.address).stdout)
    assert found["name"] == operator


def test_an_unknown_operator_or_product_is_wrong_usage(server: ServerProcess) -> None:
    message = failed(run("ops", "group_norm", target=server.address), 2)
    assert message == "OPERATOR: found 'group_norm'; did you mean group_norm_backward?\n"
    for command in (["ops"], ["validate", "group_norm_backward", "--local"]):
        message = failed(run(*command, "--product", "b9"), 2)
        assert message == "--product: unknown product 'b9'; known are atlas-training, atlas-a2, atlas-a3\n"


# ------------------------------------------------------------------------------------------------ validate


@pytest.mark.parametrize("where", [["--local"], []], ids=["local", "server"])
def test_a_legal_call_has_its_outputs_told(server: ServerProcess, where: list[str]) -> None:
    result = run(*LEGAL_NORM, *where, target=server.address)
    assert result.exit_code == 0
    told = (
        "group_norm_backward: status 0, legal; outputs:\n"
        "  grad_input: float32[2, 3, 4]\n  grad_gamma: float32[3]\n  grad_beta: masked out\n"
    )
    assert result.stdout.startswith(told)
    predicted = result.stdout[len(told) :]
    assert not (where and predicted)
    assert re.fullmatch(r"(predicted now: \S+ s of waiting(, \S+ s of running)?\n)?", predicted)


@pytest.mark.parametrize("where", [["--local"], []], ids=["local", "server"])
def test_every_broken_rule_is_told_with_its_source(server: ServerProcess, where: list[str]) -> None:
    broken = ["--meta", "grad_out=int8[2,3,4]", "--attr", "group=0"]
    result = run(*NORM, *broken, *where, target=server.address)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "group_norm_backward: status 161001, 5 constraints violated:"
    assert "  161001 mean.not_null: mean: found null; expected a tensor" in lines
    after = lines[lines.index("  161002 group.positive: group: found 0; expected above 0") + 1]
    assert after.strip().startswith("group is greater than 0. (aclnnGroupNormBackward, return codes, 161002")


def test_a_verdict_is_json_for_scripts(server: ServerProcess) -> None:
    local, remote = run(*NORM, "--json", "--local"), run(*NORM, "--json", target=server.address)
    assert local.exit_code == remote.exit_code == 1
    verdict = json.loads(local.stdout)
    assert verdict == json.loads(remote.stdout)
    assert verdict["status"] == 161001
    assert verdict["violations"][0]["id"] == "grad_out.not_null"
    assert verdict["violations"][0]["sources"]
    legal = json.loads(run(*LEGAL_NORM, "--json", "--local").stdout)
    assert legal["outputs"]["grad_input"] == {"dtype": "float32", "shape": [2, 3, 4]}
    assert legal["outputs"]["grad_beta"] is None


def test_declared_outputs_are_validated_too() -> None:
    declared = ["--output", "grad_input=null", "--output", "grad_gamma=float32[4]"]
    result = run(*LEGAL_NORM, "--local", *declared)
    assert "161001 grad_input.not_null" in result.stdout
    assert "161002 grad_gamma.shape" in result.stdout


def test_the_product_decides() -> None:
    command = ["validate", "fused_floyd_attention_grad", "--local", "--attr", "scale_value=1"]
    result = run(*command, "--product", "atlas-training")
    assert result.exit_code == 1
    assert result.stdout.startswith("fused_floyd_attention_grad: status 561003, 1 constraint violated:\n")


def test_a_file_is_validated_and_flags_stand_above_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "call.npz", **group_norm())
    command = ["validate", "group_norm_backward", str(tmp_path / "call.npz"), "--local"]
    assert run(*command).exit_code == 0
    assert "161002 group.positive" in run(*command, "--attr", "group=0").stdout
    assert "161001 mean.not_null" in run(*command, "--meta", "mean=null").stdout
    assert "gamma.same_dtype" in run(*command, "--meta", "gamma=bfloat16[4]").stdout


def test_a_files_levels_are_checked(tmp_path: Path) -> None:
    operands = MSDA.make_inputs(MSDA.build(), np.random.default_rng(0))
    operands["level_start_index"] = np.array([0, -1])
    np.savez(tmp_path / "call.npz", **operands)  # type: ignore[arg-type]
    message = (
        "UNSAFE_LEVELS: multi_scale_deformable_attention_grad: level_start_index: level 1: found a negative "
        "start; expected 0 or more\n"
    )
    assert failed(run("validate", MSDA.name, str(tmp_path / "call.npz"), "--local"), 1) == message


def test_a_file_with_a_type_that_has_no_data_gets_the_documented_code(tmp_path: Path) -> None:
    np.savez(tmp_path / "call.npz", **{**group_norm(), "grad_out": np.zeros((2, 4, 8), np.complex64)})
    result = run("validate", "group_norm_backward", str(tmp_path / "call.npz"), "--local")
    assert "161002 grad_out.dtype: grad_out: found dtype complex64; expected" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["groupnorm"], "OPERATOR: found 'groupnorm'; did you mean group_norm_backward?"),
        (["group_norm_backward"], "no value for n, c, hxw, group; set --attr n=VALUE"),
        ([*NORM[1:], "--meta", "x=float32[2]"], "unknown input 'x'"),
        ([*NORM[1:], "--output", "x=null"], "unknown output 'x'"),
        (["group_norm_backward", "--attr", "n=two"], "--attr n=two: expected an integer"),
        (["group_norm_backward", "none.npz"], "none.npz: no such file"),
        (["group_norm_backward", "--meta", "mean"], "found 'mean'; expected NAME=DTYPE[SIZES]"),
    ],
    ids=["operator", "attributes", "input", "output", "number", "file", "meta"],
)
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    told = failed(run("validate", "--local", *arguments), 2)
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", ""], "target: found empty text; expected host:port, unix:path or dns:///name:port"),
        (["--target", "a:1,b:70000"], "target: found port '70000' in 'b:70000'; expected 1 to 65535"),
        (["--timeout", "nan"], "timeout_s: found nan; expected seconds above 0, or None"),
    ],
)
def test_what_the_client_does_not_take_is_wrong_usage(arguments: list[str], message: str) -> None:
    assert failed(run("info", *arguments), 2) == message + "\n"


def test_an_attribute_outside_int64_is_malformed() -> None:
    told = failed(run(*NORM, "--local", "--attr", f"n={2**63}"), 1)
    assert told.startswith("MALFORMED_REQUEST: group_norm_backward: n: found 9223372036854775808; expected")


# ------------------------------------------------------------------------------------------------ explain


def test_explain_needs_no_server_and_guides_a_slip() -> None:
    result = run("explain", "group_norm_backward", "c.per_group")
    assert result.exit_code == 0
    assert "both sides" not in result.stdout
    assert "C / group is at most 8000." in result.stdout
    assert failed(run("explain", "161020"), 2).startswith("found '161020'; did you mean 161002")


def test_explain_and_validate_follow_the_pages_of_a_release() -> None:
    found = json.loads(run("explain", "layer_norm_backward", "--cann", "8.5.0", "--json").stdout)["operator"]
    assert ([*found["products"]], found["cann"]) == (["atlas-a2", "atlas-a3"], "8.5.0")
    old = run("explain", "multi_scale_deformable_attention_grad", "--cann", "8.2")
    assert "By the pages of CANN 8.5.0.\n  gradOutput has rank 4; npugrad: 3 as well\n" in old.stdout
    warned = "warning: CANN 8.2: the pages of 8.5.0 to 9.2.0-beta.2 are known; calls are checked by those of"
    assert " ".join(old.stderr.split()) == f"{warned} 8.5.0"
    product = ("--local", "--product", "atlas-training", "--cann")
    assert "561103 product.supported: product: found Atlas training" in run(*NORM, *product, "8.5.0").stdout
    assert "product.supported" not in run(*NORM, *product, "9.0.0").stdout
    assert failed(run(*NORM, "--local", "--cann", "new"), 2).startswith("cann: found 'new'; expected a rel")
    assert failed(run(*NORM, "--cann", "9.0.0"), 2).startswith("--cann: found it without --local; expected")


# ------------------------------------------------------------------------------------- records made by hand


@pytest.mark.parametrize(
    ("dtypes", "supported", "first", "types"),
    [
        ((DType.FLOAT32,), True, "some_grad: aclnnSomeGrad", "types: float32;"),
        (
            (DType.FLOAT32, DType.FLOAT16),
            False,
            "some_grad: aclnnSomeGrad, NOT on the server's devices; a call returns the reason",
            "types: float32, float16;",
        ),
        ((), False, "some_grad: aclnnSomeGrad, NOT on this product", "types: none;"),
    ],
)
def test_an_operator_that_is_not_there_is_told_with_who_lacks_it(
    dtypes: tuple[DType, ...], supported: bool, first: str, types: str
) -> None:
    """A product without the operator gives its operands no types; a node without its functions does."""
    operand = ParameterInfo("grad", "grad", "input", "(N)", dtypes, optional=False)
    operator = OperatorInfo("some_grad", "aclnnSomeGrad", "Gradients.", (operand,), (), supported, "9.0")
    printed = io.StringIO()
    show.operators(Console(file=printed, width=200), (operator,), "atlas-a2")
    lines = printed.getvalue().splitlines()
    assert lines[0] == first
    assert lines[2].strip().startswith(types)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("npugrad call gri", ["grid_sampler_2d_backward", "grid_sampler_3d_backward"]),
        ("npugrad ops layer", ["layer_norm_backward"]),
        ("npugrad validate --product atlas-a", ["atlas-a2", "atlas-a3"]),
        ("npugrad explain QUEUE", ["QUEUE_FULL"]),
        ("npugrad explain 1610", ["161001", "161002"]),
        ("npugrad explain aclnnL", ["aclnnLayerNormBackward"]),
        ("npugrad explain group_norm_backward c.per", ["c.per_group"]),
        ("npugrad explain aclnnGroupNormBackward c.per", ["c.per_group"]),
        ("npugrad explain layer_norm_backward c.per", []),
        ("npugrad bench --operator fused", ["fused_floyd_attention_grad"]),
        ("npugrad bench --scenario detection-", ["detection-decoder", "detection-encoder"]),
    ],
)
def test_a_shell_completes_names(line: str, expected: list[str]) -> None:
    asked = {"_NPUGRAD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    result = CliRunner().invoke(app, prog_name="npugrad", env=asked)
    assert result.stdout.split() == expected
