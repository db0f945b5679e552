from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from npugrad_server.addresses import (
    Address,
    AddressError,
    check_free,
    parse_listen,
    parse_listens,
    parse_metrics_listen,
)


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        ("127.0.0.1:50051", Address("127.0.0.1", 50051), "127.0.0.1:50051"),
        ("[::1]:0", Address("::1", 0), "[::1]:0"),
        ("localhost:1", Address("localhost", 1), "localhost:1"),
        ("unix:/run/a b", Address(path="/run/a b"), "unix:/run/a b"),
        ("unix:///run/a", Address(path="/run/a"), "unix:/run/a"),
        ("unix:relative", Address(path="relative"), "unix:relative"),
        ("unix:/run/a?mode=660", Address(path="/run/a", mode=0o660), "unix:/run/a"),
    ],
)
def test_addresses_parse_and_print(text: str, expected: Address, shown: str) -> None:
    assert parse_listen(text) == expected
    assert str(expected) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("", "50051", ":50051", "host", "host:", "host:x", "host:65536", "host:-1", "::1:50051"),
        *("host:\u0661", "unix-abstract:npugrad"),
    ],
)
def test_malformed_addresses_are_named(text: str) -> None:
    expected = f"^found {re.escape(repr(text))}; expected host:port with a port of 0 to 65535, or unix:path$"
    with pytest.raises(AddressError, match=expected):
        parse_listen(text)
    with pytest.raises(AddressError, match="TCP only"):
        parse_metrics_listen("unix:/run/a")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "a socket path of 0 bytes"),
        ("/" + 125 * "x", "a socket path of 126 bytes"),
        ("/x" + 53 * "\u00e9", "a socket path of 108 bytes"),
        ("a\0b", "a null byte"),
    ],
)
def test_a_path_that_no_socket_can_have_is_refused(path: str, problem: str) -> None:
    with pytest.raises(AddressError, match=f"^found {problem} in .*; expected 1 to 107 bytes, none null$"):
        parse_listen(f"unix:{path}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("unix:/a?mod=660", r"found 'mod=660' in .*; expected \?mode= and three octal digits"),
        ("unix:/a?mode=888", "found 'mode=888' in"),
        ("unix:/a, unix:/a?mode=600", "found unix:/a twice in .*; expected each address once"),
        ("127.0.0.1:0,", "found '';"),
    ],
)
def test_what_is_wrong_in_a_list_of_addresses_is_named(text: str, problem: str) -> None:
    assert len(parse_listens("127.0.0.1:0,127.0.0.1:0, unix:/a,unix:/b")) == 4
    with pytest.raises(AddressError, match=problem):
        parse_listens(text)


def test_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(AddressError, match=f"cannot listen on {address}: Address already in use"):
            check_free(address)
    check_free(address)


def test_socket_of_a_running_server_is_not_taken_from_it_but_one_left_behind_is(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    address = Address(path=str(path))
    check_free(address)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(AddressError, match="already in use"):
            check_free(address)
    assert path.exists()
    check_free(address)


def test_what_cannot_be_listened_on_is_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(AddressError, match="not a socket"):
        check_free(Address(path=str(file)))
    with pytest.raises(AddressError, match="folder"):
        check_free(Address(path=str(tmp_path / "absent" / "socket")))
    assert file.read_text() == "precious"
    with pytest.raises(AddressError, match="cannot listen on"):
        check_free(Address("host.invalid", 1))
