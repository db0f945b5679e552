"""Parses and checks the addresses that the server listens on."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass

_MAX_UNIX_PATH_BYTES = 107
"""Linux's `sun_path` has 108 bytes, including the terminating null."""
_MODE = re.compile(r"mode=([0-7]{3})")


class AddressError(ValueError):
    """An address does not parse or cannot be bound; the message names it."""


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes:
        host: Host name or IP address, without brackets; empty for a unix socket.
        port: TCP port, 0 for a free one.
        path: Path of a unix socket; empty for TCP.
        mode: Permissions of the unix socket; None leaves them to the umask.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    mode: int | None = None

    def __str__(self) -> str:
        """The form that gRPC accepts."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it; names other than localhost may resolve to anything."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def with_port(self, port: int) -> Address:
        """The same address with the bound port; unix sockets have none."""
        return self if self.path else Address(self.host, port)


def parse_listen(text: str) -> Address:
    """Reads ``host:port``, ``[ipv6]:port``, ``unix:path`` or ``unix:path?mode=660``.

    Raises:
        AddressError: The text is none of these.
    """
    if text.startswith("unix:"):
        path, asks, query = text.removeprefix("unix:").partition("?")
        mode = _MODE.fullmatch(query)
        if asks and mode is None:
            raise AddressError(
                f"found {query!r} in {text!r}; expected ?mode= and three octal digits, such as 660"
            )
        path = path[2:] if path.startswith("///") else path
        nbytes = len(os.fsencode(path))
        if not 1 <= nbytes <= _MAX_UNIX_PATH_BYTES or "\0" in path:
            found = "a null byte" if "\0" in path else f"a socket path of {nbytes} bytes"
            raise AddressError(
                f"found {found} in {text!r}; expected 1 to {_MAX_UNIX_PATH_BYTES} bytes, none null"
            )
        return Address(path=path, mode=int(mode[1], 8) if mode else None)
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    sane = colon and host and (bracketed or ":" not in host) and port.isascii() and port.isdigit()
    if not sane or int(port) > 65535:
        raise AddressError(f"found {text!r}; expected host:port with a port of 0 to 65535, or unix:path")
    return Address(host, int(port))


def parse_listens(text: str) -> tuple[Address, ...]:
    """Reads addresses separated by commas; errors as of `parse_listen`, and for one that is there twice."""
    found = tuple(parse_listen(each.strip()) for each in text.split(","))
    names = [str(address) for address in found if address.path or address.port]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise AddressError(f"found {twice} twice in {text!r}; expected each address once")
    return found


def parse_metrics_listen(text: str) -> Address:
    """Reads ``host:port``.

    Raises:
        AddressError: The text is anything else.
    """
    address = parse_listen(text)
    if address.path:
        raise AddressError(f"found {text!r}; expected host:port: a metrics page is served over TCP only")
    return address


def check_free(address: Address) -> None:
    """Checks that an address can be bound; gRPC itself would replace the unix socket of a running server.

    Raises:
        AddressError: It is in use or unavailable; the message names it and says why.
    """
    if address.path:
        _check_unix_free(address)
        return
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise AddressError(f"cannot listen on {address}: {error.strerror or error}") from None
    problems = []
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                return
        except OSError as error:
            problems.append(error.strerror or str(error))
    raise AddressError(f"cannot listen on {address}: {problems[0]}")


def _check_unix_free(address: Address) -> None:
    try:
        mode = os.stat(address.path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(address.path) or "."
        if not os.access(folder, os.W_OK | os.X_OK):
            raise AddressError(
                f"cannot listen on {address}: its folder does not exist or is not writable"
            ) from None
        return
    except OSError as error:
        raise AddressError(f"cannot listen on {address}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"cannot listen on {address}: a file that is not a socket exists there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            return  # left behind by a server that was killed
        except OSError as error:
            raise AddressError(f"cannot listen on {address}: {error.strerror or error}") from None
    raise AddressError(f"cannot listen on {address}: Address already in use")
