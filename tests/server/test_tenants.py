"""The file of tenants: what is wrong with it, and how it is read again while a server runs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.pool.pools import until

from npugrad_server.tenants import LiveTenants, TenantsError, parse_tenants, read_tenants

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789._-", min_size=1, max_size=12).filter(
    lambda name: name != "other"
)
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_priority": st.integers(-100, 100),
        "max_queue_depth": st.integers(1, 2**40),
        "max_inflight_bytes": st.one_of(st.integers(1, 2**50), st.sampled_from(["1KiB", "3 MB", "2GiB"])),
    },
)
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


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """A file that is right."""
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    hosts = draw(st.lists(NAMES, min_size=len(names) + 1, max_size=9, unique=True))
    gateway, *rest = [f"spiffe://example.org/{host}" if draw(st.booleans()) else host for host in hosts]
    entries = []
    for index, name in enumerate(names):
        weight = draw(st.one_of(st.just({}), st.fixed_dictionaries({"weight": st.floats(1e-3, 1e6)})))
        entries.append({"name": name, "identities": rest[index :: len(names)], **weight, **draw(LIMITS)})
    top: dict[str, Any] = {"tenant": entries}
    if draw(st.booleans()):
        top["gateways"] = [gateway]
    if draw(st.booleans()):
        top["unlisted"] = {"refuse": draw(st.booleans()), **draw(LIMITS)}
    return top


def written(file: dict[str, Any]) -> str:
    """The file as TOML; strings, numbers and lists are written as in JSON."""
    lines = [f"gateways = {json.dumps(file['gateways'])}"] if "gateways" in file else []
    tables = [("[unlisted]", file["unlisted"])] if "unlisted" in file else []
    for title, table in [*tables, *(("[[tenant]]", entry) for entry in file["tenant"])]:
        lines += [title, *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@settings(max_examples=40)
@given(files(), st.data())
def test_a_file_that_is_right_says_what_stands_in_it_and_a_part_is_refused_or_a_file(
    file: dict[str, Any], data: st.DataObject
) -> None:
    """A file may end where a shorter one would: that one is told from a whole one by looking twice."""
    whole = written(file).encode()
    table = parse_tenants("it", whole)
    for entry in file["tenant"]:
        for identity in entry["identities"]:
            tenant = table.listed[identity]
            assert (tenant.name, tenant.shown) == (entry["name"], entry["name"])
            assert tenant.weight == entry.get("weight", 1.0)
            assert tenant.max_priority == entry.get("max_priority", 100)
            assert tenant.max_queue_depth == entry.get("max_queue_depth")
            assert (tenant.max_inflight_bytes is None) == ("max_inflight_bytes" not in entry)
    assert table.gateways == set(file.get("gateways", ()))
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        table = parse_tenants("it", part)
    except TenantsError:
        return
    found = tomllib.loads(part.decode())
    assert table.listed.keys() == {name for entry in found["tenant"] for name in entry["identities"]}


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(content: bytes) -> None:
    with pytest.raises(TenantsError):
        parse_tenants("it", content)


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
    assert all("\n" not in problem for problem in caught.value.problems)


def test_everything_that_is_wrong_is_told_at_once_and_a_file_that_is_not_there_named(tmp_path: Path) -> None:
    with pytest.raises(TenantsError) as caught:
        parse_tenants("it", (ENTRY + "weight = 0\nmax_priority = -101\nx = 1").encode())
    assert len(caught.value.problems) == 3
    with pytest.raises(TenantsError, match=r"tenants: cannot read '.*none': No such file or directory"):
        read_tenants(str(tmp_path / "none"))


# -------------------------------------------------------------------------------------- while a server runs


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[LiveTenants]:
    live = LiveTenants(str(path), look_interval_s=0.01)
    watching = asyncio.create_task(live.watch())
    try:
        yield live
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (made := tmp_path / "tenants.toml").write_text(ENTRY)
    return made


def put(path: Path, text: str) -> None:
    """Puts another file in its place at once: a half-written one may be told of as well."""
    (made := path.with_suffix(".new")).write_text(text)
    made.replace(path)


@pytest.mark.parametrize("bad", ["weight = 0", "max_priority = -101", "weigh", ENTRY])
async def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(bad: str, path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with watched(path) as live:
            old = live.table
            put(path, ENTRY)
            await until(lambda: live.looks.look_count > 5)
            assert not lines, "the same file again is no news"
            put(path, ENTRY.replace("a.example", "b.example") + bad)
            await until(lambda: lines)
            looks = live.looks.look_count
            await until(lambda: live.looks.look_count > looks + 5)
            assert live.table is old
            await asyncio.to_thread(path.unlink)
            await until(lambda: len(lines) == 2)
            assert live.table is old
            put(path, ENTRY)
            await until(lambda: len(lines) == 3)
            put(path, ENTRY + "weight = 2")
            await until(lambda: live.table.listed["a.example"].weight == 2)
    kept, gone, ended, swapped = lines
    assert (kept["event"], kept["log_level"]) == ("tenants kept", "warning")
    assert kept["problems"][0].startswith(f"tenants: {str(path)!r}: ")
    assert gone["problems"] == [f"tenants: cannot read {str(path)!r}: No such file or directory"]
    assert ended["event"] == "tenants swapped", "the end of trouble is news"
    assert (swapped["event"], swapped["tenants"]) == ("tenants swapped", ["a"])


async def test_the_swap_of_a_link_above_it_is_seen(tmp_path: Path) -> None:
    """As Kubernetes swaps the files of a ConfigMap."""
    for name, content in (("one", ENTRY), ("two", ENTRY + "weight = 3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tenants.toml").write_text(content)
    data, path = tmp_path / "..data", tmp_path / "tenants.toml"
    data.symlink_to("one")
    path.symlink_to("..data/tenants.toml")
    async with watched(path) as live:
        (tmp_path / "..new").symlink_to("two")
        (tmp_path / "..new").rename(data)
        await until(lambda: live.table.listed["a.example"].weight == 3)
