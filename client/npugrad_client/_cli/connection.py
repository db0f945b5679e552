"""Connection options of all commands, and the client built from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from npugrad_client._cli.terminal import FileError
from npugrad_client._retry import INTERACTIVE, RetryPolicy
from npugrad_client._targets import DEFAULT_PORT, complete_target
from npugrad_client._tls import Servers, Tls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugrad_client import Client

DEFAULT_TARGETS = [f"127.0.0.1:{DEFAULT_PORT}"]
AT_ONCE = RetryPolicy(retry_for_s=0)
"""For commands that query a server: they report that it is unreachable instead of waiting for it."""

Targets = Annotated[
    list[str],
    typer.Option(
        "--target",
        envvar="NPUGRAD_TARGET",
        help="Server: host:port, unix:path or dns:///name:port (default port 50051). Repeat it, or use "
        "commas, to spread calls over several.",
    ),
]
Encrypted = Annotated[
    bool,
    typer.Option(
        "--tls",
        envvar="NPUGRAD_CLIENT_TLS",
        help="Encrypt; trust the system's certificate authorities, or --tls-ca.",
    ),
]
Authority = Annotated[
    str | None,
    typer.Option(
        "--tls-ca",
        envvar="NPUGRAD_CLIENT_TLS_CA",
        help="PEM file of the server's certificate authority.",
    ),
]
Certificate = Annotated[
    str | None,
    typer.Option(
        "--tls-certificate",
        envvar="NPUGRAD_CLIENT_TLS_CERTIFICATE",
        help="PEM file of the client certificate, for mutual TLS.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--tls-key",
        envvar="NPUGRAD_CLIENT_TLS_KEY",
        help="PEM file of its private key.",
    ),
]


def addresses(targets: Sequence[str]) -> list[str]:
    """Splits targets into one address per server; ``ipv4:`` and ``ipv6:`` addresses may contain commas."""
    found: list[str] = []
    for target in targets:
        is_whole = target.lower().startswith(("ipv4:", "ipv6:"))
        found += [target] if is_whole else [part.strip() for part in target.split(",")]
    return found


def tls(encrypted: bool, ca: str | None, certificate: str | None, key: str | None) -> Tls | None:
    """Returns the TLS settings; None for no encryption.

    Raises:
        FileError: There is a certificate without a key, or the reverse.
    """
    if not (encrypted or ca or certificate or key):
        return None
    if bool(certificate) != bool(key):
        found, lacking = ("certificate", "key") if certificate else ("key", "certificate")
        raise FileError(f"--tls-{found} needs --tls-{lacking}")
    return Tls(ca=ca or None, certificate=certificate or None, key=key or None)


def refuse_tls_without_target(context: typer.Context) -> None:
    """Rejects TLS options of a command that starts its own service, which is unencrypted.

    Environment variables are allowed, because they are meant for the other commands of the shell.

    Raises:
        FileError: There is a TLS option on the command line.
    """
    for name in ("encrypted", "tls_ca", "tls_certificate", "tls_key"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--tls" if name == "encrypted" else f"--{name.replace('_', '-')}"
            raise FileError(f"{option} needs --target: the demo's own service is not encrypted")


def connect(
    targets: Sequence[str], timeout_s: float | None, how: Tls | None, retry: RetryPolicy = INTERACTIVE
) -> Client:
    """Returns the client of a command.

    Raises:
        FileError: A file of `how` cannot be read.
        ValueError: A target is no address, or a file is not PEM.
    """
    found = [complete_target(address) for address in addresses(targets)]  # first, as it needs no gRPC
    from npugrad_client import Client

    try:
        return Client(found, timeout_s=timeout_s, tls=how, retry=retry)
    except OSError as error:
        raise FileError(f"--tls: cannot read {error.filename!r}: {error.strerror}") from None


def servers_of(targets: Sequence[str], how: Tls | None) -> Servers:
    """Returns the servers of a command that uses one client per server; a repeated address counts once.

    Raises:
        FileError: A file of `how` cannot be read.
        ValueError: There is no address, one is malformed, or a file is not PEM.
    """
    found = [complete_target(address) for address in addresses(targets) if address]
    if not found:
        raise ValueError(f"--target: no address in {' '.join(targets)!r}")
    if how is not None:
        try:
            how.read()
        except OSError as error:
            raise FileError(f"--tls: cannot read {error.filename!r}: {error.strerror}") from None
    return Servers(tuple(dict.fromkeys(found)), how)
