"""Encrypted connections: what a client trusts, and who it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Pem: TypeAlias = "bytes | str | os.PathLike[str]"
"""PEM text as bytes, or the path of a file with it."""


@dataclass(frozen=True)
class Tls:
    """How a client encrypts: what it trusts, and for mutual TLS who it is.

    Each is PEM text as bytes, or the path of a file with it, which is read when the client is made.

    Example:
        >>> tls = Tls(ca="ca.pem")                                            # trust this authority only
        >>> mutual = Tls(ca="ca.pem", certificate="client.pem", key="client.key")
        >>> Client("npugrad.example.org:443", tls=mutual)                     # doctest: +SKIP

    Attributes:
        ca: Certificates of the authorities that may have signed the server's; None for the system's.
        certificate: The client's own certificate and what leads to an authority the server trusts.
        key: Private key of `certificate`; both or neither.
        server_name: Name the server's certificate must have, where that is not the target's; None for the
            target's.
    """

    ca: Pem | None = None
    certificate: Pem | None = None
    key: Pem | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Refuses half of a pair."""
        if (self.certificate is None) != (self.key is None):
            found, lacking = ("key", "certificate") if self.certificate is None else ("certificate", "key")
            raise ValueError(f"tls: found a {found} without a {lacking}; expected both or neither")

    def __repr__(self) -> str:
        """Which parts there are; never a key."""
        parts = [n for n in ("ca", "certificate", "key") if getattr(self, n) is not None]
        return f"Tls({', '.join([*(f'{n}=...' for n in parts), f'server_name={self.server_name!r}'])})"

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Authorities, certificate and key as PEM.

        Raises:
            OSError: A file cannot be read.
            ValueError: What was read is no PEM.
        """
        return (
            _pem("ca", self.ca or _system_roots()),
            _pem("certificate", self.certificate),
            _pem("key", self.key),
        )


def _pem(name: str, value: Pem | None) -> bytes | None:
    if value is None:
        return None
    data = value if isinstance(value, bytes) else Path(value).read_bytes()
    if b"-----BEGIN " not in data:
        where = "" if isinstance(value, bytes) else f" in {os.fspath(value)}"
        raise ValueError(f"tls: {name}: found no PEM block{where}; expected -----BEGIN ...")
    return data


def _system_roots() -> str | None:
    """The system's file of authorities, where Python knows one; else grpc's own list counts."""
    import ssl  # light clients do without

    return ssl.get_default_verify_paths().cafile


@dataclass(frozen=True)
class Servers:
    """Servers that are each talked to alone, and how.

    Attributes:
        targets: Addresses, one of each server.
        tls: How to encrypt; None for connections that are not.
    """

    targets: tuple[str, ...]
    tls: Tls | None = None
