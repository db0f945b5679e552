"""The command line, run as a user types it."""

from __future__ import annotations

import subprocess

from tests.client import programs
from typer.testing import CliRunner, Result

from npugrad_client.cli import app

NOWHERE = "unix:/nonexistent/npugrad.sock"
"""An address where no server listens."""


def run(*arguments: str, target: str = "") -> Result:
    environment = {"NPUGRAD_TARGET": target or NOWHERE}
    return CliRunner().invoke(app, arguments, env=environment)


def process(*arguments: str, target: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return programs.run("-m npugrad_client.cli", *arguments, NPUGRAD_TARGET=target or NOWHERE, **environment)


def flags(name: str, values: tuple[str, ...]) -> list[str]:
    return [text for value in values for text in (name, value)]


def failed(result: Result, status: int) -> str:
    """The one line of a command that failed as expected."""
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr
