"""Who may call: by key and scope, or, without keys, from this machine and not for a foreign web page."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from statetap.api.app import ROUTES
from statetap.api.gate import Gate, Scope
from statetap.commands.key import new_key
from statetap.settings import KEY_PATTERN, ApiKey

from tests.fakes.api_server import FakeService, serving

# Always the same: they are in names of tests.
READER, ADMIN, OTHER_ADMIN, STRANGER = (f"statetap_{letter * 43}" for letter in "raos")
OPEN = {"/healthz", "/readyz", "/openapi.json"}
PROBLEM = "application/problem+json"


def configured(name: str, scope: str, key: str) -> ApiKey:
    return ApiKey(name=name, scope=scope, sha256=hashlib.sha256(key.encode()).hexdigest())


GATE = Gate(
    [configured("reader", "read-only", READER), configured("admin", "admin", ADMIN), configured("other", "admin", OTHER_ADMIN)]
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path, gate=GATE)


@pytest.fixture
async def keyed(guarded: FakeService) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(guarded) as url, aiohttp.ClientSession(url) as session:
        yield session


def path_of(path: str) -> str:
    return path.replace("{", "").replace("}", "")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_every_route_asks_for_its_scope(keyed: aiohttp.ClientSession, guarded: FakeService, route) -> None:
    """Looking needs a read-only key, changing anything an admin's, and only three routes need none."""
    statuses = {}
    for name, headers in {"none": {}, "stranger": bearer(STRANGER), "reader": bearer(READER), "admin": bearer(ADMIN)}.items():
        async with keyed.request(route.method, path_of(route.path), headers=headers) as answer:
            statuses[name] = answer.status
            if answer.status in (401, 403):
                assert answer.content_type == PROBLEM
                assert answer.headers["WWW-Authenticate"].startswith('Bearer realm="statetap"')
                logged = guarded.logged[-1]
                assert (logged["event"], logged["path"]) == ("api.caller_refused", route.path)
    refused = {name for name, status in statuses.items() if status in (401, 403)}
    if route.path in OPEN:
        assert refused == set()
    elif route.method == "GET":
        assert refused == {"none", "stranger"}
    else:
        assert refused == {"none", "stranger", "reader"}
        assert statuses["reader"] == 403
    if refused:
        assert statuses["none"] == statuses["stranger"] == 401


async def test_a_refused_call_changes_nothing(keyed: aiohttp.ClientSession, guarded: FakeService) -> None:
    worker = {"name": "w", "url": "http://127.0.0.1:1", "dumps": {"kind": "plugin", "dir": "/d"}}
    for headers in ({}, bearer(STRANGER), bearer(READER)):
        async with keyed.post("/v1/workers", json=worker, headers=headers) as answer:
            assert answer.status in (401, 403)
    assert guarded.workers.records == {}
    async with keyed.post("/v1/workers", json=worker, headers=bearer(OTHER_ADMIN)) as answer:
        assert answer.status == 201


async def test_what_went_wrong_is_told_apart(keyed: aiohttp.ClientSession) -> None:
    without = await keyed.get("/v1/jobs")
    assert without.headers["WWW-Authenticate"] == 'Bearer realm="statetap"'
    assert "STATETAP_API_KEY" in (await without.json())["detail"]
    wrong = await keyed.get("/v1/jobs", headers=bearer(STRANGER))
    assert wrong.headers["WWW-Authenticate"] == 'Bearer realm="statetap", error="invalid_token"'
    narrow = await keyed.post("/v1/jobs/j/cancel", headers=bearer(READER))
    assert narrow.headers["WWW-Authenticate"] == 'Bearer realm="statetap", error="insufficient_scope", scope="admin"'


async def test_head_needs_the_key_that_get_needs(keyed: aiohttp.ClientSession) -> None:
    assert (await keyed.head("/v1/jobs")).status == 401
    assert (await keyed.head("/v1/jobs", headers=bearer(READER))).status == 200
    assert (await keyed.head("/healthz")).status == 200


@pytest.mark.parametrize(
    "header",
    [
        ADMIN,
        f"Basic {ADMIN}",
        f"Bearer {ADMIN}x",
        f"Bearer {ADMIN[:-1]}",
        f"Bearer {ADMIN} {ADMIN}",
        f"Bearer {ADMIN.upper()}",
        "Bearer",
        "Bearer \u00e9" + ADMIN[1:],
        "Bearer " + hashlib.sha256(ADMIN.encode()).hexdigest(),
    ],
)
async def test_whatever_is_no_configured_key_is_refused(keyed: aiohttp.ClientSession, guarded: FakeService, header: str) -> None:
    async with keyed.get("/v1/jobs", headers={"Authorization": header}) as answer:
        assert answer.status == 401
        text = await answer.text()
    assert ADMIN not in text
    assert ADMIN not in repr(guarded.logged)


async def test_the_word_bearer_may_be_written_in_any_case(keyed: aiohttp.ClientSession) -> None:
    assert (await keyed.get("/v1/jobs", headers={"Authorization": f"bEaReR  {READER}"})).status == 200


async def test_two_headers_are_no_key(keyed: aiohttp.ClientSession) -> None:
    headers = [("Authorization", f"Bearer {ADMIN}"), ("Authorization", f"Bearer {ADMIN}")]
    assert (await keyed.get("/v1/jobs", headers=headers)).status == 401


async def test_with_keys_a_foreign_page_is_no_danger(keyed: aiohttp.ClientSession) -> None:
    """A browser brings no key of its own accord, so names and origins do not matter."""
    headers = {**bearer(ADMIN), "Host": "statetap.example.org", "Origin": "https://evil.example"}
    assert (await keyed.post("/v1/jobs/j/cancel", headers=headers)).status == 404


def test_a_word_can_never_be_a_key() -> None:
    """Its hash may be configured, but what is not of a key's form is not even hashed."""
    gate = Gate([configured("lazy", "admin", "hunter2")])
    assert gate._scope_of("hunter2") is None


def test_keys_have_256_random_bits_and_a_name_to_search_for() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(KEY_PATTERN.fullmatch(key) and key.startswith("statetap_") for key in keys)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "127.9.9.9", "localhost:1", "LOCALHOST", "a.localhost", "[::1]:8420"]
)
async def test_without_keys_names_of_this_machine_are_answered(http: aiohttp.ClientSession, host: str) -> None:
    assert (await http.get("/v1/jobs", headers={"Host": host})).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8420",
        "192.0.2.1",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::1",
        "[2001:db8::1]",
    ],
)
async def test_without_keys_a_name_that_was_pointed_here_is_refused(
    http: aiohttp.ClientSession, service: FakeService, host: str
) -> None:
    """DNS rebinding: a page of evil.example whose name now leads to 127.0.0.1 may read what its own site answers."""
    async with http.get("/v1/jobs", headers={"Host": host}) as answer:
        assert (answer.status, answer.content_type, (await answer.json())["field"]) == (421, PROBLEM, "Host")
    assert service.logged[-1]["event"] == "api.caller_refused"
    assert (await http.get("/healthz", headers={"Host": host})).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 404),
        ({"Origin": "http://127.0.0.1:{port}"}, 404),
        ({"Sec-Fetch-Site": "same-origin"}, 404),
        ({"Sec-Fetch-Site": "none"}, 404),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "https://127.0.0.1:{port}.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
async def test_without_keys_only_the_own_page_may_post(http: aiohttp.ClientSession, headers: dict[str, str], status: int) -> None:
    """Cancelling a job takes no body, so any page could have a browser send it."""
    port = str(http._base_url.port)
    sent = {name: value.replace("{port}", port) for name, value in headers.items()}
    assert (await http.post("/v1/jobs/absent/cancel", headers=sent)).status == status
    assert (await http.get("/v1/jobs", headers=sent)).status == 200


async def test_a_proxys_name_may_be_trusted(tmp_path: Path) -> None:
    service = FakeService(tmp_path, gate=Gate(trusted_hosts=["Statetap.example.org"]))
    async with serving(service) as url, aiohttp.ClientSession(url) as http:
        told = {"Host": "statetap.example.org", "Origin": "https://statetap.example.org"}
        assert (await http.post("/v1/jobs/absent/cancel", headers=told)).status == 404
        assert (await http.post("/v1/jobs/absent/cancel", headers={"Origin": told["Origin"]})).status == 404
        assert (await http.post("/v1/jobs/absent/cancel", headers=told | {"Origin": "https://evil.example"})).status == 403
        assert (await http.get("/v1/jobs", headers={"Host": "other.example.org"})).status == 421


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_a_service_that_stops_answers_who_looks_and_sends_who_changes_something_away(
    keyed: aiohttp.ClientSession, guarded: FakeService, route
) -> None:
    guarded.readiness = (False, "the service is starting or stopping")
    async with keyed.request(route.method, path_of(route.path), headers=bearer(ADMIN)) as answer:
        sent_away = answer.status == 503 and "Retry-After" in answer.headers
        assert sent_away == (route.scope is Scope.ADMIN)
