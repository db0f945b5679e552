"""The secure example gets in with the right certificates, over TLS and mutual TLS, and not without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.examples.run import run_example
from tests.fix_server import ServerProcess, run_server
from tests.fix_tls import Certificates


@pytest.fixture(scope="module", params=["server", "mutual"])
def secured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[tuple[ServerProcess, bool]]:
    """A server with TLS, and whether it asks for the client's certificate."""
    mutual = request.param == "mutual"
    flags = certificates.mutual_flags if mutual else certificates.flags
    credentials = certificates.credentials(certificates.caller() if mutual else None)
    log_path = tmp_path_factory.mktemp("secured") / "server.log"
    with run_server(log_path, *flags, credentials=credentials) as running:
        yield running, mutual


def test_right_certificates_get_in(
    secured: tuple[ServerProcess, bool], certificates: Certificates, tmp_path: Path
) -> None:
    server, mutual = secured
    arguments = ["--target", server.address, "--ca", certificates.authority]
    if mutual:
        key, certificate = certificates.caller()
        (tmp_path / "client.key").write_bytes(key)
        (tmp_path / "client.pem").write_bytes(certificate)
        arguments += ["--certificate", f"{tmp_path}/client.pem", "--key", f"{tmp_path}/client.key"]
    done = run_example("secure_connection.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "grad_beta from cpu:0" in done.stdout
    worst = float(done.stdout.split(", ")[1].split(" from")[0])
    assert worst < 1e-2


def test_nobody_else_does(secured: tuple[ServerProcess, bool], certificates: Certificates) -> None:
    server, mutual = secured
    # Without a certificate of its own, or trusting an authority that has not signed the server's.
    ca = certificates.authority if mutual else certificates.client_ca
    done = run_example("secure_connection.py", "--target", server.address, "--ca", ca)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "refused: " in done.stderr
