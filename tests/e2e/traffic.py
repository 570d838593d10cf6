"""Strangers on the same server: health checks and other people's requests, for as long as a test runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import httpx
import numpy as np

from tests.e2e.server import REQUEST_SECONDS, SglangServer

FOREIGN = "foreign-"
VOCABULARY = 1024
PAUSE_SECONDS = 0.2


class ForeignTraffic:
    """Two threads: one asks `/health`, which runs a pass of its own, one sends prompts of 2 to 40 tokens and decodes 8.

    Entering waits until both came through once; leaving fails if a stranger was refused: the plugin must not be felt.
    """

    def __init__(self, server: SglangServer, *, pause_seconds: float = PAUSE_SECONDS) -> None:
        self.failures: list[str] = []
        self._server = server
        self._pause_seconds = pause_seconds
        self._over = threading.Event()
        self._came_through = [threading.Event(), threading.Event()]
        works = zip((self._check_health, self._request), self._came_through, strict=True)
        self._threads = [threading.Thread(target=self._repeat, args=work) for work in works]
        self._numbers = itertools.count()
        self._random = np.random.default_rng(7)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        for came_through in self._came_through:
            came_through.wait(REQUEST_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if error is None:
            assert not self.failures, self.failures[:3]
            assert all(came_through.is_set() for came_through in self._came_through)

    def _repeat(self, work: Callable[[httpx.Client], httpx.Response], came_through: threading.Event) -> None:
        with httpx.Client(timeout=REQUEST_SECONDS) as http:
            while not self._over.wait(self._pause_seconds) and not self.failures:
                try:
                    answer = work(http)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                else:
                    if answer.status_code != 200:
                        self.failures.append(f"{answer.request.url}: {answer.status_code} {answer.text[:200]}")
                    else:
                        came_through.set()

    def _check_health(self, http: httpx.Client) -> httpx.Response:
        return http.get(f"{self._server.url}/health")

    def _request(self, http: httpx.Client) -> httpx.Response:
        prompt = self._random.integers(3, VOCABULARY, int(self._random.integers(2, 41))).tolist()
        body = {
            "input_ids": prompt,
            "rid": f"{FOREIGN}{next(self._numbers)}",
            "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        }
        return http.post(f"{self._server.url}/generate", json=body)
