"""Certificate files that change under a server: what handshakes are given, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import trustme
from tests.server.pool.pools import until

from npugrad_server.config import ServerSettings
from npugrad_server.rpc.certificates import LiveCertificates
from npugrad_server.watched_files import UNCHANGED_LOOKS

AUTHORITY = trustme.CA()


class Folder:
    """Files of one server, as ``--tls-...`` name them."""

    def __init__(self, path: Path) -> None:
        self.certificate, self.key, self.client_ca = path / "tls.crt", path / "tls.key", path / "ca.crt"
        self.settings = ServerSettings(
            tls_certificate=str(self.certificate),
            tls_key=str(self.key),
            tls_client_ca=str(self.client_ca),
        )

    def write(self, pair: tuple[bytes, bytes], client_ca: bytes) -> None:
        self.certificate.write_bytes(pair[0])
        self.key.write_bytes(pair[1])
        self.client_ca.write_bytes(client_ca)


def new_pair() -> tuple[bytes, bytes]:
    issued = AUTHORITY.issue_cert("localhost")
    return issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.write(new_pair(), AUTHORITY.cert_pem.bytes())
    return made


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


@asynccontextmanager
async def watched(folder: Folder, look_interval_s: float = 0.01) -> AsyncIterator[LiveCertificates]:
    live = LiveCertificates(folder.settings, look_interval_s)
    watching = asyncio.create_task(live.watch())
    try:
        yield live
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def figures(live: LiveCertificates) -> dict[str, float]:
    """The samples of the page, by name and labels."""
    return {
        "/".join((sample.name, *sample.labels.values())): sample.value
        for family in live.collect()
        for sample in family.samples
    }


async def test_a_new_pair_is_given_to_the_next_handshake_once(folder: Folder) -> None:
    async with watched(folder) as live:
        assert live.fetch() is None
        first, second = live.files, new_pair()
        folder.write(second, AUTHORITY.cert_pem.bytes())
        await until(lambda: live.files is not first)
        assert live.files.certificate == second[0]
        assert live.fetch() is not None
        assert live.fetch() is None
        found = figures(live)
        assert found["npugrad_tls_reloads_total/swapped"] == 1
        assert found["npugrad_tls_reloads_total/kept"] == 0
        assert found["npugrad_tls_handshakes_total"] == 3
        for fact in live.files.facts:
            name = f"npugrad_tls_certificate_expiry_seconds/{fact.name}/{fact.serial}"
            assert found[name] == fact.expires.timestamp()
        assert not any(first.facts[0].serial in name for name in found)
        old = live.files
        folder.client_ca.write_bytes(AUTHORITY.cert_pem.bytes() + trustme.CA().cert_pem.bytes())
        await until(lambda: live.files is not old)
        assert len([fact for fact in live.files.facts if fact.name == "tls_client_ca"]) == 2


async def test_a_pair_of_two_halves_keeps_the_old_one_and_is_told_once(
    folder: Folder, lines: list[Any]
) -> None:
    async with watched(folder) as live:
        old, second = live.files, new_pair()
        folder.certificate.write_bytes(second[0])
        await until(lambda: lines)
        looks = live.looks.look_count
        await until(lambda: live.looks.look_count > looks + 5)
        assert live.files is old
        assert live.fetch() is None
        folder.key.write_bytes(second[1])
        await until(lambda: live.files is not old)
    kept, swapped = lines
    assert kept["event"] == "certificates kept"
    assert kept["problems"] == [
        f"tls_key: the key in {str(folder.key)!r} does not belong to the certificate in "
        f"{str(folder.certificate)!r}"
    ]
    assert (swapped["event"], swapped["serial"]) == ("certificates swapped", live.files.facts[0].serial)


@pytest.mark.parametrize("name", ["certificate", "key", "client_ca"])
async def test_a_file_that_vanishes_and_comes_back_changes_nothing(
    folder: Folder, lines: list[Any], name: str
) -> None:
    async with watched(folder) as live:
        old, file = live.files, getattr(folder, name)
        content = file.read_bytes()
        file.unlink()
        await until(lambda: lines)
        file.write_bytes(content)
        await until(lambda: len(lines) > 1)
        assert live.files is old
    assert [line["event"] for line in lines] == ["certificates kept", "certificates unchanged"]
    assert lines[0]["problems"] == [f"tls_{name}: cannot read {str(file)!r}: No such file or directory"]


async def test_the_folder_of_a_secret_is_swapped_as_a_whole(tmp_path: Path) -> None:
    """As the kubelet does it: ``tls.crt`` is a link to ``..data/tls.crt``, and ``..data`` one to a folder."""

    def put(version: str, pair: tuple[bytes, bytes]) -> None:
        target = tmp_path / version
        target.mkdir()
        Folder(target).write(pair, AUTHORITY.cert_pem.bytes())
        (tmp_path / "..tmp").symlink_to(version)
        (tmp_path / "..tmp").rename(tmp_path / "..data")

    put("..2026_1", new_pair())
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    async with watched(Folder(tmp_path)) as live:
        old, second = live.files, new_pair()
        put("..2026_2", second)
        await until(lambda: live.files is not old)
        assert (live.files.certificate, live.files.key) == second


async def test_files_are_taken_once_they_stay_the_same_or_at_once_if_asked(folder: Folder) -> None:
    """A bundle of authorities is written in two halves, of which the first would do."""
    both = AUTHORITY.cert_pem.bytes(), trustme.CA().cert_pem.bytes()
    async with watched(folder, look_interval_s=0.05) as live:
        first = live.files
        for round_ in range(2 * UNCHANGED_LOOKS):
            looks = live.looks.look_count
            folder.client_ca.write_bytes(both[round_ % 2])
            await until(lambda looks=looks: live.looks.look_count >= looks + UNCHANGED_LOOKS)  # type: ignore[misc]
            assert live.files is first
        folder.client_ca.write_bytes(b"".join(both))
        await until(lambda: live.files is not first)
        assert live.files.client_ca == b"".join(both)
    async with watched(folder, look_interval_s=60) as live:
        folder.client_ca.write_bytes(both[1])
        live.looks.look_now()
        await until(lambda: live.files.client_ca == both[1])
