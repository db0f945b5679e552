"""Shared by all commands: consoles, common options, and errors as one line and an exit status."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from npugrad import OPERATORS, NpugradError
from npugrad_client import ConnectError, OperatorError, TlsError, UsageError
from npugrad_client._cli import files
from npugrad_client._cli.explain import UnknownSubject, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.operator import OpRecord

_PIPED_WIDTH = 200
"""Width without a terminal: wide, so that lines are not broken for grep."""


def _console(*, stderr: bool = False) -> Console:
    is_told = "COLUMNS" in os.environ or (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_told else _PIPED_WIDTH
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


out, err = _console(), _console(stderr=True)
STDOUT = Path("-")
"""Stands for standard output where a file is asked for."""

Timeout = Annotated[float, typer.Option("--timeout", help="Deadline of the call in seconds.")]


def console_for(json_file: Path | None) -> Console:
    """Where text goes: standard output, unless the JSON goes there."""
    return err if json_file == STDOUT else out


def write_json(path: Path, text: str) -> None:
    """Writes JSON to a file or to `STDOUT`; raises FileError if the file cannot be written."""
    if path == STDOUT:
        typer.echo(text, nl=False)
    else:
        files.write_text(path, text)


def fail(message: str, status: int = 1) -> NoReturn:
    """Ends the command with a message on standard error."""
    err.print(message, soft_wrap=True)
    raise typer.Exit(status)


@contextmanager
def reporting(failed: int = 1) -> Iterator[None]:
    """Turns errors that a user can act on into one line and a status: 2 for wrong usage, else `failed`."""
    try:
        yield
    except (files.FileError, UnknownSubject, UsageError) as error:
        fail(str(error), 2)
    except TlsError as error:
        fail(str(error), failed)
    except ConnectError as error:
        fail(f"{error}\nIs a server listening there? Start one with: npugrad-server serve", failed)
    except NpugradError as error:
        number = f" {error.code}" if isinstance(error, OperatorError) and error.code is not None else ""
        request = f" (request {error.request_id})" if error.request_id else ""
        fail(f"{error.reason}{number}: {error}{request}", failed)
    except (TypeError, ValueError) as error:  # a name or a value that the client itself rejects
        fail(str(error), 2)


def find_record(name: str) -> OpRecord:
    """The operator of this name.

    Raises:
        UnknownSubject: There is none; the message suggests the nearest one.
    """
    if name not in OPERATORS:
        raise UnknownSubject(f"OPERATOR: {nearest(name, OPERATORS, ', '.join(OPERATORS))}")
    return OPERATORS[name]
