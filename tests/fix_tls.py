"""Throw-away certificates: one authority for the server, one for callers, one that nobody trusts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import grpc
import pytest
import trustme

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Certificates:
    """Files and credentials of one test run.

    Attributes:
        folder: Where the files are.
    """

    folder: Path

    def __post_init__(self) -> None:
        self._authority, self._callers, self._others = trustme.CA(), trustme.CA(), trustme.CA()
        server = self._authority.issue_cert("localhost", "127.0.0.1")
        server.private_key_pem.write_to_path(self.key)
        server.cert_chain_pems[0].write_to_path(self.certificate)
        self._authority.cert_pem.write_to_path(self.authority)
        self._callers.cert_pem.write_to_path(self.client_ca)

    @cached_property
    def key(self) -> str:
        return str(self.folder / "server.key")

    @cached_property
    def certificate(self) -> str:
        return str(self.folder / "server.pem")

    @cached_property
    def authority(self) -> str:
        """The server's authority, which callers trust."""
        return str(self.folder / "authority.pem")

    @cached_property
    def client_ca(self) -> str:
        """The callers' authority, which the server trusts."""
        return str(self.folder / "callers.pem")

    @property
    def flags(self) -> tuple[str, ...]:
        """What turns TLS on."""
        return "--tls-certificate", self.certificate, "--tls-key", self.key

    @property
    def mutual_flags(self) -> tuple[str, ...]:
        """What asks callers for a certificate as well."""
        return (*self.flags, "--tls-client-ca", self.client_ca)

    def caller(self, name: str = "caller@example.org", *, trusted: bool = True) -> tuple[bytes, bytes]:
        """Key and certificate of a caller, of the authority that the server trusts or of another one."""
        issued = (self._callers if trusted else self._others).issue_cert(name)
        return issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()

    def credentials(self, pair: tuple[bytes, bytes] | None = None) -> grpc.ChannelCredentials:
        """Credentials of a channel; with a caller's key and certificate for mutual TLS."""
        root = self._authority.cert_pem.bytes()
        return grpc.ssl_channel_credentials(root, *(pair or (None, None)))

    def strangers_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a channel that trusts another authority."""
        return grpc.ssl_channel_credentials(self._others.cert_pem.bytes())


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates for the whole run."""
    return Certificates(tmp_path_factory.mktemp("tls"))
