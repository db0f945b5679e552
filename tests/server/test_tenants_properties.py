"""Files of tenants as they may be found: whole, half written, or with one thing wrong; the old one stays."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from npugrad_server.tenants import LiveTenants, TenantsError, parse_tenants

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.slow

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


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """A file that is right."""
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    hosts = draw(st.lists(NAMES, min_size=len(names) + 1, max_size=9, unique=True))
    gateway, *rest = [f"spiffe://example.org/{host}" if draw(st.booleans()) else host for host in hosts]
    entries = []
    for index, name in enumerate(names):
        mine = rest[index :: len(names)]
        weight = draw(st.one_of(st.just({}), st.fixed_dictionaries({"weight": st.floats(1e-3, 1e6)})))
        entries.append({"name": name, "identities": mine, **weight, **draw(LIMITS)})
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
    for head, table in [*tables, *(("[[tenant]]", entry) for entry in file["tenant"])]:
        lines += [head, *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _again(file: dict[str, Any]) -> None:
    file["tenant"].append({"name": "again", "identities": file["tenant"][0]["identities"][:1]})


def _set(key: str, value: Any) -> Any:
    return lambda file: file["tenant"][-1].update({key: value})


# What is done to a file, and what the line then says.
MISTAKES: dict[str, tuple[Any, str]] = {
    "weight 0": (_set("weight", 0), "weight: found '0'"),
    "a negative weight": (_set("weight", -2.5), "weight: found '-2.5'"),
    "a negative quota of places": (_set("max_queue_depth", -1), "max_queue_depth: found '-1'"),
    "a quota of no place": (_set("max_queue_depth", 0), "max_queue_depth: found '0'"),
    "a negative quota of bytes": (_set("max_inflight_bytes", -5), "max_inflight_bytes: found '-5'"),
    "a priority that is none": (_set("max_priority", 101), "max_priority: found '101'"),
    "no identity": (_set("identities", []), "identities: found '[]'"),
    "one identity twice": (_again, "found the identity "),
    "an unknown key": (_set("colour", "red"), "colour: found 'red'"),
    "one name twice": (
        lambda file: file["tenant"].append({**file["tenant"][0], "identities": ["another"]}),
        "found the name ",
    ),
}


@settings(deadline=None, max_examples=40)
@given(files())
def test_a_file_that_is_right_says_what_stands_in_it(file: dict[str, Any]) -> None:
    table = parse_tenants("it", written(file).encode())
    for entry in file["tenant"]:
        for identity in entry["identities"]:
            tenant = table.listed[identity]
            assert (tenant.name, tenant.shown) == (entry["name"], entry["name"])
            assert tenant.weight == entry.get("weight", 1.0)
            assert tenant.max_priority == entry.get("max_priority", 100)
            assert tenant.max_queue_depth == entry.get("max_queue_depth")
            assert (tenant.max_inflight_bytes is None) == ("max_inflight_bytes" not in entry)
    assert table.gateways == set(file.get("gateways", ()))


@settings(deadline=None, max_examples=40)
@given(files(), st.sampled_from(sorted(MISTAKES)))
def test_a_mistake_is_told_in_lines_and_nothing_is_taken(file: dict[str, Any], mistake: str) -> None:
    spoil, told = MISTAKES[mistake]
    spoil(file)
    with pytest.raises(TenantsError) as caught:
        parse_tenants("it", written(file).encode())
    assert any(told in problem for problem in caught.value.problems), caught.value.problems
    assert all(problem.startswith("tenants: 'it': ") for problem in caught.value.problems)
    assert all("\n" not in problem for problem in caught.value.problems)


@settings(deadline=None, max_examples=40)
@given(files(), st.data())
def test_a_part_of_a_file_is_refused_or_is_a_file(file: dict[str, Any], data: st.DataObject) -> None:
    """A file may end where a shorter one would: that one is told from a whole one by looking twice."""
    whole = written(file).encode()
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        table = parse_tenants("it", part)
    except TenantsError:
        return
    found = tomllib.loads(part.decode())
    assert table.listed.keys() == {name for entry in found["tenant"] for name in entry["identities"]}


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(content: bytes) -> None:
    with pytest.raises(TenantsError):
        parse_tenants("it", content)


@settings(deadline=None, max_examples=10)
@given(files(), st.lists(st.sampled_from(sorted(MISTAKES)), min_size=1, max_size=3, unique=True))
def test_whatever_is_wrong_the_old_file_stays_and_one_line_says_why(
    file: dict[str, Any], mistakes: list[str]
) -> None:
    whole = written(file)

    async def work(path: Path) -> None:
        live = LiveTenants(str(path), look_interval_s=0.002)
        watching, old = asyncio.create_task(live.watch()), live.table
        try:
            for count, mistake in enumerate(mistakes, 1):
                spoiled = tomllib.loads(whole)
                MISTAKES[mistake][0](spoiled)
                _swap(path, written(spoiled))
                await _until(lambda count=count: len(lines) == count)
                looks = live.look_count
                await _until(lambda looks=looks: live.look_count > looks + 3)
                assert live.table is old
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    with structlog.testing.capture_logs() as lines, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tenants.toml")
        path.write_text(whole)
        asyncio.run(work(path))
    assert [line["event"] for line in lines] == ["tenants kept"] * len(mistakes)
    for line, mistake in zip(lines, mistakes, strict=True):
        assert any(MISTAKES[mistake][1] in problem for problem in line["problems"])


def _swap(path: Path, text: str) -> None:
    """Puts another file in its place at once: a half-written one may be told of as well."""
    (made := path.with_suffix(".new")).write_text(text)
    made.replace(path)


async def _until(condition: Any) -> None:
    async def work() -> None:
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)

    await asyncio.wait_for(work(), 30)
