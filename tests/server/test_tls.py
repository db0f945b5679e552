"""The certificate files of the settings: everything that is wrong with them, at once and by name."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from tests.fix_tls import CLIENT_ONLY, Certificates, signed_again

from npugrad_server.config import ServerSettings
from npugrad_server.tls import TlsFilesError, read_tls


def settings(certificates: Certificates, **changes: str | None) -> ServerSettings:
    given = {"tls_certificate": certificates.certificate, "tls_key": certificates.key, **changes}
    return ServerSettings.model_validate(given)


def problems(found: ServerSettings) -> tuple[str, ...]:
    with pytest.raises(TlsFilesError) as caught:
        read_tls(found)
    return caught.value.problems


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def test_files_are_read_if_there_are_any(certificates: Certificates) -> None:
    assert read_tls(ServerSettings()) is None
    assert ServerSettings().tls == "off"
    found = read_tls(settings(certificates))
    assert found is not None
    assert (found.certificate, found.key) == (read(certificates.certificate), read(certificates.key))
    assert found.client_ca is None
    mutual = settings(certificates, tls_client_ca=certificates.client_ca)
    assert mutual.tls == "mutual"
    again = read_tls(mutual)
    assert again is not None
    assert again.client_ca == read(certificates.client_ca)


def test_all_missing_files_are_told_at_once(certificates: Certificates, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    found = settings(certificates, tls_certificate=missing, tls_key=missing, tls_client_ca=missing)
    assert problems(found) == tuple(
        f"{name}: cannot read {missing!r}: No such file or directory"
        for name in ("tls_certificate", "tls_key", "tls_client_ca")
    )
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
        f"tls_key: the key in {str(other)!r} does not belong to the certificate in "
        f"{certificates.certificate!r}"
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
    what = "unencrypted private key in PEM" if name == "tls_key" else "certificate in PEM"
    assert problem == f"{name}: {str(file)!r} holds no {what}"


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
    assert problem.endswith("holds no unencrypted private key in PEM")


def pair(folder: Path, authority: trustme.CA, chain: bytes | None = None, **dates: Any) -> dict[str, str]:
    """A certificate and its key in files, as settings name them."""
    issued = authority.issue_cert("localhost", **dates)
    issued.private_key_pem.write_to_path(folder / "key")
    (folder / "pem").write_bytes(issued.cert_chain_pems[0].bytes() + (chain or b""))
    return {"tls_certificate": str(folder / "pem"), "tls_key": str(folder / "key")}


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        (2020, 2021, "the certificate in {!r} expired at 2021-01-01T00:00:00Z"),
        (2100, 2101, "the certificate in {!r} is not valid before 2100-01-01T00:00:00Z"),
    ],
)
def test_certificate_of_the_past_or_the_future(
    certificates: Certificates, tmp_path: Path, first: int, last: int, told: str
) -> None:
    dates: dict[str, Any] = {"not_before": datetime(first, 1, 1), "not_after": datetime(last, 1, 1)}
    files = pair(tmp_path, trustme.CA(), **dates)
    expected = f"tls_certificate: {told}".format(files["tls_certificate"])
    assert problems(settings(certificates, **files)) == (expected,)


def test_certificate_for_clients(certificates: Certificates, tmp_path: Path) -> None:
    authority = trustme.CA()
    files = pair(tmp_path, authority)
    file = Path(files["tls_certificate"])
    file.write_bytes(signed_again(file.read_bytes(), authority, usages=CLIENT_ONLY))
    (problem,) = problems(settings(certificates, **files))
    assert problem.endswith("is for clientAuth; a server needs the extended key usage serverAuth")


def test_chain_that_breaks_off(certificates: Certificates, tmp_path: Path) -> None:
    authority = trustme.CA()
    files = pair(tmp_path, authority, authority.cert_pem.bytes()[:-40])
    (problem,) = problems(settings(certificates, **files))
    assert problem == (f"tls_certificate: {files['tls_certificate']!r} holds only 1 whole certificates of 2")


def test_one_valid_authority_of_callers_is_enough(certificates: Certificates, tmp_path: Path) -> None:
    authority = trustme.CA()
    past = datetime(2021, 1, 1, tzinfo=timezone.utc)
    expired = signed_again(authority.cert_pem.bytes(), authority, ends=past)
    file = tmp_path / "callers.pem"
    file.write_bytes(expired)
    (problem,) = problems(settings(certificates, tls_client_ca=str(file)))
    assert problem == (
        f"tls_client_ca: no authority in {str(file)!r} is valid now; the latest expiry is "
        "2021-01-01T00:00:00Z"
    )
    file.write_bytes(expired + trustme.CA().cert_pem.bytes())
    found = read_tls(settings(certificates, tls_client_ca=str(file)))
    assert found is not None
    assert [fact.name for fact in found.facts] == ["tls_certificate", "tls_client_ca", "tls_client_ca"]
    assert found.facts[1].expires == past
