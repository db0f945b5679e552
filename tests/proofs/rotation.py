"""Certificates that change all the time under load: `make prove-rotation`.

The server's certificate and the callers' are renewed every few seconds, by turns as Kubernetes swaps them
and by writing into the files, which are half written for a while. Synchronous and asynchronous clients call
meanwhile, without retries; callers whose certificates are foreign, expired, for servers only or missing try
to get in. Fails where a good call is lost, a bad one gets in, or a certificate is shown too long.
"""

from __future__ import annotations

import random
import shutil
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import trustme
from cryptography import x509
from tests.client.both import Looped
from tests.fix_server import run_server
from tests.fix_tls import SERVER_ONLY, signed_again
from tests.proofs.callers import TIMEOUT_S, Load, sdk
from tests.proofs.proof import run, told, verdict

from npugrad.v1 import server_pb2, server_pb2_grpc
from npugrad_client import Client, Tls

FULL_S, MOST_LAG_S = 120.0, 6.0
_INTERVALS_S = (3.2, 4.5)
"""Between two swaps, by chance: longer than files must rest until they are taken."""
_HALF_WRITTEN_S = (0.0, 1.8)
_PAST = datetime(2021, 1, 1, tzinfo=timezone.utc)
_NAMES = ("tls.crt", "tls.key", "ca.crt")


class Secret:
    """A mounted Secret: files that are links through ``..data`` into a folder of one version."""

    def __init__(self, folder: Path, issuer: trustme.CA, trusted: trustme.CA) -> None:
        """Writes the first version: a certificate of the issuer, and the authority that is trusted."""
        self._folder, self._issuer, self._trusted = folder, issuer, trusted
        self._count, self.serials = 0, list[int]()
        self.written_s: list[float] = []
        folder.mkdir()
        self.swap()
        for name in _NAMES:
            (folder / name).symlink_to(Path("..data", name))

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def swap(self) -> None:
        self._count += 1
        version, link = self._folder / f"..{self._count}", self._folder / "..data"
        version.mkdir()
        for name, content in zip(_NAMES, self._renewed(), strict=True):
            (version / name).write_bytes(content)
        old = link.resolve()
        (self._folder / "..new").symlink_to(version.name)
        (self._folder / "..new").rename(link)
        self.written_s.append(time.monotonic())
        if self._count > 1:
            shutil.rmtree(old)

    def overwrite(self, pause: Callable[[], object]) -> None:
        """Writes a new certificate and key into the files, and pauses in the midst of each."""
        for name, content in zip(_NAMES, self._renewed(), strict=True):
            with Path(self.path(name)).open("wb", buffering=0) as file:
                file.write(content[: len(content) // 2])
                pause()
                file.write(content[len(content) // 2 :])
            pause()
        self.written_s.append(time.monotonic())

    def _renewed(self) -> tuple[bytes, bytes, bytes]:
        issued = self._issuer.issue_cert("localhost", "127.0.0.1")
        pem = issued.cert_chain_pems[0].bytes()
        self.serials.append(x509.load_pem_x509_certificate(pem).serial_number)
        return pem, issued.private_key_pem.bytes(), self._trusted.cert_pem.bytes()


@dataclass
class Rotation:
    """What came of it: good callers, tries of bad ones and those that were let in.

    `lag_s` is the longest for which a certificate was shown whose successor was written.
    """

    loads: dict[str, Load] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)
    admitted: Counter[str] = field(default_factory=Counter)
    swap_count: int = 0
    shown_count: int = 0
    lag_s: float = 0.0
    is_last_shown: bool = False

    @property
    def lost(self) -> Counter[str]:
        """Good calls that were not answered, by what they were told."""
        return sum((load.failed for load in self.loads.values()), Counter())

    @property
    def is_kept(self) -> bool:
        return not self.lost and not self.admitted and self.is_last_shown

    def __str__(self) -> str:
        calls = ", ".join(f"{load.calls} {name}" for name, load in self.loads.items())
        longest_s = max(load.longest_s for load in self.loads.values())
        return (
            f"{self.swap_count} swaps of each side; calls: {calls}; lost {told(self.lost)}; bad callers: "
            f"{told(self.tries)}; admitted {told(self.admitted)}; {self.shown_count} certificates shown, the "
            f"old one at most {self.lag_s:.1f} s, the last one "
            f"{'shown' if self.is_last_shown else 'NOT SHOWN'}; longest call {longest_s:.2f} s"
        )


class Rotating:
    """Both sides of a server's connections, and what is done to them meanwhile."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._authority, self._callers = trustme.CA(), trustme.CA()
        self.server = Secret(folder / "server", self._authority, self._callers)
        self.client = Secret(folder / "client", self._callers, self._authority)
        ca, certificate, key = (self.client.path(name) for name in ("ca.crt", "tls.crt", "tls.key"))
        self.tls = Tls(ca=ca, certificate=certificate, key=key)
        self.found, self.address = Rotation(), ""
        self._random, self.is_over = random.Random(seed), threading.Event()

    @property
    def flags(self) -> Sequence[str]:
        crt, key, ca = (self.server.path(name) for name in _NAMES)
        return ("--tls-certificate", crt, "--tls-key", key, "--tls-client-ca", ca)

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a caller that is let in, of its own."""
        return self._credentials(*_pair(self._callers))

    def _credentials(self, pem: bytes | None = None, key: bytes | None = None) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self._authority.cert_pem.bytes(), key, pem)

    def swap(self) -> None:
        while not self.is_over.wait(self._random.uniform(*_INTERVALS_S)):
            for secret in (self.server, self.client):
                if self.found.swap_count % 2:
                    secret.swap()
                else:
                    secret.overwrite(lambda: time.sleep(self._random.uniform(*_HALF_WRITTEN_S) / 3))
            self.found.swap_count += 1

    def try_to_get_in(self) -> None:
        """Calls with certificates that must not be let in, until it is over."""
        good, stranger = _pair(self._callers), _pair(trustme.CA())
        bad = {
            "foreign": self._credentials(*stranger),
            "expired": self._credentials(signed_again(good[0], self._callers, ends=_PAST), good[1]),
            "for servers": self._credentials(
                signed_again(good[0], self._callers, usages=SERVER_ONLY), good[1]
            ),
            "without": self._credentials(),
        }
        while True:  # each once at least, however long the certificates took
            for name, credentials in bad.items():
                with grpc.secure_channel(self.address, credentials, _OWN) as channel:
                    stub = server_pb2_grpc.ServerServiceStub(channel)
                    self.found.tries[name] += 1
                    try:
                        stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S)
                    except grpc.RpcError:
                        continue
                    self.found.admitted[name] += 1
            if self.is_over.is_set():
                return

    def look(self) -> None:
        """Looks at the certificate that new connections are shown, until it is over and the last one is."""
        shown, ends_s = set[int](), float("inf")
        while not self.found.is_last_shown and time.monotonic() < ends_s:
            serial = self._shown()
            now_s, index = time.monotonic(), self.server.serials.index(serial)
            shown.add(serial)
            if index + 1 < len(self.server.written_s):
                self.found.lag_s = max(self.found.lag_s, now_s - self.server.written_s[index + 1])
            if self.is_over.wait(0.1):
                ends_s = min(ends_s, now_s + TIMEOUT_S)
                self.found.is_last_shown = serial == self.server.serials[-1]
        self.found.shown_count = len(shown)

    def _shown(self) -> int:
        host, _, port = self.address.rpartition(":")
        context = ssl.create_default_context(cadata=self._authority.cert_pem.bytes().decode())
        with (
            socket.create_connection((host, int(port)), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            found = secure.getpeercert(binary_form=True)
        assert found is not None
        return x509.load_der_x509_certificate(found).serial_number


_OWN = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


def _pair(authority: trustme.CA) -> tuple[bytes, bytes]:
    issued = authority.issue_cert("caller@example.org")
    return issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes()


def proof(folder: Path, length_s: float) -> Rotation:
    rotating = Rotating(folder)
    found = rotating.found
    options: dict[str, Any] = {"tls": rotating.tls, "retry": None}
    credentials = rotating.credentials()
    with ExitStack() as stack:
        server = run_server(
            folder / "log", *rotating.flags, devices="test:2?compute=1", credentials=credentials
        )
        rotating.address = stack.enter_context(server).address
        for name, make in {"sync": Client, "async": Looped}.items():
            call = stack.enter_context(sdk([rotating.address], make=make, **options))
            found.loads[name] = stack.enter_context(Load(call, callers=2))
        pool = stack.enter_context(ThreadPoolExecutor(3))
        working = [pool.submit(act) for act in (rotating.swap, rotating.try_to_get_in, rotating.look)]
        try:
            time.sleep(length_s)
        finally:
            rotating.is_over.set()
        for one in working:
            one.result()
    return found


def main(given: Any, folder: Path) -> bool:
    found = proof(folder, given.seconds)
    return verdict(found, found.is_kept and found.lag_s <= MOST_LAG_S)


if __name__ == "__main__":
    run(main, __doc__, seconds=(FULL_S, "of renewing"))
