from __future__ import annotations

import io
import re
from contextlib import redirect_stdout

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
    blocks = re.split(r"^(?=\w)", run(app, ["ops"]).stdout, flags=re.MULTILINE)[1:]
    for block, record in zip(blocks, OPERATORS.values(), strict=True):
        head, *rows = block.splitlines()
        assert head == f"{record.name} ({record.aclnn_name})"
        shown = dict(re.split(r"\s{2,}", row.strip())[:2] for row in rows if row[2] != " ")
        leader = record.inputs[0].dtypes
        assert shown == {str(p): ", ".join(leader[p]) if p in leader else "not available" for p in Product}


class Terminal(io.StringIO):
    """Standard output that is a terminal; a dumb one has 80 columns."""

    def isatty(self) -> bool:
        return True


def test_ops_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    with redirect_stdout(Terminal()) as terminal:
        app(["ops"], standalone_mode=False)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for record in OPERATORS.values():
        assert f"{record.name} ({record.aclnn_name})" in lines
    assert "\u2026" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["serve", "--lisen", "x"], "No such option"),
        (["serve", "--listen", "nowhere"], "listen: found 'nowhere'; expected host:port"),
        (["serve", "--listen", "0.0.0.0:1"], "--insecure"),
        (["serve", "--metrics-listen", "host:65536"], "metrics_listen: found 'host:65536'; expected host"),
        (["serve", "--listen", "unix:" + 108 * "x"], "listen: found a socket path of 108 bytes in 'unix:x"),
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
