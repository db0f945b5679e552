from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

import npugrad
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_server.cli import FAILED, USAGE, app
from npugrad_server.config import ServerSettings

run = CliRunner().invoke


def test_version() -> None:
    result = run(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"npugrad-server {npugrad.__version__}\n")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_every_setting_is_a_flag_with_its_description_default_and_variable(command: str) -> None:
    shown = " ".join(run(app, [command, "--help"], env={"COLUMNS": "200"}).stdout.split())
    for name, field in ServerSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert f"env NPUGRAD_{name.upper()}]" in shown
        assert " ".join((field.description or "?").split()) in shown
    assert "--config FILE" in shown


def test_ops_shows_every_operator_with_its_dtypes_by_product() -> None:
    shown = run(app, ["ops"]).stdout
    for spec in OPERATORS.values():
        assert spec.name in shown
        assert spec.aclnn_name in shown
    for product in Product:
        assert str(product) in shown
    row = next(line for line in shown.splitlines() if "group_norm_backward" in line)
    cells = [cell.strip() for cell in re.split("[│|]", row)[3:6]]
    assert cells == ["float32, float16", "float32, float16, bfloat16", "float32, float16, bfloat16"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["serve", "--lisen", "x"], "No such option"),
        (["serve", "--listen", "nowhere"], "listen: found 'nowhere'; expected host:port"),
        (["serve", "--listen", "0.0.0.0:1"], "--insecure"),
        (["serve", "--max-queue-depth", "none"], "max_queue_depth: found 'none'"),
        (["serve", "--config", "/nonexistent.toml"], "config: cannot read"),
        (["start"], "No such command"),
        ([], "Usage"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(arguments: list[str], complaint: str) -> None:
    result = run(app, arguments)
    assert result.exit_code == USAGE
    assert complaint in result.output


def test_start_that_fails_ends_with_1_and_says_why() -> None:
    result = run(app, ["serve", "--listen", "127.0.0.1:0", "--metrics-listen", "", "--devices", "gpu:0"])
    assert result.exit_code == FAILED
    assert "devices: found device 'gpu:0'" in result.output
