from __future__ import annotations

from pathlib import Path

import pytest

from npugrad.codec import MAX_CHUNK_BYTES
from npugrad.products import Product
from npugrad_server.config import (
    LEAST_MESSAGE_BYTES,
    LoadedSettings,
    ServerSettings,
    SettingsError,
    load_settings,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServerSettings.model_fields:
        monkeypatch.delenv(f"NPUGRAD_{name.upper()}", raising=False)
    monkeypatch.delenv("NPUGRAD_CONFIG", raising=False)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


def problems(flags: dict[str, object] | None = None, config: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, config)
    return caught.value.problems


def value_and_origin(loaded: LoadedSettings, name: str) -> tuple[object, str]:
    return getattr(loaded.settings, name), loaded.origins[name]


def test_defaults_serve_loopback_with_nothing_set() -> None:
    loaded = load_settings()
    assert loaded.settings.listen == "127.0.0.1:50051"
    assert loaded.settings.metrics_listen == "127.0.0.1:9464"
    assert loaded.settings.drain_timeout_s == 120
    assert loaded.settings.max_queue_depth == 256
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.settings.fixed_product is None
    assert load_settings({"product": "atlas-a3"}).settings.fixed_product is Product.ATLAS_A3


def test_flag_wins_over_environment_over_file_over_default(
    monkeypatch: pytest.MonkeyPatch, toml: Path
) -> None:
    defaults = load_settings()
    toml.write_text('max_queue_depth = 1\nhang_grace_s = 1\ndrain_timeout_s = 1\ndevices = "cpu:1"\n')
    monkeypatch.setenv("NPUGRAD_MAX_QUEUE_DEPTH", "2")
    monkeypatch.setenv("NPUGRAD_HANG_GRACE_S", "2")
    loaded = load_settings({"max_queue_depth": "3", "log_level": None}, toml)
    assert value_and_origin(loaded, "max_queue_depth") == (3, "flag")
    assert value_and_origin(loaded, "hang_grace_s") == (2.0, "environment")
    assert value_and_origin(loaded, "drain_timeout_s") == (1.0, "file")
    assert value_and_origin(loaded, "devices") == ("cpu:1", "file")
    assert value_and_origin(loaded, "log_level") == ("info", "default")
    # The file is also named by the environment, which the constructor does not read.
    monkeypatch.setenv("NPUGRAD_CONFIG", str(toml))
    assert load_settings().settings.devices == "cpu:1"
    assert ServerSettings() == defaults.settings


def test_unknown_keys_are_named_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch, toml: Path) -> None:
    toml.write_text("drain_timout_s = 3\nzzz = 1\n")
    monkeypatch.setenv("NPUGRAD_LISTN", "x")
    found = problems(None, toml)
    assert "file: unknown key drain_timout_s; did you mean drain_timeout_s?" in found
    assert "environment: unknown variable NPUGRAD_LISTN; did you mean NPUGRAD_LISTEN?" in found
    assert any(line.startswith("file: unknown key zzz; known are listen, ") for line in found)


def test_all_wrong_values_are_told_at_once_and_the_others_stay_usable(toml: Path) -> None:
    toml.write_text('product = "a2"\nmax_queue_depth = 0\nlisten = "somewhere"\ndrain_timeout_s = inf\n')
    with pytest.raises(SettingsError) as caught:
        load_settings({"devices": "cpu:3", "metrics_listen": "unix:x", "input_arena_bytes": "many"}, toml)
    names = {line.partition(":")[0] for line in caught.value.problems}
    assert names == {
        "product", "max_queue_depth", "listen", "drain_timeout_s", "metrics_listen", "input_arena_bytes",
    }  # fmt: skip
    assert all("found " in line and "(from " in line for line in caught.value.problems)
    assert caught.value.usable.settings.devices == "cpu:3"
    assert caught.value.usable.settings.max_queue_depth == 256


def test_values_that_are_no_numbers_or_flags_are_told_in_our_words() -> None:
    assert problems({"max_queue_depth": "many", "drain_timeout_s": "soon", "insecure": "perhaps"}) == (
        "insecure: found 'perhaps'; expected true or false (from flag)",
        "max_queue_depth: found 'many'; expected an integer (from flag)",
        "drain_timeout_s: found 'soon'; expected a number (from flag)",
    )


def test_settings_that_go_together_are_compared() -> None:
    """A grace goes with an age; the front's memory has room for the largest call."""
    both = load_settings({"max_connection_age_s": "60", "max_connection_age_grace_s": "9"}).settings
    assert (both.max_connection_age_s, both.max_connection_age_grace_s) == (60, 9)
    assert problems({"max_connection_age_grace_s": "9"}) == (
        "max_connection_age_grace_s: needs max_connection_age_s (from flag)",
    )
    load_settings({"front_memory_bytes": 8 * LEAST_MESSAGE_BYTES})
    assert problems({"front_memory_bytes": 8 * LEAST_MESSAGE_BYTES - 1}) == (
        f"front_memory_bytes: found {8 * LEAST_MESSAGE_BYTES - 1} bytes; expected at least "
        f"{8 * LEAST_MESSAGE_BYTES}, which is 8 times max_message_bytes (from flag)",
    )


def test_service_links_of_kubernetes_and_variables_of_others_are_no_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "NPUGRAD_SERVICE_HOST": "10.0.0.1",
        "NPUGRAD_SERVICE_PORT_GRPC": "50051",
        "NPUGRAD_PORT": "tcp://10.0.0.1:50051",
        "NPUGRAD_PORT_50051_TCP_ADDR": "10.0.0.1",
        "NPUGRAD_HEADLESS_SERVICE_HOST": "None",
        "NPUGRAD_TARGET": "localhost:50051",
        "NPUGRAD_BUILD_KERNELS": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_settings().settings == ServerSettings()


@pytest.mark.parametrize(
    ("text", "expected"), [("2GiB", 2 * 2**30), ("1048576", 2**20), ("256 MiB", 2**28), ("1.5kb", 1500)]
)
def test_byte_sizes_take_units(text: str, expected: int) -> None:
    assert load_settings({"input_arena_bytes": text}).settings.input_arena_bytes == expected


@pytest.mark.parametrize(
    ("nbytes", "bound"), [(LEAST_MESSAGE_BYTES - 1, "at least 4259840"), (2**31, "at most 2147483647")]
)
def test_messages_have_room_for_the_largest_chunk(nbytes: int, bound: str) -> None:
    """And for what is around it; by default that is all the room they have."""
    assert ServerSettings().max_message_bytes == LEAST_MESSAGE_BYTES == MAX_CHUNK_BYTES + 2**16
    (problem,) = problems({"max_message_bytes": str(nbytes)})
    assert problem == f"max_message_bytes: found '{nbytes}'; expected {bound} (from flag)"


def test_plaintext_beyond_loopback_needs_insecure() -> None:
    for address in ("0.0.0.0:1", "[::]:1", "192.0.2.1:1", "npu-host:1"):
        (problem,) = problems({"listen": address})
        assert "--insecure" in problem
        assert "--tls-certificate and --tls-key" in problem
        assert load_settings({"listen": address, "insecure": True}).settings.listen == address
    for address in ("127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "unix:/run/npugrad"):
        assert load_settings({"listen": address}).settings.listen == address


def test_missing_or_broken_file_is_an_error(toml: Path) -> None:
    assert "cannot read" in problems(None, toml)[0]
    toml.write_text("listen = \n")
    assert "is not TOML" in problems(None, toml)[0]


def test_every_setting_is_described_with_its_unit() -> None:
    for name, field in ServerSettings.model_fields.items():
        assert field.description, name
        if field.annotation is float:
            assert name.endswith(("_s", "_ratio", "_sample")), name
