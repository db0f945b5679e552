"""TLS of clients: what they trust and are told, and certificate files that change under them.

Calls that begin after a change show the new certificate, and none is lost.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tests.client import programs
from tests.client.both import BOTH, WAYS, Make, call_once
from tests.client.fake_service import Context, Gate, Seen, fake_service, group_norm
from tests.client.test_forks import HEAD

from npugrad_client import Client, Tls, TlsError, _tls
from npugrad_client._tls import LEFT_ALONE_S, TlsSource

AUTHORITY = trustme.CA()


class Files:
    """Authority, certificate and key of a client, in files that were last changed long ago."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.certificate, self.key = (folder / name for name in ("ca", "certificate", "key"))
        self.tls = Tls(ca=self.ca, certificate=self.certificate, key=self.key)
        self._count = 0
        self.put(self.ca, AUTHORITY.cert_pem.bytes())

    def put(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        self._count += 1
        os.utime(path, (self._count, self._count))

    def renew(self, name: str) -> None:
        issued = AUTHORITY.issue_cert(name)
        self.put(self.key, issued.private_key_pem.bytes())
        self.put(self.certificate, issued.cert_chain_pems[0].bytes())


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path)
    made.renew("first.example.org")
    return made


class Callers:
    """A service that notes whose certificate each call comes with; the first one is held."""

    def __init__(self) -> None:
        self.gate, self.names = Gate(), list[str]()

    def note(self, context: Context) -> None:
        names: Any = context.auth_context()["x509_subject_alternative_name"]
        self.names.append(names[0].decode())
        if len(self.names) == 1:
            self.gate.hold()


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> Callers:
    """Of clients that look at their files before each call."""
    monkeypatch.setattr(_tls, "LOOK_INTERVAL_S", 0.0)
    return Callers()


@pytest.fixture
def service(callers: Callers) -> Iterator[Seen]:
    issued = AUTHORITY.issue_cert("127.0.0.1", "service.example.org")
    pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    credentials = grpc.ssl_server_credentials([pair], AUTHORITY.cert_pem.bytes(), True)
    with fake_service(before=callers.note, credentials=credentials) as seen:
        yield seen


@WAYS
@BOTH
@pytest.mark.parametrize("is_closed", [False, True], ids=["answered", "closed"])
def test_a_call_in_flight_ends_on_its_connection(
    files: Files, callers: Callers, service: Seen, make: Make, way: int, is_closed: bool
) -> None:
    with make(service.address, timeout_s=60, tls=files.tls, stream_from_bytes=way, retry=None) as client:
        held = client.submit.group_norm_backward(**group_norm())
        callers.gate.wait_for_call()
        files.renew("second.example.org")
        client.group_norm_backward(**group_norm())
        assert callers.names == ["first.example.org", "second.example.org"]
        assert not held.done()
        if is_closed:
            client.close()
            assert held.exception(60) is not None
        callers.gate.open()
        if not is_closed:
            assert held.result(60).info.device == "test:0"


def looked(source: TlsSource) -> Any:
    """What a source gives after it has looked at the files."""
    return pickle.loads(pickle.dumps(source)).current()


def test_files_that_do_not_belong_together_change_nothing(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    source = TlsSource(files.tls)
    before = source.current()
    files.put(files.key, AUTHORITY.issue_cert("x").private_key_pem.bytes())
    with caplog.at_level(logging.WARNING, "npugrad_client"):
        assert looked(source) == before
    assert "the changed files cannot be used, so the old ones stay in use" in caplog.text
    files.renew("second.example.org")
    assert looked(source)[1] == files.certificate.read_bytes()


def test_a_file_that_breaks_off_or_vanishes_changes_nothing(files: Files) -> None:
    source = TlsSource(files.tls)
    before = source.current()
    for path in (files.ca, files.certificate):
        whole = path.read_bytes()
        files.put(path, whole + AUTHORITY.cert_pem.bytes()[:-40])
        assert looked(source) == before
        path.unlink()
        assert looked(source) == before
        files.put(path, whole)


def test_a_file_that_is_being_written_is_left_alone(files: Files) -> None:
    source = TlsSource(files.tls)
    before = source.current()
    files.ca.write_bytes(AUTHORITY.cert_pem.bytes() * 2)
    soon = time.time()
    os.utime(files.ca, (soon, soon))
    found = looked(source)
    if time.time() - soon < LEFT_ALONE_S:  # on a machine that stood still meanwhile there is nothing to see
        assert found == before
    os.utime(files.ca, (soon - 60, soon - 60))
    assert looked(source)[0] == AUTHORITY.cert_pem.bytes() * 2


def test_what_is_not_in_files_is_never_looked_at(files: Files) -> None:
    parts = {name: getattr(files, name).read_bytes() for name in ("ca", "certificate", "key")}
    source = TlsSource(Tls(**parts))
    assert source.current() is source.current()
    assert looked(source) == tuple(parts.values())


def test_a_pickled_client_reads_them_too(files: Files, callers: Callers, service: Seen) -> None:
    callers.gate.open()
    with Client(service.address, timeout_s=60, tls=files.tls) as client:
        client.group_norm_backward(**group_norm())
        data = pickle.dumps(client)
    files.renew("second.example.org")
    with pickle.loads(data) as client:
        client.group_norm_backward(**group_norm())
    assert callers.names == ["first.example.org", "second.example.org"]


_FORKED = """
from pathlib import Path
from npugrad_client import Tls, _tls
_tls.LOOK_INTERVAL_S = 0.0
folder = Path(sys.argv[2])
client = Client(address, timeout_s=60, tls=Tls(folder / "ca", folder / "certificate", folder / "key"))
client.group_norm_backward(**operands)
for name in ("key", "certificate"):
    data = (folder / "new" / name).read_bytes()
    (folder / name).write_bytes(data)
    os.utime(folder / name, (10**9, 10**9))

in_children(lambda: client.group_norm_backward(**operands), 1)
os._exit(0)
"""


def test_a_forked_process_reads_them_too(
    files: Files, callers: Callers, service: Seen, tmp_path: Path
) -> None:
    callers.gate.open()
    (tmp_path / "new").mkdir()
    Files(tmp_path / "new").renew("second.example.org")
    ran = programs.run(HEAD + _FORKED, service.address, tmp_path)
    assert (ran.stdout, ran.returncode) == ("ok\n", 0), ran.stderr
    assert callers.names == ["first.example.org", "second.example.org"]


def test_a_server_is_trusted_by_its_authority_and_name(files: Files, callers: Callers, service: Seen) -> None:
    """What a client does not trust is an error that no retry changes."""
    callers.gate.open()
    parts = {name: getattr(files, name).read_bytes() for name in ("ca", "certificate", "key")}
    for server_name in (None, "service.example.org"):
        tls = Tls(**parts, server_name=server_name)
        assert call_once(Client, service.address, tls=tls).info.device == "test:0"
    stranger = Tls(ca=trustme.CA().cert_pem.bytes())
    for wrong in (stranger, Tls(**parts, server_name="elsewhere.example.org"), True):
        with pytest.raises(TlsError, match=f"no encrypted connection to {service.address}: ") as caught:
            call_once(Client, service.address, tls=wrong)
        assert not caught.value.retryable
        assert caught.value.tries == 1
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (TlsError, str(caught.value))


def test_what_is_no_pem_or_half_of_a_pair_is_refused_at_once_by_name(tmp_path: Path) -> None:
    for half in ("certificate", "key"):
        with pytest.raises(ValueError, match=f"tls: a {half} needs a "):
            Tls(**{half: b"-----BEGIN X"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tls: ca: no PEM block"):
        Client("localhost:1", tls=Tls(ca=b"nonsense"))
    (tmp_path / "x").write_text("nonsense")
    with pytest.raises(ValueError, match=r"tls: ca: no PEM block .* in .*x"):
        Client("localhost:1", tls=Tls(ca=tmp_path / "x"))
    with pytest.raises(FileNotFoundError):
        Client("localhost:1", tls=Tls(ca=tmp_path / "y"))
    with pytest.raises(TypeError, match="tls: found str; expected Tls, True or None"):
        Client("localhost:1", tls="ca.pem")  # type: ignore[arg-type]


def test_no_key_is_ever_shown() -> None:
    assert repr(Tls(ca=b"-----BEGIN A", certificate=b"-----BEGIN B", key=b"-----BEGIN C")) == (
        "Tls(ca=..., certificate=..., key=..., server_name=None)"
    )
