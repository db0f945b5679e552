"""The file of tenants: what is wrong with it, and how it is read again while a server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from tests.server.pool.pools import until

from npugrad_server.tenants import LiveTenants, TenantsError, parse_tenants, read_tenants

WHOLE = """
gateways = ["spiffe://example.org/edge"]

[unlisted]
max_priority = 4

[[tenant]]
name = "vision"
identities = ["vision.example.org", "spiffe://example.org/vision"]
weight = 4
max_priority = 10
max_queue_depth = 3
max_inflight_bytes = "2MiB"

[[tenant]]
name = "batch"
identities = ["batch"]
"""
ENTRY = '[[tenant]]\nname = "a"\nidentities = ["a.example"]\n'


def test_a_whole_file() -> None:
    table = parse_tenants("it", WHOLE.encode())
    vision, batch = table.listed["vision.example.org"], table.listed["batch"]
    assert table.listed["spiffe://example.org/vision"] is vision
    assert (vision.name, vision.weight, vision.shown) == ("vision", 4.0, "vision")
    assert vision.max_priority == 10
    assert (vision.max_queue_depth, vision.max_inflight_bytes) == (3, 2 << 20)
    assert (batch.weight, batch.max_priority) == (1.0, 100)
    assert (batch.max_queue_depth, batch.max_inflight_bytes) == (None, None)
    assert table.gateways == {"spiffe://example.org/edge"}
    other = table.tenant("certificate", "new.example")
    assert (other.name, other.weight, other.max_priority) == ("certificate:new.example", 1.0, 4)
    assert other.shown == "other"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (WHOLE[:-30], "Unterminated|Unclosed|identities"),
        ("", r"found no \[\[tenant\]\]; expected at least one"),
        ("tenant = 3", "tenant: found '3'"),
        (ENTRY + "weight = 0", "tenant.0.weight: found '0'; Input should be greater than 0"),
        (ENTRY + "weight = -1", "tenant.0.weight: found '-1'"),
        (ENTRY + "weight = nan", "tenant.0.weight: found 'nan'"),
        (ENTRY + "weight = inf", "tenant.0.weight: found 'inf'"),
        (ENTRY + "max_priority = 101", "tenant.0.max_priority: found '101'"),
        (ENTRY + "max_queue_depth = 0", "tenant.0.max_queue_depth: found '0'"),
        (ENTRY + "max_queue_depth = -3", "tenant.0.max_queue_depth: found '-3'"),
        (ENTRY + "max_inflight_bytes = -1", "tenant.0.max_inflight_bytes: found '-1'"),
        (ENTRY + 'max_inflight_bytes = "1 furlong"', "tenant.0.max_inflight_bytes: found '1 furlong'"),
        (ENTRY + "colour = 2", "tenant.0.colour: found '2'; Extra inputs are not permitted"),
        ("gateway = []\n" + ENTRY, "gateway: found"),
        (ENTRY + ENTRY.replace('"a"', '"b"'), "found the identity 'a.example' twice; expected each once"),
        (ENTRY + ENTRY.replace("a.example", "b.example"), "found the name 'a' twice; expected each once"),
        ('gateways = ["a.example"]\n' + ENTRY, "found the identity 'a.example' twice"),
        (ENTRY.replace('["a.example"]', "[]"), "tenant.0.identities: found"),
        (ENTRY.replace("a.example", "a b"), "tenant.0.identities.0: found 'a b'"),
        (ENTRY.replace('"a"', '"a b"'), "tenant.0.name: found 'a b'"),
        (ENTRY.replace('"a"', '"other"'), "found the name 'other'"),
        ("\udcff", "it"),
    ],
)
def test_what_is_wrong_is_told(content: str, told: str) -> None:
    with pytest.raises(TenantsError, match=told) as caught:
        parse_tenants("it", content.encode(errors="surrogateescape"))
    assert all(problem.startswith("tenants: 'it': ") for problem in caught.value.problems)


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(TenantsError) as caught:
        parse_tenants("it", (ENTRY + "weight = 0\nmax_priority = -101\nx = 1").encode())
    assert len(caught.value.problems) == 3


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TenantsError, match=r"tenants: cannot read '.*none': No such file or directory"):
        read_tenants(str(tmp_path / "none"))


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[LiveTenants]:
    live = LiveTenants(str(path), look_interval_s=0.01)
    watching = asyncio.create_task(live.watch())
    try:
        yield live
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("bad", ["weight = 0", "max_priority = -101", "weigh", ENTRY])
def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(ENTRY)

    async def work() -> None:
        async with watched(path) as live:
            old = live.table
            path.write_text(ENTRY.replace("a.example", "b.example") + bad)
            await until(lambda: lines)
            looks = live.look_count
            await until(lambda: live.look_count > looks + 5)
            assert live.table is old
            path.unlink()
            await until(lambda: len(lines) == 2)
            assert live.table is old
            path.write_text(ENTRY + "weight = 2")
            await until(lambda: live.table is not old)
            assert live.table.listed["a.example"].weight == 2

    with structlog.testing.capture_logs() as lines:
        asyncio.run(work())
    kept, gone, swapped = lines
    assert (kept["event"], kept["log_level"]) == ("tenants kept", "warning")
    assert kept["problems"][0].startswith(f"tenants: {str(path)!r}: ")
    assert gone["problems"] == [f"tenants: cannot read {str(path)!r}: No such file or directory"]
    assert (swapped["event"], swapped["tenants"]) == ("tenants swapped", ["a"])


def test_the_swap_of_a_link_above_it_is_seen(tmp_path: Path) -> None:
    """As Kubernetes swaps the files of a ConfigMap."""
    for name, content in (("one", ENTRY), ("two", ENTRY + "weight = 3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tenants.toml").write_text(content)
    data, path = tmp_path / "..data", tmp_path / "tenants.toml"
    data.symlink_to("one")
    path.symlink_to("..data/tenants.toml")

    async def work() -> None:
        async with watched(path) as live:
            (tmp_path / "..new").symlink_to("two")
            (tmp_path / "..new").rename(data)
            await until(lambda: live.table.listed["a.example"].weight == 3)

    asyncio.run(work())


def test_the_same_file_again_is_no_news_and_an_end_of_trouble_is(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(ENTRY)

    async def work() -> None:
        async with watched(path) as live:
            path.write_text(ENTRY)
            await until(lambda: live.look_count > 5)
            assert not lines
            path.write_text("x")
            await until(lambda: lines)
            path.write_text(ENTRY)
            await until(lambda: len(lines) == 2)

    with structlog.testing.capture_logs() as lines:
        asyncio.run(work())
    assert [line["event"] for line in lines] == ["tenants kept", "tenants swapped"]
