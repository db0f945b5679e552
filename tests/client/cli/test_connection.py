"""The options that say which servers, and how: several targets, certificates, their variables, mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.client.cli.command import failed, run
from tests.client.fake_service import fake_service, group_norm
from tests.fix_server import ServerProcess, run_quick_server
from tests.fix_tls import Certificates

from npugrad.ops import OPERATORS
from npugrad_client import RetryPolicy, Tls, demo
from npugrad_client._cli.connection import addresses, connect, tls
from npugrad_client._cli.terminal import FileError
from npugrad_client.demo._cases import official_cases

VALIDATE = ("validate", "group_norm_backward", "--attr", "n=1", "--attr", "c=1", "--attr", "hxw=1")
ATTRS = ("--attr", "group=0", "--attr", "output_mask=true,true,true")


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[ServerProcess]:
    credentials = certificates.credentials(certificates.caller())
    log_path = tmp_path_factory.mktemp("mutual") / "server.log"
    with run_quick_server(
        log_path, *certificates.mutual_flags, devices="cpu:0", credentials=credentials
    ) as running:
        yield running


@pytest.fixture
def files(certificates: Certificates, tmp_path: Path) -> dict[str, str]:
    """What a caller of `mutual` needs, by option."""
    key, certificate = certificates.caller()
    (tmp_path / "key").write_bytes(key)
    (tmp_path / "certificate").write_bytes(certificate)
    return {
        "--tls-ca": certificates.authority,
        "--tls-certificate": str(tmp_path / "certificate"),
        "--tls-key": str(tmp_path / "key"),
    }


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many calls the demo makes with the fewest; all of them take half a minute."""
    cases = [case for case in official_cases() if case.record.name == "group_norm_backward"]
    monkeypatch.setattr(demo, "official_cases", lambda: cases)
    monkeypatch.setattr(demo, "realistic_cases", lambda _: [])
    return len(cases)


def flat(options: dict[str, str]) -> list[str]:
    return [text for pair in options.items() for text in pair]


def save(path: Path) -> None:
    arrays: dict[str, Any] = group_norm()
    np.savez(path, **arrays)


def test_targets_may_be_repeated_or_have_commas() -> None:
    assert addresses(["a:1, b:2", "unix:/c"]) == ["a:1", "b:2", "unix:/c"]
    assert addresses(["ipv4:127.0.0.1:1,127.0.0.2:1"]) == ["ipv4:127.0.0.1:1,127.0.0.2:1"]


@pytest.mark.parametrize("is_repeated", [True, False], ids=["repeated", "commas"])
def test_a_lost_server_among_several_fails_no_command(
    server: ServerProcess, is_repeated: bool, tmp_path: Path
) -> None:
    lost = "unix:/nonexistent/npugrad.sock"
    targets = ["--target", lost, "--target", server.address] if is_repeated else []
    target = "" if is_repeated else f"{lost},{server.address}"
    save(tmp_path / "in.npz")
    for command, status in (
        (("info", "--json"), 0),
        (("ops", "--json"), 0),
        ((*VALIDATE, *ATTRS, "--json"), 1),
        (("call", "group_norm_backward", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz")), 0),
    ):
        result = run(*command, *targets, target=target)
        assert result.exit_code == status, result.output
    assert run("info", *targets, target=target).stdout.startswith("npugrad ")


def test_every_command_gets_in_with_certificates(
    mutual: ServerProcess, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "in.npz")
    how = flat(files)
    assert json.loads(run("info", "--json", *how, target=mutual.address).stdout)["product"] == "atlas-a2"
    assert len(json.loads(run("ops", "--json", *how, target=mutual.address).stdout)) == len(OPERATORS)
    assert run(*VALIDATE, *ATTRS, *how, target=mutual.address).exit_code == 1
    call = ("call", "group_norm_backward", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz"))
    done = run(*call, *how, target=mutual.address)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out.npz").exists()
    for option, path in files.items():  # variables do as well
        monkeypatch.setenv(f"NPUGRAD_CLIENT_{option[2:].replace('-', '_').upper()}", path)
    assert run("info", target=mutual.address).exit_code == 0


@pytest.mark.deep
@pytest.mark.slow
def test_the_demo_and_its_example_get_in_with_certificates(
    mutual: ServerProcess, files: dict[str, str], tmp_path: Path, short_demo: int
) -> None:
    told = ("--target", mutual.address, "--out", str(tmp_path))
    done = run("demo", *flat(files), *told)
    assert done.exit_code == 0, done.output
    assert f"at {mutual.address}, validating for atlas-a2" in done.stdout
    assert f"{short_demo} of {short_demo} calls right" in done.stdout
    assert (tmp_path / "registration.png").exists()


def test_who_is_not_let_in_reads_why_and_is_not_told_to_start_a_server(
    mutual: ServerProcess, files: dict[str, str], certificates: Certificates
) -> None:
    untrusted = "the server's certificate is signed by an authority that is not trusted"
    for command, options, said in (
        ("info", ("--tls-ca", certificates.client_ca), untrusted),
        ("info", ("--tls-ca", files["--tls-ca"]), "requires a client certificate"),
        ("info", ("--tls",), untrusted),
        ("info", (), "it only speaks TLS; then pass tls=True or"),
        ("demo", ("--tls-ca", certificates.client_ca), untrusted),
        ("demo", ("--tls-ca", files["--tls-ca"]), "requires a client certificate"),
    ):
        message = failed(run(command, *options, "--target", mutual.address), 1)
        assert said in message
        assert "npugrad-server serve" not in message


@pytest.mark.parametrize("option", ["--tls", "--tls-ca=x", "--tls-certificate=x", "--tls-key=x"])
def test_the_demos_own_service_is_plain(option: str) -> None:
    name = option.partition("=")[0]
    expected = f"{name} needs --target: the demo's own service is not encrypted\n"
    assert failed(run("demo", option), 2) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("short_demo")
def test_variables_of_certificates_are_not_for_the_demos_own_service(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "EXAMPLE", tmp_path / "none")
    monkeypatch.setenv("NPUGRAD_CLIENT_TLS_CA", files["--tls-ca"])
    done = run("demo", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Starting the service on loopback ...\n")


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nonsense")
    for options, said in (
        (("--tls-ca", "/none"), "--tls: cannot read '/none': No such file or directory"),
        (("--tls-key", "/none"), "--tls-key needs --tls-certificate"),
        (("--tls-ca", str(tmp_path / "x")), f"tls: ca: no PEM block (-----BEGIN ...) in {tmp_path}/x"),
        (("--target", "a:1,"), "target: found empty text; expected host:port"),
    ):
        message = failed(run("info", *options), 2)
        assert message.startswith(said)
        assert message.count("\n") == 1


def test_nothing_said_is_a_plain_connection() -> None:
    assert tls(False, None, "", None) is None
    assert tls(True, None, None, None) == Tls()
    with pytest.raises(FileError, match="--tls-certificate needs --tls-key"):
        tls(True, None, "c", None)
    with fake_service() as seen, connect([seen.address], 20.0, None) as client:
        assert client.__getstate__()[0].retry == RetryPolicy(reach_for_s=5.0)
        assert client.group_norm_backward(**group_norm()).info.device == "test:0"
