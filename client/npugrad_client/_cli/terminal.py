"""Shared by all commands: consoles, common options, and errors as one line and an exit status."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from npugrad.errors import ConnectError, NpugradError, OperatorError, UsageError
from npugrad.ops import OPERATORS
from npugrad.products import Product, product_from_name
from npugrad.profiles import asked_release

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from npugrad.operator import OpRecord
    from npugrad.releases import CannRelease

_PIPED_WIDTH = 200
"""Width without a terminal: wide, so that lines are not broken for grep."""


STDOUT = Path("-")
"""Stands for standard output where a file is asked for."""

CannOption = Annotated[
    str | None,
    typer.Option(
        metavar="RELEASE", help="CANN release whose pages decide, such as 9.1.0. Default: the records' own."
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", help="Deadline of the call in seconds.")]


class FileError(Exception):
    """A file or an argument does not describe a call; the message says what was found and expected."""


@cache
def out() -> Console:
    """The console of standard output; made at first use, as completion and help need none."""
    return _console(is_error=False)


@cache
def err() -> Console:
    """The console of standard error."""
    return _console(is_error=True)


def _console(*, is_error: bool) -> Console:
    from rich.console import Console

    is_told = "COLUMNS" in os.environ or (sys.stderr if is_error else sys.stdout).isatty()
    width = None if is_told else _PIPED_WIDTH
    return Console(stderr=is_error, highlight=False, markup=False, emoji=False, width=width)


def console_for(json_file: Path | None) -> Console:
    """Where text goes: standard output, unless the JSON goes there."""
    return err() if json_file == STDOUT else out()


def write_json(path: Path, text: str) -> None:
    """Writes JSON to a file or to `STDOUT`; raises FileError if the file cannot be written."""
    if path == STDOUT:
        typer.echo(text, nl=False)
    else:
        write_text(path, text)


def check_writable(path: Path) -> None:
    """Raises FileError if `write_text` would, before there is a text; creates nothing."""
    number = 0
    if path.is_dir():
        number = errno.EISDIR
    elif not path.parent.is_dir():
        number = errno.ENOTDIR if path.parent.exists() else errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        number = errno.EACCES
    if number:
        raise FileError(f"{path}: cannot be written: {os.strerror(number)}")


def write_text(path: Path, text: str) -> None:
    """Writes a text file; raises FileError when it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from None


def fail(message: str, status: int = 1) -> NoReturn:
    """Ends the command with a message on standard error."""
    err().print(message, soft_wrap=True)
    raise typer.Exit(status)


@contextmanager
def reporting(failed: int = 1) -> Iterator[None]:
    """Turns errors that a user can act on into one line and a status: 2 for wrong usage, else `failed`."""
    try:
        yield
    except (FileError, UsageError) as error:
        fail(str(error), 2)
    except ConnectError as error:
        from npugrad_client import TlsError  # here, as it needs gRPC, which is loaded by now

        is_there = isinstance(error, TlsError) or "closed the connection" in str(error)
        hint = "" if is_there else "\nIs a server listening there? Start one with: npugrad-server serve"
        fail(f"{error}{hint}", failed)
    except NpugradError as error:
        number = f" {error.code}" if isinstance(error, OperatorError) and error.code is not None else ""
        request = f" (request {error.request_id})" if error.request_id else ""
        fail(f"{error.reason}{number}: {error}{request}", failed)
    except (TypeError, ValueError) as error:  # a name or a value that the client itself rejects
        fail(str(error), 2)


def product_named(name: str | None) -> Product | None:
    """The product of an option; None if it was not given."""
    try:
        return None if name is None else product_from_name(name)
    except ValueError as error:
        raise FileError(f"--product: {error}") from None


def cann_release(text: str | None) -> CannRelease | None:
    """The release that was asked for; says on standard error if its pages are not known."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        release = asked_release(text)
    for each in told:
        err().print(f"warning: {each.message}")
    return release


def find_record(name: str) -> OpRecord:
    """The operator of this name.

    Raises:
        UnknownSubject: There is none; the message suggests the nearest one.
    """
    if name not in OPERATORS:
        from npugrad_client._cli.explain import UnknownSubject, nearest

        raise UnknownSubject(f"OPERATOR: {nearest(name, OPERATORS, ', '.join(OPERATORS))}")
    return OPERATORS[name]
