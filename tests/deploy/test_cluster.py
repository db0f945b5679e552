"""`make test-cluster` where there is no cluster: what it says, what it would send, and its load."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import trustme
import yaml
from kubernetes_validate.utils import all_versions, major_minor
from packaging.version import Version
from tests.deploy import cluster
from tests.deploy.cluster import USAGE, load_of, main, secret_of
from tests.deploy.releases import MUTUAL, NAME, Release, render
from tests.fix_server import run_quick_server
from tests.fix_tls import Certificates

from npugrad._tools.gen_manifests import ROOT, values_of
from npugrad_client.bench.slo import Slo
from npugrad_server.cluster import request_of

LOAD = Path(cluster.__file__).with_name("cluster_load.py")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of kubectl whose only cluster nobody serves."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "gone", "cluster": {"server": "https://127.0.0.1:9"}}],
        "contexts": [{"name": "gone", "context": {"cluster": "gone", "user": "nobody"}}],
        "users": [{"name": "nobody", "user": {}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_it_is_refused_without_a_context(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".stamp").touch()
    done = subprocess.run(
        ["make", "-s", "test-cluster", f"VENV={tmp_path}", "-o", f"{tmp_path}/.stamp"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert USAGE in done.stderr


def test_it_is_skipped_without_kubectl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["--context", "any"]) == 0
    assert capsys.readouterr().out == "test-cluster: skipped: kubectl is not installed\n"


@needs_kubectl
@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(("context", "why"), [("gone", ""), ("other", "does not exist")])
def test_it_is_skipped_where_nobody_answers(
    context: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--context", context]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"test-cluster: skipped: the context {context} does not answer: ")
    assert why in told


@pytest.mark.parametrize("profile", ["cpu", "mindcluster"])
def test_what_it_sends_meets_the_strict_schema(profile: str) -> None:
    release = list(render(values_of(profile), "elsewhere").values())
    objects = [secret_of(trustme.CA(), "elsewhere"), *load_of(release, "elsewhere")]
    newest = max(map(major_minor, all_versions()), key=Version)
    for document in objects:
        kubernetes_validate.validate(document, newest, strict=True)
    job = objects[-1]["spec"]["template"]["spec"]["containers"][0]
    assert f"dns:///{NAME}-headless.elsewhere:50051" in job["command"]
    assert yaml.safe_load(yaml.safe_dump(objects)) == objects


@pytest.mark.slow
def test_its_load_counts_calls_and_those_that_fail(certificates: Certificates, tmp_path: Path) -> None:
    with run_quick_server(
        tmp_path / "server.log", *certificates.flags, credentials=certificates.credentials(), check_end=False
    ) as running:
        command = [sys.executable, str(LOAD), running.address, certificates.authority]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
            try:
                assert load.stdout is not None
                counts = (json.loads(line) for line in load.stdout)
                before = next(each for each in counts if each["calls"] > 0)
                assert before["failed"] == 0
                load.send_signal(signal.SIGTERM)
                last = list(counts)[-1]
                assert last["calls"] >= before["calls"]
                assert (last["failed"], last["told"]) == (0, {})
                assert load.wait(60) == 0
            finally:
                load.kill()


@pytest.mark.parametrize(("profile", "cards"), [("mindcluster", 1), ("mindcluster", 4), ("cpu", 1)])
def test_preflight_asks_for_what_a_pod_of_the_chart_requests(profile: str, cards: int) -> None:
    found = Release(profile, {} if profile == "cpu" else {"devices": {"count": cards}})
    wanted, limits = request_of(profile, cards, "910b", ""), found.server["resources"]["limits"]
    memory = f"{wanted.memory_bytes / 2**30:g}Gi"
    assert (float(limits["cpu"]), limits["memory"]) == (wanted.cpus, memory)


def test_the_chart_s_load_test_has_a_certificate_of_its_own_and_never_the_server_s_key() -> None:
    """gRPC refuses the server's certificate from a client: cert-manager issues it for servers only."""
    load_test = {"enabled": True, "image": "bench", "clientSecretName": "load-test"}
    job = Release("cpu", MUTUAL, {"loadTest": load_test}).objects["Job", f"{NAME}-load-test"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "test"  # a Job in a release cannot be upgraded
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
    mounts = [each for each in container["volumeMounts"] if each["name"] in secrets]
    mounted = {each["mountPath"]: secrets[each["name"]] for each in mounts}
    authority, own = mounted["/etc/npugrad/tls"], mounted["/etc/npugrad/client"]
    assert authority["secretName"] == f"{NAME}-tls"
    assert authority["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert own["secretName"] == "load-test"
    args = container["args"]
    paths = [arg.partition("=")[2] for arg in args if arg.startswith("--tls-")]
    assert paths == [f"/etc/npugrad/{name}" for name in ("tls/ca.crt", "client/tls.crt", "client/tls.key")]
    assert Slo.parse(args[args.index("--slo") + 1]).objectives


def test_the_chart_s_load_test_runs_where_the_server_may_and_reaches_it() -> None:
    where: dict[str, Any] = {
        "nodeSelector": {"kubernetes.io/arch": "arm64"},
        "tolerations": [{"key": "npu", "operator": "Exists", "effect": "NoSchedule"}],
        "image": {"pullSecrets": [{"name": "registry"}], "pullPolicy": "Always"},
    }
    edge = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "edge"}}}
    policy = {"networkPolicy": {"enabled": True, "clients": [edge]}}
    found = Release("cpu", where, policy, {"loadTest": {"enabled": True, "image": "bench"}})
    template = found.objects["Job", f"{NAME}-load-test"]["spec"]["template"]
    for name in ("nodeSelector", "tolerations", "imagePullSecrets"):
        assert template["spec"][name] == found.pod[name]
    assert template["spec"]["containers"][0]["imagePullPolicy"] == "Always"
    first, own = found.objects["NetworkPolicy", NAME]["spec"]["ingress"][0]["from"]
    assert first == edge
    assert own["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
