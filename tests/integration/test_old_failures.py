"""The three ways in which extraction scripts failed before Statetap, as scenarios that pass here, with both kinds of dumps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from statetap_client.reader import StoreReader
from statetap_sglang.format import TensorView
from statetap_sglang.plain import PlainLayout, PlainPublisher

from tests.fakes.cluster import Cluster, assert_same_store, cluster, plain_declaration, token_samples, until

SAMPLES = token_samples(30, longest=100, seed=5)
KINDS = pytest.mark.parametrize("plain", [False, True], ids=["plugin", "plain"])


@pytest.fixture(scope="module")
def undisturbed(calm: Cluster) -> str:
    with calm.client() as client:
        return calm.run_job(client, SAMPLES, "old-failures.zarr").store


def start(made: Cluster, *, plain: bool, flags: tuple[str, ...] = ()) -> None:
    declared = plain_declaration(made.dumps, "w", made.model, quiet_period_seconds=0.05) if plain else None
    made.start_worker("w", "--layers", "0,1", *flags, *(("--plain", "safetensors") if plain else ()), plain=declared)


@contextmanager
def knocking(url: str, path: str, **request: Any) -> Iterator[list[int]]:
    """Somebody else asks the worker for something, again and again, until the block ends; gives the status codes."""
    codes: list[int] = []
    over = threading.Event()

    def knock() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not over.is_set() and len(codes) < 2000:
                codes.append(client.request("POST" if request else "GET", path, **request).status_code)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield codes
    finally:
        over.set()
        thread.join()


@KINDS
def test_the_counter_is_moved_by_warm_up_and_health_requests(tmp_path: Path, model: Path, undisturbed: str, plain: bool) -> None:
    """A script that predicted the dump's number took somebody else's dump."""
    with cluster(tmp_path, model) as made:
        start(made, plain=plain)
        with made.start_service() as client, knocking(f"http://127.0.0.1:{made.workers['w'].port}", "/health") as codes:
            made.wait_for_workers(client, "w")
            job = made.run_job(client, SAMPLES, "moved.zarr")
        assert len(codes) > 5
        assert set(codes) == {200}
        assert (job.state, job.failures) == ("completed", {})
        until("the last health check's dump is gone", lambda: made.leftover_dumps() == [])
        assert_same_store(undisturbed, job.store)


@KINDS
def test_decode_passes_between_two_long_prefills(tmp_path: Path, model: Path, undisturbed: str, plain: bool) -> None:
    """A script that took the one dump that appeared got 1 row for thousands of tokens: here others decode all the time."""
    body = {"input_ids": [[7] * 40], "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    with cluster(tmp_path, model) as made:
        start(made, plain=plain, flags=("--publish-decode",))
        url = f"http://127.0.0.1:{made.workers['w'].port}"
        samples = [sample for sample in SAMPLES if len(sample["input_ids"]) != 40]
        assert samples == SAMPLES, "the other requests must differ in length from every sample"
        with made.start_service() as client, knocking(url, "/generate", json=body) as codes:
            made.wait_for_workers(client, "w")
            job = made.run_job(client, SAMPLES, "decode.zarr")
        assert len(codes) > 3
        assert (job.state, job.failures) == ("completed", {})
        assert_same_store(undisturbed, job.store)


def test_a_dump_of_the_previous_request_lands_late(tmp_path: Path, model: Path, undisturbed: str) -> None:
    """A script that cleared the directory and took what came next got the previous sample's rows.

    A second publisher writes dumps of the samples' lengths, with other values, into the directory while the requests run.
    """
    with cluster(tmp_path, model) as made:
        start(made, plain=True, flags=("--gap-seconds", "0.02"))
        layout = PlainLayout.default(aux_layers=2, final="both")
        far_ahead = made.dumps / "w" / "req_100000"
        far_ahead.mkdir()
        late = PlainPublisher(made.dumps / "w", layout)  # counts on from there, out of the worker's way
        far_ahead.rmdir()
        lengths = [len(sample["input_ids"]) for sample in SAMPLES]
        over = threading.Event()

        def publish_late() -> None:
            for length in np.resize(lengths, 400).tolist():
                if over.wait(0.01):
                    return
                late.publish(_rows(length))

        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            thread = threading.Thread(target=publish_late)
            thread.start()
            try:
                job = made.run_job(client, SAMPLES, "late.zarr")
            finally:
                over.set()
                thread.join()
            # Where such a dump had the running sample's length, there were two readings: refused, and asked for again.
            assert job.state == "completed"
            store, wanted = StoreReader(job.store), StoreReader(undisturbed)
            for index in store.stored.tolist():
                assert store.digest(index) == wanted.digest(index), "another sample's rows were stored"
            assert all(reason.startswith("ambiguous") for reason in job.failures)
            assert len(store.stored) >= len(SAMPLES) // 2


def _rows(length: int) -> dict[str, TensorView]:
    """Plausible rows of a prompt of that length that no sample has."""
    values = np.random.default_rng(length).standard_normal((length, 2, 64)).astype(np.float32)
    flat = np.ascontiguousarray(values[:, 0])
    view = TensorView("F32", (length, 64), memoryview(flat).cast("B"))
    return {
        "aux_hidden_states": TensorView("F32", (length, 2, 64), memoryview(values).cast("B")),
        "last_hidden_states": view,
        "last_hidden_states_prenorm": view,
    }
