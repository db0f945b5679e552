"""A server with a file of tenants: what its start refuses, who is who, and a file that changes under it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.harness import eventually
from tests.fix_server import StartServer, run_command, server_flags
from tests.fix_tls import Certificates

from npugrad_client import Client, TenantRefused

FILE = """
gateways = ["edge.example.org"]
[unlisted]
refuse = true
[[tenant]]
name = "vision"
identities = ["vision.example.org"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", pytest.param("check", marks=pytest.mark.deep)])
def test_a_bad_file_keeps_a_server_from_starting(
    command: str, tmp_path: Path, certificates: Certificates
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE + "weight = 0\ncolour = 2\n")
    flags = server_flags(*certificates.mutual_flags, "--tenants", str(path), devices="test:1?compute=1")
    done = run_command(command, *flags)
    assert done.returncode == 1
    told = done.stdout + done.stderr
    assert "tenant.0.weight: found '0'" in told
    assert "tenant.0.colour: found '2'" in told


@pytest.mark.slow
def test_identities_without_certificates_of_callers_are_refused(
    tmp_path: Path, certificates: Certificates
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    flags = server_flags(*certificates.flags, "--tenants", str(path), devices="test:1?compute=1")
    done = run_command("serve", *flags)
    assert done.returncode == 1
    assert "need tls_client_ca, because they are those of callers' certificates" in done.stderr


@pytest.mark.slow
def test_a_caller_is_who_its_certificate_says_and_the_file_is_read_again(
    tmp_path: Path, certificates: Certificates, start_server: StartServer
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    server = start_server(
        *(*certificates.mutual_flags, "--tenants", str(path)),
        devices="test:1?compute=1",
        credentials=certificates.credentials(certificates.named_caller("vision.example.org")),
    )
    assert server.find_log("call", tenant="vision")["status"] == "OK"
    tls = certificates.tls("audio.example.org")
    with Client(server.address, tls=tls, timeout_s=30, retry=None) as client:
        told = r"found certificate:audio\.example\.org, which is not listed"
        with pytest.raises(TenantRefused, match=told):
            client.server_info()
        assert server.find_log("call", reason="TENANT_REFUSED")["status"] == "PERMISSION_DENIED"
        assert "is not listed" in server.find_log("refused", reason="TENANT_REFUSED")["error"]
        path.write_text(FILE + "weight = -1\n")
        eventually(lambda: server.log_lines("tenants kept"), "the file is refused", server)
        path.write_text(FILE + '[[tenant]]\nname = "audio"\nidentities = ["audio.example.org"]\n')
        server.signal(signal.SIGHUP)
        eventually(lambda: server.log_lines("tenants swapped"), "the file is taken", server)
        client.server_info()  # over the connection that there was
    assert server.find_log("call", tenant="audio")["status"] == "OK"
    path.unlink()
    os.mkfifo(path)  # nobody writes into it, and the server ends in time all the same
    eventually(lambda: len(server.log_lines("tenants kept")) == 2, "the pipe is refused", server)
    [problem] = server.log_lines("tenants kept")[1]["problems"]
    assert problem == f"tenants: cannot read {str(path)!r}: not a regular file"
