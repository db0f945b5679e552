"""Converts server addresses as users write them to gRPC targets."""

from __future__ import annotations

import ipaddress
import re

from npugrad.representation import some

DEFAULT_PORT = 50051
"""Default port of npugrad-server; gRPC's own default is that of HTTPS."""

_URL = re.compile(r"(?P<scheme>https?|grpcs?|tcp|tls|h2c?)://(?P<rest>[^/?#]*)[/?#]?.*", re.I | re.S)
_DNS = re.compile(r"dns:(//[^/]*/)?", re.I)
_ENCRYPTED = ("https", "grpcs", "tls", "h2")


def target_repr(target: str) -> str:
    """The target as `repr` shows it: up to three addresses in quotes, and where the others are."""
    addresses = target.split(", ")
    return some([repr(", ".join(addresses[:3])), *addresses[3:]], 1, ".target")


def complete_target(target: object) -> str:
    """Adds the default port to a target without a port.

    Targets of a scheme other than ``dns:``, such as ``unix:``, stay as they are.

    Raises:
        TypeError: It is not a string.
        ValueError: It is empty, or a URL.
    """
    if not isinstance(target, str):
        raise TypeError(f"target: found {type(target).__name__}; expected text such as 'localhost:50051'")
    if not target:
        raise ValueError("target: found empty text; expected host:port, unix:path or dns:///name:port")
    _refuse_url(target)
    prefix = match.group() if (match := _DNS.match(target)) else ""
    host = target[len(prefix) :]
    if _is_ipv6(host):
        host = f"[{host}]"
    is_bare = bool(host) and (":" not in host or (host[0] == "[" and host[-1] == "]"))
    return f"{prefix}{host}:{DEFAULT_PORT}" if is_bare else prefix + host


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
    raise ValueError(
        f"target: found the URL {target!r}; expected host:port without {match['scheme']}://, such as "
        f"{instead!r}{encrypted}"
    )
