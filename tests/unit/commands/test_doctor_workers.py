"""Which workers a command line means."""

from __future__ import annotations

import json

import pytest
from statetap.commands.doctor_workers import DumpOptions, UnknownWorker, choose_workers, registered_workers, service_url
from statetap.settings import Settings
from statetap_client.schemas import PlainDumps, PluginDumps, Worker, WorkerRequest

URL = "http://127.0.0.1:30000"
NOTHING = DumpOptions()


def configured(name, port=30000):
    return WorkerRequest(name=name, url=f"http://127.0.0.1:{port}", dumps=PluginDumps(dir="/dumps"))


def registered(name, port=30000):
    return Worker(
        name=name,
        url=f"http://127.0.0.1:{port}",
        dumps=PluginDumps(dir="/dumps"),
        state="ready",
        reason=None,
        in_flight=1,
        requests=3,
        failures=0,
        model_path="org/model",
        model_fingerprint="f",
        context_length=4096,
        dump_bytes=0,
        budget_bytes=1 << 30,
    )


def test_a_name_is_configured_or_registered():
    chosen = choose_workers(["b", "a"], NOTHING, [configured("a")], [registered("b", 30001)])
    assert [(one.request.name, one.request.url) for one in chosen] == [("b", "http://127.0.0.1:30001"), ("a", URL)]
    assert [one.registered is not None for one in chosen] == [True, False]


def test_what_the_service_says_belongs_to_the_same_server_only():
    (chosen,) = choose_workers(["a"], NOTHING, [configured("a", 30005)], [registered("a", 30000)])
    assert chosen.request.url == "http://127.0.0.1:30005"
    assert chosen.registered is None


def test_without_words_all_known_workers_are_meant():
    chosen = choose_workers([], NOTHING, [configured("a")], [registered("a"), registered("b", 30001)])
    assert [one.request.name for one in chosen] == ["a", "b"]


def test_a_url_goes_with_a_dump_root_and_is_named(tmp_path):
    options = DumpOptions(root=tmp_path)
    (chosen,) = choose_workers([f"gpu-3={URL}"], options, [], [])
    assert (chosen.request.name, chosen.request.url) == ("gpu-3", URL)
    assert chosen.request.dumps == PluginDumps(dir=str(tmp_path))


def test_a_url_alone_is_named_by_the_only_folder_of_the_root(tmp_path):
    (tmp_path / "only").mkdir()
    options = DumpOptions(root=tmp_path)
    assert choose_workers([URL], options, [], [])[0].request.name == "only"
    (tmp_path / "second").mkdir()
    with pytest.raises(UnknownWorker, match=f"there are only, second; say which with NAME={URL}"):
        choose_workers([URL], options, [], [])


def test_a_query_in_a_url_is_no_name(tmp_path):
    (tmp_path / "only").mkdir()
    (chosen,) = choose_workers([f"{URL}/path?a=b"], DumpOptions(root=tmp_path), [], [])
    assert (chosen.request.name, chosen.request.url) == ("only", f"{URL}/path?a=b")


def test_plain_dumps_are_declared_in_a_file(tmp_path):
    declared = {
        "kind": "plain",
        "dir": "/dumps/x",
        "aux_layer_ids": [1],
        "final": "none",
        "model_path": "m",
        "model_fingerprint": "f",
        "num_layers": 2,
        "hidden_size": 4,
        "vocab_size": 10,
        "dtype": "float32",
    }
    file = tmp_path / "dumps.json"
    file.write_text(json.dumps(declared))
    (chosen,) = choose_workers([URL], DumpOptions(config=file), [], [])
    assert chosen.request.name == "127.0.0.1-30000"
    assert isinstance(chosen.request.dumps, PlainDumps)


@pytest.mark.parametrize(
    ("words", "root", "message"),
    [
        (["c"], False, "no worker is called 'c'; known are a"),
        ([URL], False, "where does http://127.0.0.1:30000 publish"),
        (["a"], True, "'a' is no URL, and --dumps goes with URLs"),
        (["a", "a"], False, "a: named more than once"),
        (["x=http://"], True, "must be a URL"),
        (["x y=http://127.0.0.1:1"], True, "name"),
    ],
)
def test_a_word_that_means_no_worker(tmp_path, words, root, message):
    with pytest.raises(UnknownWorker, match=message):
        choose_workers(words, DumpOptions(root=tmp_path if root else None), [configured("a")], [])


def test_nobody_to_examine():
    with pytest.raises(UnknownWorker, match="no worker is configured or registered"):
        choose_workers([], NOTHING, [], [])


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_declaration_that_cannot_be_read(tmp_path, content):
    file = tmp_path / "dumps.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UnknownWorker, match=r"dumps\.json"):
        choose_workers([URL], DumpOptions(config=file), [], [])


def test_dumps_are_named_once(tmp_path):
    with pytest.raises(UnknownWorker, match="either --dumps DIR or --dumps-config FILE"):
        choose_workers([URL], DumpOptions(root=tmp_path, config=tmp_path), [], [])


def test_no_service_is_no_workers(unused_tcp_port):
    assert registered_workers(f"http://127.0.0.1:{unused_tcp_port}") == []


def test_the_configured_service_is_asked():
    assert service_url(Settings()) == "http://127.0.0.1:8420"
    assert service_url(Settings(server={"host": "::1", "port": 9000})) == "http://[::1]:9000"
