"""`make prove-monitoring`: the shipped alerts and dashboard on a live server, Prometheus and Alertmanager.

Faults are brought about one after another. The alert of each has to reach a webhook through Alertmanager,
first firing and later resolved. Then each query of the dashboard has to return series. The rules are the
shipped ones with minutes read as seconds, so that nobody waits for a quarter of an hour. The devices are
simulated.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import trustme
from tests.deploy.prometheus_tools import program
from tests.e2e.harness import workers_of
from tests.fix_server import ServerProcess, run_server
from tests.proofs.callers import Load, arguments
from tests.proofs.proof import run, verdict
from tests.proofs.proxies import free_address

from npugrad.v1 import server_pb2
from npugrad_client import Client, Tls

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "npugrad.rules.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "npugrad.dashboard.json"
EVENTFUL = re.compile(r"increase\(|status!=\"OK\"")
"""Queries that may come back empty when nothing has happened lately."""
QUARANTINED = server_pb2.DEVICE_STATE_QUARANTINED
_WAIT_S, _REQUEST_S, _SCRAPE_S = 120.0, 10.0, 1
_MINUTES = {"30m": "30s", "15m": "15s", "10m": "10s", "5m": "5s"}
_FLAGS = (
    *("--metrics-listen", "127.0.0.1:0", "--max-queue-depth", "4", "--canary-interval-s", "0.5"),
    *("--respawn-backoff-s", "10", "--respawn-backoff-max-s", "10"),
)

ALERTMANAGER = """\
route: {{receiver: hook, group_by: [...], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers: [{{name: hook, webhook_configs: [{{url: "{webhook}", send_resolved: true}}]}}]
"""
PROMETHEUS = """\
global: {{scrape_interval: {seconds}s, evaluation_interval: {seconds}s, scrape_timeout: {seconds}s}}
rule_files: [rules.yaml]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["{manager}"]}}]}}]}}
scrape_configs: [{{job_name: npugrad, static_configs: [{{targets: ["{target}"]}}]}}]
"""


def quick_rules() -> str:
    """The shipped rules, their minutes read as seconds."""
    text = RULES.read_text("utf-8")
    for minutes, seconds in _MINUTES.items():
        text = re.sub(rf"(\[|for: ){minutes}\b", rf"\g<1>{seconds}", text)
    return text


@dataclass
class Inbox:
    """What came through Alertmanager: names of alerts and whether they fire, in their order."""

    told: list[tuple[str, bool]] = field(default_factory=list)

    @contextmanager
    def listen(self) -> Iterator[str]:
        """Serves the webhook; yields its URL."""
        inbox = self

        class Webhook(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in body["alerts"]:
                    inbox.told.append((alert["labels"]["alertname"], alert["status"] == "firing"))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}/"
            finally:
                server.shutdown()
                thread.join()


@contextmanager
def _running(command: Sequence[object], folder: Path, ready_url: str) -> Iterator[None]:
    with folder.joinpath(f"{Path(str(command[0])).name}.log").open("w+") as log:
        process = subprocess.Popen([*map(str, command)], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            _until(lambda: _answers(ready_url), f"{command[0]} is ready; its log: {log.name}")
            yield
        finally:
            process.terminate()
            process.wait(_WAIT_S)


def _answers(url: str) -> bool:
    with suppress(OSError):
        return int(urllib.request.urlopen(url, timeout=_REQUEST_S).status) == 200
    return False


def _until(holds: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + _WAIT_S
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {_WAIT_S:g} s: {what}")
        time.sleep(0.1)


@contextmanager
def prometheus(folder: Path, target: str, webhook: str) -> Iterator[str]:
    """Prometheus and Alertmanager that watch one server; yields the address of Prometheus."""
    address, manager = (free_address() for _ in range(2))
    (folder / "rules.yaml").write_text(quick_rules(), "utf-8")
    (folder / "alertmanager.yaml").write_text(ALERTMANAGER.format(webhook=webhook), "utf-8")
    watch = PROMETHEUS.format(seconds=_SCRAPE_S, manager=manager, target=target)
    (folder / "prometheus.yaml").write_text(watch, "utf-8")
    flags = "--config.file=alertmanager.yaml", "--storage.path=alerts", "--cluster.listen-address="
    with ExitStack() as stack:
        run: tuple[object, ...] = (
            program("prometheus-alertmanager"),
            *flags,
            f"--web.listen-address={manager}",
        )
        stack.enter_context(_running(run, folder, f"http://{manager}/-/ready"))
        run = (program("prometheus"), "--config.file=prometheus.yaml", "--storage.tsdb.path=data")
        run = (*run, f"--web.listen-address={address}")
        stack.enter_context(_running(run, folder, f"http://{address}/-/ready"))
        yield address


class Site:
    """A server to whom things happen."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Starts it with a certificate that soon expires."""
        self._folder, self._authority = folder, trustme.CA()
        self._spoiled = folder / "spoiled"
        self._authority.cert_pem.write_to_path(folder / "ca.pem")
        self.renew(days=2)
        tls = "--tls-certificate", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key")
        devices = f"test:2?ms=20&compute=1&wrong=any&wrong_if={self._spoiled}"
        self.running: ServerProcess = stack.enter_context(
            run_server(
                folder / "server.log", *_FLAGS, *tls, devices=devices,
                credentials=_credentials(self._authority),
            )
        )  # fmt: skip
        self._call = arguments()
        client = stack.enter_context(self.client())
        send = partial(client.group_norm_backward, **self._call)
        stack.enter_context(Load(send, callers=2, pace_s=0.02))

    def client(self) -> Client:
        tls = Tls(ca=str(self._folder / "ca.pem"))
        return Client(self.running.address, tls=tls, timeout_s=_REQUEST_S, retry=None)

    def renew(self, days: int) -> None:
        until = datetime.now(timezone.utc) + timedelta(days=days)
        made = self._authority.issue_cert("localhost", "127.0.0.1", not_after=until)
        made.private_key_pem.write_to_path(self._folder / "tls.key")
        made.cert_chain_pems[0].write_to_path(self._folder / "tls.crt")

    def halve(self) -> None:
        """Writes another key than the certificate's."""
        made = self._authority.issue_cert("localhost")
        made.private_key_pem.write_to_path(self._folder / "tls.key")

    def spoil(self) -> None:
        """Has the devices compute wrongly until one is quarantined.

        That lasts for at least 10 s, so it is seen. If the next process computed wrongly as well, it would
        last for good.
        """
        self._spoiled.touch()
        _until(self._has_quarantined, "a device is quarantined")
        self._spoiled.unlink()

    def _has_quarantined(self) -> bool:
        return any(device.state == QUARANTINED for device in self.running.info().devices)

    def kill_workers(self, is_enough: Callable[[], bool]) -> None:
        """Ends every worker, and those that come after them, until it is enough."""

        def kill() -> bool:
            for pid in workers_of(self.running.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return is_enough()

        _until(kill, "killing workers was enough")

    def crowd(self, is_enough: Callable[[], bool]) -> None:
        with self.client() as client:
            send = partial(client.group_norm_backward, **self._call)
            with Load(send, callers=24, pace_s=0):
                _until(is_enough, "sending so much was enough")


def _credentials(authority: trustme.CA) -> Any:
    return grpc.ssl_channel_credentials(authority.cert_pem.bytes())


def expressions() -> list[str]:
    """The queries of the dashboard for all servers."""
    found = []
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$job", ".*").replace("$instance", ".*")
            found.append(text.replace("$__rate_interval", "30s"))
    return found


def ask(address: str, query: str) -> list[Any]:
    """The series that a query has now; raises HTTPError if it is none."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=_REQUEST_S) as answer:
        result: list[Any] = json.loads(answer.read())["data"]["result"]
    return result


@dataclass
class Watched:
    """Alerts that reached the webhook firing, and resolved after that; dashboard queries without series."""

    fired: list[str]
    resolved: list[str]
    queries: int
    empty: list[str]

    @property
    def is_kept(self) -> bool:
        """Whether each fault was told of, and its end, and whether the dashboard shows all it should."""
        return self.fired == self.resolved and not [q for q in self.empty if not EVENTFUL.search(q)]

    def __str__(self) -> str:
        return (
            f"monitoring: {len(self.fired)} alerts fired and {len(self.resolved)} resolved through "
            f"Alertmanager ({', '.join(self.fired)}); {self.queries} dashboard queries, "
            f"{len(self.empty)} without series (simulated)"
        )


def watched(folder: Path) -> Watched:
    """Brings the faults about and asks the queries; the folder is for logs and data."""
    inbox, done = Inbox(), list[str]()
    with ExitStack() as stack:
        webhook = stack.enter_context(inbox.listen())
        site = Site(folder, stack)
        address = stack.enter_context(prometheus(folder, site.running.metrics_address, webhook))

        def told(name: str, *, firing: bool) -> bool:
            states = [state for alert, state in inbox.told if alert == name]
            return bool(states) and states[-1] is firing

        def await_told(*names: str, firing: bool = True) -> None:
            state = "firing" if firing else "resolved"
            for name in names:
                _until(partial(told, name, firing=firing), f"{name} {state}; came: {inbox.told}")
                done.append(f"{name} {state}")

        await_told("NpugradCertificateExpires")
        site.halve()
        await_told("NpugradCertificateKept")
        site.renew(days=90)
        await_told("NpugradCertificateExpires", "NpugradCertificateKept", firing=False)
        site.spoil()
        await_told("NpugradWrongResults", "NpugradDeviceQuarantined")
        await_told("NpugradWrongResults", "NpugradDeviceQuarantined", firing=False)
        site.crowd(lambda: told("NpugradRefusing", firing=True))
        await_told("NpugradRefusing")
        await_told("NpugradRefusing", firing=False)
        site.kill_workers(lambda: told("NpugradNoDeviceReady", firing=True))
        await_told("NpugradNoDeviceReady")
        await_told("NpugradNoDeviceReady", firing=False)
        queries = expressions()
        empty = [query for query in queries if not ask(address, query)]
    fired = sorted(name.split()[0] for name in done if name.endswith(" firing"))
    resolved = sorted(name.split()[0] for name in done if name.endswith(" resolved"))
    return Watched(fired, resolved, len(queries), empty)


def main(given: Any, folder: Path) -> bool:
    found = watched(folder)
    print("\n".join(found.empty))
    return verdict(found, found.is_kept)


if __name__ == "__main__":
    run(main, __doc__)
