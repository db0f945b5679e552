"""Which servers a command talks to, and how: addresses and certificates as options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from npugrad_client import Tls
from npugrad_client._cli import files
from npugrad_client._cli.terminal import DEFAULT_TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        envvar="NPUGRAD_TARGET",
        help=f"Server: host:port, unix:path or dns:///name:port; {DEFAULT_TARGET} by default. Several, by "
        "commas or by giving it again, are sent to in turn.",
    ),
]
TlsCa = Annotated[
    Path | None, typer.Option("--tls-ca", help="PEM file of the authorities of the servers; with it, TLS.")
]
TlsCertificate = Annotated[
    Path | None, typer.Option("--tls-certificate", help="PEM file of the client's certificate.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM file of its private key.")]


@dataclass(frozen=True)
class Servers:
    """Addresses of the servers, and how to encrypt; None for connections that are not."""

    targets: tuple[str, ...]
    tls: Tls | None


def servers_of(
    targets: Sequence[str] | None, ca: Path | None, certificate: Path | None, key: Path | None
) -> Servers:
    """The servers of a command's options; an address that stands twice is one.

    Raises:
        FileError: A certificate cannot be read, or half of a pair is missing.
        ValueError: There is no address.
    """
    given = targets or (DEFAULT_TARGET,)
    # In the environment they may stand with blanks between them, which typer takes apart.
    listed = [part.strip() for one in given for part in one.split(",") if part.strip()]
    if not listed:
        raise ValueError(f"--target: found {' '.join(given)!r}; expected addresses with commas between them")
    return Servers(tuple(dict.fromkeys(listed)), _tls(ca, certificate, key))


def _tls(ca: Path | None, certificate: Path | None, key: Path | None) -> Tls | None:
    if not (ca or certificate or key):
        return None
    try:
        tls = Tls(ca=ca, certificate=certificate, key=key)
        tls.read()
    except OSError as error:
        raise files.FileError(
            f"--tls: found {error.strerror}: {error.filename}; expected a PEM file"
        ) from None
    except ValueError as error:
        raise files.FileError(f"--{error}") from None
    return tls
