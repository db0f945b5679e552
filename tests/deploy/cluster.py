"""`make test-cluster CONTEXT=...`: the chart in a real cluster, for whoever has one.

In a namespace of its own, which it deletes in the end: what the API server says of the rendered chart, an
install, the probes' pages, a gradient through a port-forward, a rollout under load from within the cluster
with its calls counted, the uninstall. Each step prints a line. The nodes have to be able to pull the image.
It has never met a real cluster: what is tested is what it says without one, and what it would send.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import trustme
import yaml
from tests.deploy.releases import NAME, render

from npugrad import OPERATORS
from npugrad._tools.gen_manifests import PROFILES, values_of
from npugrad_client import Client, Tls
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.known import known

USAGE = (
    "usage: make test-cluster CONTEXT=NAME [ARGS='--profile mindcluster --image REGISTRY/npugrad:TAG'], "
    "with a name that `kubectl config get-contexts` lists"
)
LOAD = f"{NAME}-load"
_ANSWER_S, _COMMAND_S, _INSTALL_S, _ROLLOUT_S, _END_S = 15, 120, 900, 1800, 600
_PORTS = {"grpc": 50051, "metrics": 9464}
_PAGES = ("/livez", "/readyz", "/metrics")
_LEAST_CALLS = 100


class Failed(RuntimeError):
    """A step did not do what it should; the message says which."""


class Skipped(RuntimeError):
    """There is nothing to try it on; the message says why."""


class Cluster:
    """A namespace of a cluster, by kubectl."""

    def __init__(self, context: str, namespace: str) -> None:
        found = shutil.which("kubectl")
        if found is None:
            raise Skipped("kubectl is not installed")
        self._command, self.namespace = [found, "--context", context], namespace
        answer = self._run("get", "--raw", "/readyz", f"--request-timeout={_ANSWER_S}s")
        if answer.returncode:
            said = (answer.stderr.strip().splitlines() or ["nothing"])[-1]
            raise Skipped(f"the context {context} does not answer: {said}")

    def _run(
        self, *arguments: str, given: str | None = None, timeout_s: float = _COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        command = [*self._command, *arguments]
        return subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def do(self, *arguments: str, objects: Sequence[Any] = (), timeout_s: float = _COMMAND_S) -> str:
        """Runs kubectl in the namespace on objects that it reads as ``-``, and returns what it prints."""
        given = yaml.safe_dump_all(objects) if objects else None
        done = self._run("--namespace", self.namespace, *arguments, given=given, timeout_s=timeout_s)
        if done.returncode:
            raise Failed(f"kubectl {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    @contextmanager
    def lines(self, *arguments: str, timeout_s: float) -> Iterator[Iterator[str]]:
        """What kubectl prints while it runs, for a block; it may wait so long for each line."""
        command = [*self._command, "--namespace", self.namespace, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:

            def read() -> Iterator[str]:
                assert process.stdout is not None
                while True:
                    watchdog = threading.Timer(timeout_s, process.kill)
                    watchdog.start()
                    line = process.stdout.readline()
                    watchdog.cancel()
                    if not line:
                        return
                    yield line

            try:
                yield read()
            finally:
                process.terminate()

    @contextmanager
    def forwarded(self, workload: str) -> Iterator[dict[str, int]]:
        """Ports of this machine that lead to one pod of a workload, by name."""
        ports = [f":{port}" for port in _PORTS.values()]
        arguments = ("port-forward", "--address=127.0.0.1", workload, *ports)
        with self.lines(*arguments, timeout_s=_COMMAND_S) as lines:
            told = [line.split() for line in itertools.islice(lines, len(ports))]
            found = {words[4]: int(words[2].rpartition(":")[2]) for words in told}
            if len(found) < len(ports):
                raise Failed(f"port-forward {workload}: found {told}; expected a line for each port")
            yield {name: found[str(port)] for name, port in _PORTS.items()}


# ------------------------------------------------------------------------------------------- objects


def release_of(options: argparse.Namespace, namespace: str) -> list[dict[str, Any]]:
    """The chart's objects, with two replicas and the image that was given."""
    repository, _, tag = options.image.rpartition(":") if options.image else ("", "", "")
    image = {"image": {"repository": repository, "tag": tag}} if options.image else {}
    own = yaml.safe_load(options.values.read_text("utf-8")) if options.values else {}
    values = values_of(options.profile, {"replicas": 2}, image, own)
    return list(render(values, namespace).values())


def secret_of(authority: trustme.CA, namespace: str) -> dict[str, Any]:
    """A certificate for the Services and for a port-forward, with its authority."""
    issued = authority.issue_cert("127.0.0.1", f"{NAME}.{namespace}", f"{NAME}-headless.{namespace}")
    content = {
        "tls.crt": issued.cert_chain_pems[0].bytes(),
        "tls.key": issued.private_key_pem.bytes(),
        "ca.crt": authority.cert_pem.bytes(),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": f"{NAME}-tls"},
        "stringData": {name: data.decode() for name, data in content.items()},
    }


def load_of(release: Sequence[dict[str, Any]], namespace: str) -> list[dict[str, Any]]:
    """A Job that calls the Service until it is ended, from the image of the release."""
    [deployment] = [each for each in release if each["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    [server] = pod["containers"]
    script = Path(__file__).with_name("cluster_load.py").read_text("utf-8")
    target = f"dns:///{NAME}-headless.{namespace}:{_PORTS['grpc']}"
    quantities = {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "512Mi"}
    container = {
        "name": "load",
        "image": server["image"],
        "command": ["python", "/load/cluster_load.py", target, "/tls/ca.crt"],
        "resources": {"requests": quantities, "limits": quantities},
        "securityContext": server["securityContext"],
        "volumeMounts": [{"name": n, "mountPath": f"/{n}", "readOnly": True} for n in ("load", "tls")],
    }
    # Not the key: a caller needs to know whom to trust.
    authority = {"secretName": f"{NAME}-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod["securityContext"],
        "containers": [container],
        "volumes": [
            {"name": "load", "configMap": {"name": LOAD}},
            {"name": "tls", "secret": authority},
        ],
    } | {name: pod[name] for name in ("imagePullSecrets",) if name in pod}
    job = {"backoffLimit": 0, "activeDeadlineSeconds": _ROLLOUT_S + _INSTALL_S, "template": {"spec": spec}}
    program = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"cluster_load.py": script}}
    return [
        {"metadata": {"name": LOAD}, **each}
        for each in (program, {"apiVersion": "batch/v1", "kind": "Job", "spec": job})
    ]


# --------------------------------------------------------------------------------------------- steps


def tried(cluster: Cluster, options: argparse.Namespace) -> Iterator[str]:
    """Takes every step, and says what came of it; else raises `Failed`."""
    authority, release = trustme.CA(), release_of(options, cluster.namespace)
    metadata = {
        "name": cluster.namespace,
        "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
    }
    home = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    objects = [secret_of(authority, cluster.namespace), *release]
    load = load_of(release, cluster.namespace)
    cluster.do("create", "--filename=-", objects=[home])
    try:
        said = cluster.do("apply", "--dry-run=server", "--filename=-", objects=[*objects, *load])
        yield f"server-side dry run: {len(said.splitlines())} of {len(objects) + len(load)} objects accepted"
        cluster.do("apply", "--filename=-", objects=objects)
        _await_rollout(cluster, _INSTALL_S)
        yield f"install: {len(release)} objects of profile {options.profile}, 2 replicas ready"
        yield from _looked_at(cluster, authority)
        yield _rolled(cluster, load)
    finally:
        cluster.do("delete", "namespace", cluster.namespace, "--wait=true", timeout_s=_END_S)
    yield f"uninstall: namespace {cluster.namespace} deleted with all that was in it"


def _await_rollout(cluster: Cluster, timeout_s: int) -> None:
    cluster.do(
        "rollout", "status", f"deployment/{NAME}", f"--timeout={timeout_s}s", timeout_s=timeout_s + _COMMAND_S
    )


def _looked_at(cluster: Cluster, authority: trustme.CA) -> Iterator[str]:
    with cluster.forwarded(f"deployment/{NAME}") as ports:
        for page in _PAGES:
            connection = HTTPConnection("127.0.0.1", ports["metrics"], timeout=_ANSWER_S)
            connection.request("GET", page)
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            if answer.status != 200:
                raise Failed(f"probes: {page}: found {answer.status} {text.strip()}; expected 200")
        yield f"probes: {len(_PAGES)} of {len(_PAGES)} pages answer 200: {', '.join(_PAGES)}"
        record = OPERATORS["group_norm_backward"]
        job = make_job(record, record.build())
        call: dict[str, Any] = {**job.arrays, **job.call.attrs}
        tls = Tls(ca=authority.cert_pem.bytes())
        with Client(f"127.0.0.1:{ports['grpc']}", tls=tls, timeout_s=_COMMAND_S) as client:
            answered = client.group_norm_backward(**call)
        results = {param.name: getattr(answered, param.name) for param in record.outputs}
        if wrong := known(record.name, job).wrong(results):
            raise Failed(f"gradient: {wrong}")
        info = answered.info
        simulated = ", SIMULATED" if info.simulated else ""
        yield f"gradient: 1 of 1 right, by {info.device} ({info.backend}{simulated})"


def _rolled(cluster: Cluster, load: Sequence[dict[str, Any]]) -> str:
    cluster.do("apply", "--filename=-", objects=load)
    ready = ("wait", f"job/{LOAD}", "--for=jsonpath={.status.ready}=1", f"--timeout={_INSTALL_S}s")
    cluster.do(*ready, timeout_s=_INSTALL_S + _COMMAND_S)
    before = _counted(cluster, _LEAST_CALLS)
    cluster.do("rollout", "restart", f"deployment/{NAME}")
    _await_rollout(cluster, _ROLLOUT_S)
    counts = _counted(cluster, before["calls"] + _LEAST_CALLS)
    line = f"rollout under load: {counts['calls']} calls, {counts['failed']} failed"
    if counts["failed"]:
        raise Failed(f"{line}: {counts['told']}")
    return line


def _counted(cluster: Cluster, least: int) -> dict[str, Any]:
    with cluster.lines("logs", f"job/{LOAD}", "--follow", "--tail=1", timeout_s=_INSTALL_S) as lines:
        for line in lines:
            if not line.startswith("{"):
                continue  # a log line: kubectl mixes both outputs of a container
            counts: dict[str, Any] = json.loads(line)
            if counts["calls"] >= least:
                return counts
    raise Failed(f"load: its log ended before {least} calls")


def main(arguments: Sequence[str]) -> int:
    """Takes every step; 0 also where there is nothing to try it on, which is said; 2 without a context."""
    parser = argparse.ArgumentParser(usage=USAGE, description=__doc__)
    parser.add_argument("--context", default="", help="of kubectl's configuration")
    parser.add_argument("--profile", default="cpu", choices=PROFILES, help="default cpu")
    parser.add_argument("--image", default="", help="repository:tag; the chart's own by default")
    parser.add_argument("--values", type=Path, help="YAML file of more values; TLS stays on")
    options = parser.parse_args(arguments)
    if not options.context:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        cluster = Cluster(options.context, f"npugrad-test-{os.getpid()}")
        for line in tried(cluster, options):
            print(line, flush=True)
    except Skipped as reason:
        print(f"test-cluster: skipped: {reason}")
        return 0
    except Failed as error:
        print(f"test-cluster: FAILED: {error}", file=sys.stderr)
        return 1
    print("test-cluster: all as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
