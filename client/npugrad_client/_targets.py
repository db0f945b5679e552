"""Converts server addresses as users write them to gRPC targets."""

from __future__ import annotations

import ipaddress
import re
import sys
from urllib.parse import unquote_to_bytes

from npugrad.errors import WrongType, WrongValue
from npugrad.representation import some

DEFAULT_PORT = 50051
"""Default port of npugrad-server; gRPC's own default is that of HTTPS."""

_URL = re.compile(r"(?P<scheme>https?|grpcs?|tcp|tls|h2c?)://(?P<rest>[^/?#]*)[/?#]?.*", re.I | re.S)
_UNIX = re.compile(r"unix(?:-abstract)?:(?://)?(?P<path>.*)", re.I | re.S)
_UNIX_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""The most that `sun_path` has room for, with a null before or after it."""
_HOSTS = re.compile(r"dns:(//[^/]*/)?|(?P<several>ipv[46]:)", re.I)
_HOST = re.compile(r"(\[[^][]+\]|(?!\d+$)[^][:/\s]+)(:(?P<port>[^:]*))?")
ADDRESS = re.compile(r"(?:dns:(?://[^/]*/)?|ipv[46]:)?\[?(?P<host>.+?)\]?(?::(?P<port>[0-9]+))?", re.I)
"""A completed target that names one host."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)
_PORT = re.compile(r"0*[1-9]\d{0,4}", re.ASCII)
_EXPECTED = "expected host:port, unix:path or dns:///name:port"
_ENCRYPTED = ("https", "grpcs", "tls", "h2")


def target_repr(target: str) -> str:
    """The target as `repr` shows it: up to three addresses in quotes, and where the others are."""
    addresses = target.split(", ")
    return some([repr(", ".join(addresses[:3])), *addresses[3:]], 1, ".target")


def complete_target(target: object) -> str:
    """Adds the default port to hosts without a port.

    Targets of schemes that name no hosts, such as ``unix:`` and ``xds:``, stay as they are.

    Raises:
        WrongType: It is not a string.
        ValueError: It is empty, a URL or no address, or gRPC would connect to another port or path.
    """
    if not isinstance(target, str):
        raise WrongType(f"target: found {type(target).__name__}; expected text such as 'localhost:50051'")
    if not target:
        raise WrongValue(f"target: found empty text; {_EXPECTED}")
    _refuse_url(target)
    if unix := _UNIX.fullmatch(target):
        _check_path(target, unquote_to_bytes(unix["path"]))
        return target
    if (named := _HOSTS.match(target)) is None:
        return target if _SCHEME.match(target) else _with_port(target, target)
    hosts = target[named.end() :]
    listed = hosts.split(",") if named["several"] else [hosts]
    return named.group() + ",".join(_with_port(target, host) for host in listed)


def _check_path(target: str, path: bytes) -> None:
    if b"\0" in path:
        raise WrongValue(f"target: found a null byte in {target!r}; expected a socket path without")
    if not 1 <= len(path) <= _UNIX_PATH_BYTES:
        raise WrongValue(
            f"target: found a socket path of {len(path)} bytes in {target!r}; expected 1 to "
            f"{_UNIX_PATH_BYTES}"
        )


def _with_port(target: str, host: str) -> str:
    if _is_ipv6(host):
        host = f"[{host}]"
    match = _HOST.fullmatch(host)
    if match is None:
        raise WrongValue(f"target: found {target!r}; {_EXPECTED}")
    port = match["port"]
    if port is None:
        return f"{host}:{DEFAULT_PORT}"
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise WrongValue(f"target: found port {port!r} in {target!r}; expected 1 to 65535")
    return host


def _is_ipv6(host: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        return False


def _refuse_url(target: str) -> None:
    match = _URL.fullmatch(target)
    if match is None:
        return
    instead = complete_target(match["rest"]) if match["rest"] else f"localhost:{DEFAULT_PORT}"
    encrypted = " and tls=True (--tls)" if match["scheme"].lower() in _ENCRYPTED else ""
    raise WrongValue(
        f"target: found the URL {target!r}; expected host:port without {match['scheme']}://, such as "
        f"{instead!r}{encrypted}"
    )
