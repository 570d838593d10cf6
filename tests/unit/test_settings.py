"""Settings: where they come from, what wins, and what is said about those that cannot be used."""

import json
import os
import tomllib
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError
from statetap.commands.config import config
from statetap.settings import KNOWN_KEYS, SettingsError, Sources, load_settings
from typer.testing import CliRunner

DEPLOY = Path(__file__).parents[2] / "deploy"
WORKER = """
[[workers]]
name = "gpu0"
url = "http://127.0.0.1:30000"
dumps = { kind = "plugin", dir = "/dev/shm/statetap" }
"""
KEY = f"""
[[keys]]
name = "ops"
scope = "admin"
sha256 = "{"0a" * 32}"
"""


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch, tmp_path):
    """No variable of whoever runs the tests, a home and a working directory of the test's own."""
    for name in list(os.environ):
        if name.upper().startswith("STATETAP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="statetap.toml"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write_file


def refusal(config=None, flags=None):
    with pytest.raises(SettingsError) as caught:
        load_settings(config, flags)
    return str(caught.value)


def test_without_anything_set_the_defaults_are_in_force(tmp_path):
    settings = load_settings()
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8420)
    assert settings.data_dir == tmp_path / "home/.local/share/statetap"
    assert settings.store_roots == (settings.data_dir / "stores",)
    assert settings.workers == ()
    assert settings.model is None


def test_a_flag_beats_a_variable_and_a_variable_beats_the_file(write, monkeypatch):
    write('model = "file"\n[server]\nport = 1\n[runtime]\nattempts_per_sample = 1\nwriter_threads = 1\nrescan_seconds = 1\n')
    monkeypatch.setenv("STATETAP_SERVER__PORT", "2")
    monkeypatch.setenv("STATETAP_RUNTIME__WRITER_THREADS", "2")
    monkeypatch.setenv("STATETAP_RUNTIME__ATTEMPTS_PER_SAMPLE", "2")
    settings = load_settings(flags={"runtime.attempts_per_sample": 3, "model": None})
    assert settings.runtime.attempts_per_sample == 3
    assert settings.runtime.writer_threads == 2
    assert settings.runtime.rescan_seconds == 1
    assert settings.server.port == 2
    assert settings.model == "file"


def test_the_file_is_found_by_flag_then_variable_then_working_directory(write, monkeypatch):
    write("[server]\nport = 1")
    assert load_settings().server.port == 1
    monkeypatch.setenv("STATETAP_CONFIG", str(write("[server]\nport = 2", "two.toml")))
    assert load_settings().server.port == 2
    assert load_settings(write("[server]\nport = 3", "three.toml")).server.port == 3


def test_a_file_that_is_named_must_be_there_and_be_toml(write, monkeypatch):
    assert refusal(Path("nowhere.toml")).startswith("nowhere.toml: No such file or directory")
    monkeypatch.setenv("STATETAP_CONFIG", "elsewhere.toml")
    assert refusal().startswith("elsewhere.toml: No such file or directory")
    assert "bad.toml: not TOML: " in refusal(write("port 1", "bad.toml"))


def test_lists_and_tables_in_variables_are_json(monkeypatch):
    monkeypatch.setenv("STATETAP_STORE_ROOTS", '["/a", "/b"]')
    monkeypatch.setenv(
        "STATETAP_WORKERS", '[{"name": "w", "url": "http://127.0.0.1:1", "dumps": {"kind": "plugin", "dir": "/d"}}]'
    )
    settings = load_settings()
    assert settings.store_roots == (Path("/a"), Path("/b"))
    assert settings.workers[0].dumps.dir == "/d"
    monkeypatch.setenv("STATETAP_STORE_ROOTS", "/a")
    assert refusal() == "STATETAP_STORE_ROOTS: not JSON; write a list or a table in a variable as JSON, such as '[\"/data\"]'"


def test_object_stores_are_urls_in_one_spelling(write):
    assert load_settings(write('object_stores = ["s3://bucket/a/", "gs://b"]', "good.toml")).object_stores == (
        "s3://bucket/a",
        "gs://b",
    )
    assert load_settings().object_stores == ()
    told = refusal(write('object_stores = ["s3://bucket/../a"]', "bad.toml"))
    assert "bad.toml: object_stores[0]: 's3://bucket/../a' has the part '..'" in told


def test_variables_of_the_plugin_and_the_client_are_ignored(monkeypatch):
    monkeypatch.setenv("STATETAP_PLUGIN_DIR", "/dev/shm/x")
    monkeypatch.setenv("STATETAP_PLUGIN_SERVER__PROT", "1")
    monkeypatch.setenv("STATETAP_URL", "http://127.0.0.1:8420")
    monkeypatch.setenv("STATETAP_API_KEY", "statetap_x")
    monkeypatch.setenv("STATETAP_API_KEY_FILE", "/key")
    monkeypatch.setenv("STATETAP_MODEL", "")
    assert load_settings().model is None


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("store_root", "store_roots"),
        ("port", "server.port"),
        ("server.prot", "server.port"),
        ("server_port", "server.port"),
        ("runtime.lease", "runtime.lease_seconds"),
        ("writer_threads", "runtime.writer_threads"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one_wherever_it_was_set(key, nearest, write, monkeypatch):
    variable = f"STATETAP_{nearest.replace('.', '__').upper()}"
    *section, name = key.split(".")
    file = write((f"[{section[0]}]\n" if section else "") + f"{name} = 1", "keys.toml")
    told = f"unknown key {key}; the nearest known one is {nearest} (variable {variable})"
    assert refusal(file) == f"{file}: {told}"
    monkeypatch.setenv(f"STATETAP_{key.replace('.', '__').upper()}", "1")
    assert refusal() == f"STATETAP_{key.replace('.', '__').upper()}: {told}"


def test_an_unknown_key_of_a_worker_names_its_place(write):
    file = write(WORKER.replace("dir =", "dri =") + "requests_per_secnd = 1\n")
    lines = refusal().splitlines()
    assert "statetap.toml: unknown key workers[0].dumps.dri; the nearest known one is workers.dumps.dir" in lines
    assert "statetap.toml: workers[0].dumps.dir: Field required" in lines
    assert (
        "statetap.toml: unknown key workers[0].requests_per_secnd; the nearest known one is workers.requests_per_second" in lines
    )
    assert len(lines) == 3
    assert file.name == "statetap.toml"


def test_every_known_key_is_taken_for_known():
    assert {("server", "port"), ("workers", "dumps", "quiet_period_seconds"), ("runtime", "drain_seconds")} <= set(KNOWN_KEYS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[server]\nport = 65536", "server.port: Input should be less than or equal to 65535"),
        ("[runtime]\nlease_seconds = 0", "runtime.lease_seconds: Input should be greater than 0"),
        ('[log]\nlevel = "loud"', "log.level: Input should be 'debug', 'info', 'warning' or 'error'"),
        (KEY + KEY, "keys: ops: configured more than once; give each a name of its own"),
        (KEY.replace("admin", "root"), "keys[0].scope: Input should be 'read-only' or 'admin'"),
        (KEY.replace("0a" * 32, "statetap_secret"), "keys[0].sha256: String should match pattern '^[0-9a-f]{64}$'"),
        (WORKER + WORKER, "workers: gpu0: configured more than once; give each a name of its own"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_its_key(text, reason, write):
    write(text)
    assert refusal() == f"statetap.toml: {reason}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_without_keys_only_loopback_is_allowed(host):
    told = refusal(flags={"server.host": host})
    assert told.startswith(f"a flag: server.host: '{host}' can be reached from outside, and without configured keys")
    assert told.endswith("use 127.0.0.1 or ::1, or make a key with `statetap key`")


def test_with_a_key_it_may_be_reached_from_outside(write):
    settings = load_settings(write(KEY), {"server.host": "0.0.0.0"})
    assert settings.server.host == "0.0.0.0"
    assert (settings.keys[0].name, settings.keys[0].scope) == ("ops", "admin")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_has_more_than_one_name(host):
    assert load_settings(flags={"server.host": host}).server.host == host


def test_paths_are_absolute_and_the_home_is_filled_in(write, tmp_path):
    write('data_dir = "here"\ndataset_roots = ["~/sets"]')
    settings = load_settings()
    assert settings.data_dir == tmp_path / "here"
    assert settings.store_roots == (tmp_path / "here/stores",)
    assert settings.dataset_roots == (tmp_path / "home/sets",)


def test_settings_do_not_change_once_they_are_read():
    settings = load_settings()
    with pytest.raises(ValidationError):
        settings.server.port = 1
    with pytest.raises(ValidationError):
        settings.model = "other"


def test_the_origin_of_every_value_is_known(write, monkeypatch):
    file = write('model = "m"\n[server]\nport = 1' + WORKER)
    monkeypatch.setenv("STATETAP_LOG", '{"level": "debug"}')
    sources = Sources.read(flags={"runtime.lease_seconds": 5})
    assert sources.settings().log.level == "debug"
    assert sources.origin(("model",)) == file.name
    assert sources.origin(("workers", 0, "url")) == file.name
    assert sources.origin(("workers", 0, "requests_per_second")) == "default"
    assert sources.origin(("log", "level")) == "STATETAP_LOG"
    assert sources.origin(("runtime", "lease_seconds")) == "a flag"
    assert sources.origin(("runtime", "probe_seconds")) == "default"


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(config)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_config_prints_toml_that_sets_the_same_again(run, write, monkeypatch):
    write('data_dir = "/d"\nmodel = "a \\"b\\" \\u007f é 𝄞"\n[runtime]\nrescan_seconds = 0.25' + WORKER)
    monkeypatch.setenv("STATETAP_SERVER__PORT", "9000")
    printed = run()
    assert printed.exit_code == 0
    assert "port = 9000  # STATETAP_SERVER__PORT\n" in printed.stdout
    assert 'host = "127.0.0.1"  # default\n' in printed.stdout
    before = load_settings()
    monkeypatch.delenv("STATETAP_SERVER__PORT")
    assert load_settings(write(printed.stdout, "again.toml")).model_dump() == before.model_dump()


def test_config_prints_json(run, write):
    write(WORKER)
    shown = json.loads(run("--json").stdout)
    assert shown["workers"][0]["dumps"] == {"kind": "plugin", "dir": "/dev/shm/statetap"}
    assert shown["model"] is None


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_config_masks_a_workers_key(arguments, run, write):
    write(WORKER + 'api_key = "hunter2"\n')
    assert load_settings().workers[0].api_key.get_secret_value() == "hunter2"
    printed = run(*arguments).stdout
    assert "hunter2" not in printed
    assert '"**********"' in printed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("url", "http://me:hunter2@127.0.0.1:30000"),
        ("url", "http://me:hunter2"),
        ("api_key", "hunter2 "),
        ("api_key", "hunter2\\n"),
    ],
)
def test_a_refusal_of_a_secret_does_not_tell_it(key, value, run, write):
    text = WORKER.replace("http://127.0.0.1:30000", value) if key == "url" else WORKER + f'api_key = "{value}"\n'
    write(text)
    told = refusal()
    assert told.startswith(f"statetap.toml: workers[0].{key}: must ")
    ended = run()
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "hunter2" not in told + ended.stderr


def test_config_says_what_is_wrong_and_ends_with_2(run, write):
    write("prot = 1")
    ended = run()
    assert ended.exit_code == 2
    assert ended.stdout == ""
    assert (
        ended.stderr == "statetap.toml: unknown key prot; the nearest known one is server.port (variable STATETAP_SERVER__PORT)\n"
    )


def test_the_example_of_a_deployment_is_in_force_as_it_stands():
    settings = load_settings(DEPLOY / "statetap.toml")
    assert [worker.dumps.kind for worker in settings.workers] == ["plugin", "plain"]
    document = tomllib.loads((DEPLOY / "statetap.toml").read_text(encoding="utf-8"))
    assert settings.model_dump(mode="json")["runtime"]["writer_threads"] == document["runtime"]["writer_threads"]


def test_the_systemd_unit_runs_serve_with_room_to_drain():
    unit = (DEPLOY / "systemd/statetap.service").read_text(encoding="utf-8")
    values = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    assert values["ExecStart"].endswith("/statetap serve --config /etc/statetap/statetap.toml")
    assert values["Type"] == "notify"
    assert values["KillSignal"] == "SIGTERM"
    assert float(values["TimeoutStopSec"]) > load_settings(DEPLOY / "statetap.toml").runtime.drain_seconds
