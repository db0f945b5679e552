"""A server with a file of tenants: what its start refuses, who is who, and a file that changes under it."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
from tests.e2e.harness import eventually
from tests.fix_server import ServerProcess, StartServer, run_command, server_flags
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


def kept(server: ServerProcess) -> str:
    """Why new files were not taken."""
    return " ".join(problem for line in server.log_lines("tenants kept") for problem in line["problems"])


def test_each_unix_socket_is_a_tenant_and_its_mode_says_who_may_call(
    tmp_path: Path, start_server: StartServer
) -> None:
    path, own, other = tmp_path / "tenants.toml", tmp_path / "own", tmp_path / "other"
    entry = '[unlisted]\nrefuse = {}\n[[tenant]]\nname = "vision"\nidentities = ["unix:{}"]\n'
    path.write_text(entry.format("false", own))
    listen = f"unix:{own}?mode=660,127.0.0.1:0,unix:{other}"
    server = start_server("--tenants", str(path), devices="test:1?compute=1", listen=listen)
    assert stat.S_IMODE(own.stat().st_mode) == 0o660
    assert server.find_log("call", tenant="vision")["peer"] == f"unix:{own}"
    with Client(f"unix:{other}", timeout_s=30, retry=None) as client:
        client.server_info()
        assert server.find_log("call", tenant=f"unix:{other}")["status"] == "OK"
        typo = tmp_path / "typo"
        for refuse, socket, told in (
            ("false", typo, f"found the identity 'unix:{typo}'; expected one of the server's sockets: unix:"),
            ("true", own, f"found no tenant with the identity 'unix:{other}'; expected one, as others are"),
        ):
            path.write_text(entry.format(refuse, socket))
            server.signal(signal.SIGHUP)
            eventually(lambda wanted=told: wanted in kept(server), "the old file is kept", server)  # type: ignore[misc]
        client.server_info()  # with the tenants that there were
    done = run_command("serve", *server_flags("--tenants", str(path), devices="test:1", listen=listen))
    assert (done.returncode, told in done.stderr) == (1, True), done.stderr


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
