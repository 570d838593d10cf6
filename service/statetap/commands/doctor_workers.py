"""Which workers a command line means: names that are configured or registered, or URLs with their dumps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError
from statetap_client.errors import ClientFailure
from statetap_client.schemas import Worker, WorkerRequest
from statetap_client.sync import SyncStatetapClient

from statetap.settings import Settings

SERVICE_SECONDS = 5.0


class UnknownWorker(Exception):
    """A word of the command line that names no worker; the message says which there are, or what is missing."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A worker to examine, and what a running service says of it, if one knows it."""

    request: WorkerRequest
    registered: Worker | None = None


@dataclass(frozen=True, slots=True)
class DumpOptions:
    """`--dumps` (the plugin's dump root) or `--dumps-config` (a JSON file that declares the dumps); at most one of them."""

    root: Path | None = None
    config: Path | None = None

    def declared(self) -> dict[str, Any] | None:
        """As a worker's configuration has it; None if no option was given. UnknownWorker: they cannot be used."""
        if self.root is not None and self.config is not None:
            raise UnknownWorker("name the dumps once: either --dumps DIR or --dumps-config FILE")
        if self.root is not None:
            return {"kind": "plugin", "dir": str(self.root.absolute())}
        if self.config is None:
            return None
        try:
            found = json.loads(self.config.read_bytes())
        except (OSError, ValueError) as error:
            raise UnknownWorker(f"{self.config} cannot be read as JSON: {error}") from error
        if not isinstance(found, dict):
            raise UnknownWorker(f'{self.config} must hold one JSON object, like {{"kind": "plain", …}}')
        return found


def service_url(settings: Settings) -> str:
    """Where the service of these settings listens."""
    host = settings.server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def registered_workers(url: str) -> list[Worker]:
    """The workers of the running service at `url`; none if there is no such service."""
    try:
        with SyncStatetapClient(url, timeout_seconds=SERVICE_SECONDS) as client:
            return client.workers()
    except ClientFailure:
        return []


def choose_workers(
    words: Sequence[str], options: DumpOptions, configured: Sequence[WorkerRequest], registered: Sequence[Worker]
) -> list[Chosen]:
    """The workers that `words` mean, in their order; all that are known where there are no words.

    A word is a known worker's NAME, or with dump options a URL or NAME=URL.

    Raises:
        UnknownWorker: a word that means none, one that is given twice, or no worker at all.
    """
    known = {worker.name: _as_request(worker) for worker in registered} | {worker.name: worker for worker in configured}
    declared = options.declared()
    requests = [_request(word, declared, known) for word in words] if words else list(known.values())
    if not requests:
        raise UnknownWorker("no worker is configured or registered; name one by its URL, with --dumps DIR")
    names = [request.name for request in requests]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UnknownWorker(f"{', '.join(repeated)}: named more than once; examine each worker once, under a name of its own")
    return [
        Chosen(request, next((one for one in registered if (one.name, one.url) == (request.name, request.url)), None))
        for request in requests
    ]


def _request(word: str, declared: dict[str, Any] | None, known: Mapping[str, WorkerRequest]) -> WorkerRequest:
    name, _, url = word.rpartition("=") if "://" in word and "=" in word.split("://", 1)[0] else ("", "", word)
    if "://" not in word:
        if declared is not None:
            raise UnknownWorker(
                f"{word!r} is no URL, and --dumps goes with URLs; leave it out for a worker that is known by name"
            )
        if word not in known:
            names = ", ".join(known) or "none"
            raise UnknownWorker(
                f"no worker is called {word!r}; known are {names} (of the configuration and of the running service); "
                "for another one give its URL and --dumps DIR"
            )
        return known[word]
    if declared is None:
        raise UnknownWorker(f"where does {word} publish? name the dumps: either --dumps DIR or --dumps-config FILE")
    try:
        return WorkerRequest.model_validate({"name": name or _name_for(url, declared), "url": url, "dumps": declared})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise UnknownWorker(f"{word}: {faults}") from error


def _name_for(url: str, declared: Mapping[str, Any]) -> str:
    """A plain directory is one worker's, whatever that is called; below a dump root, the only folder's name."""
    if declared.get("kind") == "plain":
        return urlsplit(url).netloc.rpartition("@")[2].replace(":", "-") or "worker"
    root = Path(str(declared.get("dir")))
    folders = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    if len(folders) == 1:
        return folders[0]
    found = f"there are {', '.join(folders)}" if folders else "there is no worker's folder"
    raise UnknownWorker(f"{url}: below {root} {found}; say which with NAME={url}")


def _as_request(worker: Worker) -> WorkerRequest:
    return WorkerRequest(name=worker.name, url=worker.url, dumps=worker.dumps, requests_per_second=worker.requests_per_second)
