"""The certificate files of the settings: everything that is wrong with them, at once and by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from npugrad_server.config import ServerSettings
from npugrad_server.tls import TlsFilesError, read_tls

if TYPE_CHECKING:
    from tests.fix_tls import Certificates


def settings(certificates: Certificates, **changes: str | None) -> ServerSettings:
    given = {"tls_certificate": certificates.certificate, "tls_key": certificates.key, **changes}
    return ServerSettings.model_validate(given)


def problems(found: ServerSettings) -> tuple[str, ...]:
    with pytest.raises(TlsFilesError) as caught:
        read_tls(found)
    return caught.value.problems


def test_off_by_default() -> None:
    assert read_tls(ServerSettings()) is None
    assert ServerSettings().tls == "off"


def test_files_are_read(certificates: Certificates) -> None:
    found = read_tls(settings(certificates))
    assert found is not None
    assert found.certificate == Path(certificates.certificate).read_bytes()
    assert found.key == Path(certificates.key).read_bytes()
    assert found.client_ca is None
    mutual = settings(certificates, tls_client_ca=certificates.client_ca)
    assert mutual.tls == "mutual"
    again = read_tls(mutual)
    assert again is not None
    assert again.client_ca == Path(certificates.client_ca).read_bytes()


def test_all_missing_files_are_told_at_once(certificates: Certificates, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    found = settings(certificates, tls_certificate=missing, tls_key=missing, tls_client_ca=missing)
    assert problems(found) == tuple(
        f"{name}: cannot read {missing!r}: No such file or directory"
        for name in ("tls_certificate", "tls_key", "tls_client_ca")
    )


def test_directory_is_not_a_file(certificates: Certificates, tmp_path: Path) -> None:
    (problem,) = problems(settings(certificates, tls_key=str(tmp_path)))
    assert problem == f"tls_key: cannot read {str(tmp_path)!r}: Is a directory"


@pytest.mark.parametrize("kind", trustme.KeyType)
def test_key_of_another_certificate(
    certificates: Certificates, tmp_path: Path, kind: trustme.KeyType
) -> None:
    other = tmp_path / "other.key"
    trustme.CA().issue_cert("localhost", key_type=kind).private_key_pem.write_to_path(other)
    (problem,) = problems(settings(certificates, tls_key=str(other)))
    assert problem == (
        f"tls_key: found in {str(other)!r} the key of another certificate; "
        f"expected that of {certificates.certificate!r}"
    )


@pytest.mark.parametrize(
    "text", ["", "garbage", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
@pytest.mark.parametrize("name", ["tls_certificate", "tls_key", "tls_client_ca"])
def test_file_that_holds_something_else(
    certificates: Certificates, tmp_path: Path, name: str, text: str
) -> None:
    file = tmp_path / "bad.pem"
    file.write_text(text)
    (problem,) = problems(settings(certificates, **{name: str(file)}))
    assert problem.startswith(f"{name}: found no {'private key' if name == 'tls_key' else 'certificate'} in")
    assert repr(str(file)) in problem


def test_encrypted_key_is_refused_and_not_asked_for(certificates: Certificates, tmp_path: Path) -> None:
    plain = serialization.load_pem_private_key(Path(certificates.key).read_bytes(), None)
    file = tmp_path / "encrypted.key"
    file.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    (problem,) = problems(settings(certificates, tls_key=str(file)))
    assert problem.endswith("expected one in PEM, not encrypted")
