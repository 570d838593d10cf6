"""Where a client's key comes from, and that it goes with every call and nowhere else."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from statetap.api.gate import Gate
from statetap.commands.key import new_key
from statetap.settings import ApiKey
from statetap_client import cli
from statetap_client.api_key import find_api_key
from statetap_client.errors import NoUsableKey, StatetapError
from statetap_client.http import StatetapClient
from statetap_client.schemas import PluginDumps, WorkerRequest
from statetap_client.sync import SyncStatetapClient

from tests.fakes.api_server import FakeService, ServedInThread, serving, serving_in_thread

KEY = new_key()
GATE = Gate([ApiKey(name="ops", scope="admin", sha256=hashlib.sha256(KEY.encode()).hexdigest())])


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATETAP_API_KEY", "STATETAP_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedInThread]:
    with serving_in_thread(FakeService(tmp_path, gate=GATE)) as server:
        yield server


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text(f"\n{KEY} \n")
    return file


def test_what_is_named_nearer_wins(monkeypatch: pytest.MonkeyPatch, key_file: Path) -> None:
    assert find_api_key(None) is None
    monkeypatch.setenv("STATETAP_API_KEY_FILE", str(key_file))
    assert find_api_key(None) == KEY
    monkeypatch.setenv("STATETAP_API_KEY", " variable\n")
    assert find_api_key(None) == "variable"
    assert find_api_key("given") == "given"


@pytest.mark.parametrize("text", [b"", b" \n", b"two words", b"caf\xc3\xa9", b"a\x00b", b"a\nX: y"])
def test_what_cannot_be_a_key_is_refused_untold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: bytes) -> None:
    (tmp_path / "key").write_bytes(text)
    monkeypatch.setenv("STATETAP_API_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(NoUsableKey, match="holds no key") as refused:
        find_api_key(None)
    assert "two" not in str(refused.value)


def test_a_file_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATETAP_API_KEY_FILE", "/nowhere/key")
    with pytest.raises(NoUsableKey, match="/nowhere/key cannot be read: No such file"):
        SyncStatetapClient()


def test_the_blocking_client_brings_it(served: ServedInThread) -> None:
    with SyncStatetapClient(served.url) as client, pytest.raises(StatetapError) as refused:
        client.workers()
    assert refused.value.status == 401
    with SyncStatetapClient(served.url, api_key=KEY) as client:
        dataset = client.create_dataset([{"input_ids": [1]}])
        assert [d.id for d in client.datasets()] == [dataset.id]
        assert KEY not in repr(vars(client))


async def test_the_asynchronous_client_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATETAP_API_KEY", KEY)
    async with serving(FakeService(tmp_path, gate=GATE)) as url, StatetapClient(url) as client:
        assert await client.workers() == []


def test_a_workers_key_reaches_the_service(served: ServedInThread) -> None:
    """Masked wherever a request is shown, written out where it is sent."""
    request = WorkerRequest(name="w", url="http://127.0.0.1:1", dumps=PluginDumps(dir="/d"), api_key="hunter2")
    assert "hunter2" not in request.model_dump_json() + repr(request) + str(request.model_dump())
    with SyncStatetapClient(served.url, api_key=KEY) as client:
        assert client.add_worker(request).has_api_key
    assert served.service.workers.records["w"].api_key == "hunter2"


def test_commands_take_it_from_a_file(
    served: ServedInThread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key_file: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("STATETAP_URL", served.url)
    (tmp_path / "worker-key").write_text("hunter2")
    (tmp_path / "data.ndjson").write_text('{"input_ids": [1]}\n')
    add = ["workers", "add", "w", "http://127.0.0.1:1", "--dumps", "/d", "--worker-key-file", str(tmp_path / "worker-key")]
    submit = ["submit", str(tmp_path / "data.ndjson"), "--store", "s", "--no-wait"]
    commands = [add, ["workers"], ["workers", "drain", "w"], ["workers", "remove", "w"], submit]
    commands += [["jobs"], ["pause", "job1"], ["samples", "job1"]]
    for command in commands:
        for arguments, code in ((command, 1), ([*command, "--api-key-file", str(key_file)], 0)):
            monkeypatch.setattr(sys, "argv", ["statetap", *arguments])
            with pytest.raises(SystemExit) as exited:
                cli.main()
            out, err = capsys.readouterr()
            assert (exited.value.code or 0) == code, (arguments, err)
            assert KEY not in out + err
            assert "hunter2" not in out + err
