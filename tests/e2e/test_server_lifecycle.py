from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from tests import fix_server
from tests.calls import TIMEOUT_S, Failure, call_execute, call_unary, failure_of, sample
from tests.fix_server import ServerProcess, StartServer, run_command, server_flags

from npugrad.errors import CircuitOpen
from npugrad.products import Product
from npugrad.v1 import (
    backward_pb2_grpc,
    server_pb2,
)
from npugrad_server.pool.circuit_breaker import OPEN_S

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("npugrad.v1.BackwardService", "npugrad.v1.ValidationService", "npugrad.v1.ServerService")


def health_of(channel: grpc.Channel, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
    return int(answer.status)


def watch_health(channel: grpc.Channel, service: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)


# ------------------------------------------------------------------------------------------- start


def test_taken_ports_are_told_before_anything_is_started(server: ServerProcess) -> None:
    taken = server.metrics_address
    for flags, said in (
        (server_flags(listen=server.address), f"cannot listen on {server.address}: Address already in use"),
        (server_flags("--metrics-listen", taken), f"cannot serve metrics on {taken}"),
    ):
        ended = run_command("serve", *flags)
        assert ended.returncode == 1
        assert said in ended.stderr
        assert "listening on" not in ended.stdout
    assert server.info().version


def test_taken_default_port_of_metrics_turns_them_off_and_names_the_flag(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(fix_server._SMALL, "--metrics-listen")
    default, cure = ("127.0.0.1", 9464), "name a free port: --metrics-listen HOST:PORT"
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # this test may run twice at once
        with contextlib.suppress(OSError):  # another server has it
            holder.bind(default)
            holder.listen()
        second = start_server(devices="test:1")
        checked = run_command("check", *server_flags(devices="test:1"))
    off = second.find_log("metrics off")
    assert off["reason"] == "cannot serve metrics on 127.0.0.1:9464: Address already in use"
    assert off["cure"].endswith(cure)
    assert second.metrics_address == ""
    (line,) = (line for line in checked.stdout.splitlines() if "9464" in line)
    assert line.startswith("note")
    assert line.endswith(cure)
    assert checked.returncode == 0


def test_unix_socket_serves_and_is_gone_afterwards(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    local = start_server(listen=f"unix:{path}")
    assert local.address == f"unix:{path}"
    made = sample()
    with local.channel() as channel:
        result = call_unary(channel, made.record, made.message())
        assert {name: content.data for name, content in result.contents.items()} == made.reference()
    local.stop()
    assert not path.exists()


def test_devices_that_do_not_open_end_the_start_with_their_reasons(start_server: StartServer) -> None:
    failing = start_server(
        "--max-respawns=1",
        "--respawn-backoff-s=0.01",
        devices="test:2?open=fail",
        wait=False,
        check_end=False,
    )
    assert failing.wait() == 1
    assert "test:0: down" in failing.log_text()
    assert "test:1: down" in failing.log_text()


def test_signal_during_the_start_ends_it(start_server: StartServer) -> None:
    slow = start_server(devices="test:1?open_ms=20000", wait=False, check_end=False)
    while "test:0: starting" not in slow.log_text():
        assert slow.process.poll() is None, slow.log_text()
    slow.signal()
    assert slow.wait() == 0


def test_settings_that_differ_from_their_defaults_are_logged_in_one_record_by_origin(
    start_server: StartServer, tmp_path: Path
) -> None:
    config = tmp_path / "npugrad.toml"
    config.write_text("hang_grace_s = 7\nmax_queue_depth = 9\n")
    env = {"NPUGRAD_CONFIG": str(config), "NPUGRAD_MAX_QUEUE_DEPTH": "5", "NPUGRAD_PRODUCT": "atlas-a3"}
    configured = start_server("--drain-timeout-s", "33", "--run-limit-s", "540", env=env)
    (logged,) = configured.log_lines("settings")
    assert logged["file"] == {"hang_grace_s": 7.0}
    assert logged["environment"] == {"max_queue_depth": 5, "product": "atlas-a3"}
    arenas = {"input_arena_bytes": 2**28, "output_arena_bytes": 2**27, "prefault_bytes": 0}
    others = {"listen": "127.0.0.1:0", "devices": ["cpu:0"], "metrics_listen": "", "log_format": "json"}
    assert logged["flag"] == {**arenas, **others, "drain_timeout_s": 33.0}
    assert logged["chosen"].keys() == {"device_memory_bytes"}
    info = configured.info()
    assert (info.product, info.limits.max_queue_depth) == (Product.ATLAS_A3.wire, 5)


def test_check_lists_everything_that_is_missing_at_once(server: ServerProcess, tmp_path: Path) -> None:
    config = tmp_path / "npugrad.toml"
    config.write_text("max_quue_depth = 9\ndrain_timeout_s = -1\n")
    taken = server.metrics_address
    ended = run_command(
        "check", "--config", str(config), "--listen", server.address, "--metrics-listen", taken,
        "--devices", "test:2?open=fail",
        env={"NPUGRAD_HANG_GRACE_S": "soon"},
    )  # fmt: skip
    assert ended.returncode == 1
    missing = [
        line.removeprefix("FAIL").strip() for line in ended.stdout.splitlines() if line.startswith("FAIL")
    ]
    for expected in (
        "settings: file: unknown key max_quue_depth; did you mean max_queue_depth?",
        "settings: drain_timeout_s: found",
        "settings: hang_grace_s: found 'soon'",
        f"gRPC: cannot listen on {server.address}: Address already in use",
        f"metrics: cannot listen on {taken}: Address already in use",
        "test:0: down",
        "test:1: down",
    ):
        assert any(line.startswith(expected) for line in missing), (expected, missing)
    assert len(missing) == 7


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--devices", "cpu:0", "--input-arena-bytes", "1PiB"),
            "input_arena_bytes, output_arena_bytes: found 1125899906842624",
        ),
        (("--devices", "cpu:0,npu:0"), "devices: found kinds cpu and npu"),
    ],
)
def test_check_tells_what_cannot_be(flags: Sequence[str], said: str) -> None:
    ended = run_command("check", "--listen", "127.0.0.1:0", "--metrics-listen", "", *flags)
    assert ended.returncode == 1
    assert said in ended.stdout


# ------------------------------------------------------------------------------------ health, info


def test_health_of_every_service(server_channel: grpc.Channel) -> None:
    for service in ("", *SERVICES, "liveness"):
        assert health_of(server_channel, service) == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health_of(server_channel, "npugrad.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    # A watch of an unknown service says so and goes on.
    watch = watch_health(server_channel, "later")
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def test_health_follows_the_devices(start_server: StartServer) -> None:
    """The only worker dies under a call: not ready until another one is, but alive all the time."""
    flags = ("--metrics-listen", "127.0.0.1:0", "--respawn-backoff-s", "0.2")
    fragile = start_server(*flags, devices="test:1?crash=die&compute=1")
    made = sample()
    with fragile.channel() as channel:
        watch = watch_health(channel)
        assert next(watch).status == SERVING
        failure = failure_of(lambda: call_unary(channel, made.record, made.message(label="die")))
        assert (failure.status, failure.error.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        assert not failure.error.retryable
        refused = failure_of(lambda: call_unary(channel, made.record, made.message()))
        assert_lost_workers_are_counted(fragile, refused)
        assert next(watch).status == NOT_SERVING
        assert health_of(channel, "liveness") == SERVING
        while next(watch).status != SERVING:
            pass
        other = sample(n=1)  # not of the signature that is refused now
        assert call_unary(channel, other.record, other.message()).info.simulated
        watch.cancel()
        (device,) = fragile.info().devices
        assert device.restarts >= 1
        assert device.state == server_pb2.DEVICE_STATE_READY


def assert_lost_workers_are_counted(fragile: ServerProcess, refused: Failure) -> None:
    """After the first call that killed its worker at each of three tries, and the refusal of another one."""
    assert (refused.status, refused.error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CIRCUIT_OPEN")
    assert isinstance(refused.error, CircuitOpen)
    assert 0 < (refused.error.retry_after_s or 0) <= OPEN_S
    found = metrics_of(fragile)
    assert found["npugrad_workers_lost_total", frozenset({("device", "test:0")})] == 3
    assert found["npugrad_calls_rerun_total", frozenset({("device", "test:0")})] == 2
    assert found["npugrad_attempts_total", frozenset({("device", "test:0")})] == 3
    assert found["npugrad_circuits_opened_total", frozenset({("operator", "group_norm_backward")})] == 1
    assert found["npugrad_open_circuits", frozenset()] == 1


def test_probe_pages_follow_the_devices(start_server: StartServer) -> None:
    """What an HTTP probe is told is what health says, with the reason."""
    fragile = start_server(
        "--metrics-listen", "127.0.0.1:0", "--respawn-backoff-s", "60", "--respawn-backoff-max-s", "60",
        devices="test:1?crash=die",
        check_end=False,
    )  # fmt: skip
    made = sample()
    assert [fragile.page(path)[0] for path in ("/livez", "/readyz", "/")] == [200, 200, 404]
    with fragile.channel() as channel:
        watch = watch_health(channel)
        assert next(watch).status == SERVING
        call = backward_pb2_grpc.BackwardServiceStub(channel).GroupNormBackward.future(
            made.message(label="die"), timeout=TIMEOUT_S
        )
        assert next(watch).status == NOT_SERVING
        status, told = fragile.page("/readyz")
        assert (status, told.startswith("no device is ready: test:0 ")) == (503, True), told
        assert fragile.page("/livez")[0] == 200
        call.cancel()
        watch.cancel()


def test_reflection_knows_every_service_and_its_messages(server: ServerProcess) -> None:
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="npugrad.v1.BackwardService"),
    ]
    with server.channel() as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, file = stub.ServerReflectionInfo(iter(requests), timeout=TIMEOUT_S)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert any(b"GroupNormBackward" in part for part in file.file_descriptor_response.file_descriptor_proto)


def test_server_info_tells_product_devices_limits_and_versions(server: ServerProcess) -> None:
    info = server.info()
    (device,) = info.devices
    assert (device.name, device.simulated, device.state) == ("cpu:0", False, server_pb2.DEVICE_STATE_READY)
    assert device.backend.startswith("cpu")
    assert info.product == Product.ATLAS_A2.wire
    assert not info.draining
    assert info.limits.input_arena_bytes == 256 * 2**20
    assert info.limits.max_message_bytes == 4 * 2**20 + 2**16
    assert {"npugrad", "python", "grpcio", "protobuf", "numpy"} <= set(info.versions)
    assert "group_norm_backward" in info.operators
    assert info.uptime_s > 0
    assert info.verify_sample == 0


# ----------------------------------------------------------------------------------------- metrics


def metrics_of(server: ServerProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    status, page = server.page("/metrics")
    assert status == 200
    families = text_string_to_metric_families(page)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def test_metrics_count_calls_bytes_stages_and_show_the_pool(start_server: StartServer) -> None:
    counted = start_server("--metrics-listen", "127.0.0.1:0")
    made = sample()
    bad = made.message()
    bad.group = 0
    with counted.channel() as channel:
        call_unary(channel, made.record, made.message())
        call_execute(channel, made.frames())
        failure_of(lambda: call_unary(channel, made.record, bad))
    found = metrics_of(counted)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    operator = {"operator": "group_norm_backward"}
    ok = {**operator, "status": "OK", "reason": "OK", "device": "cpu:0"}
    refused = {"status": "INVALID_ARGUMENT", "reason": "ACLNN_ERR_PARAM_INVALID", "device": ""}
    assert value("npugrad_calls_total", method="GroupNormBackward", **ok) == 1
    assert value("npugrad_calls_total", method="Execute", **ok) == 1
    assert value("npugrad_calls_total", method="GroupNormBackward", **operator, **refused) == 1
    assert value("npugrad_accepted_calls_total", **operator) == 2
    assert value("npugrad_received_bytes_total", **operator) == 2 * sum(
        c.nbytes for c in made.contents.values()
    )
    assert value("npugrad_sent_bytes_total", **operator) == 2 * sum(m.nbytes for m in made.outputs.values())
    for stage in ("queued", "copy_in", "run", "copy_out"):
        assert value("npugrad_stage_seconds_count", device="cpu:0", stage=stage, **operator) == 2
    assert value("npugrad_call_seconds_count", method="Execute", **operator) == 1
    assert value("npugrad_input_arena_used_bytes") == value("npugrad_output_arena_used_bytes") == 0
    assert value("npugrad_input_arena_bytes") == 256 * 2**20
    assert value("npugrad_queue_depth") == value("npugrad_running_calls") == value("npugrad_uploads") == 0
    assert value("npugrad_device_state", device="cpu:0", state="ready") == 1
    assert value("npugrad_device_state", device="cpu:0", state="down") == 0
    assert value("npugrad_worker_restarts_total", device="cpu:0") == 0
    assert value("npugrad_workers_lost_total", device="cpu:0") == 0
    assert value("npugrad_active_calls", method="Execute") == 0
    assert value("npugrad_build_info", version=counted.info().version, product="atlas-a2") == 1
