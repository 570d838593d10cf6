"""The OpenAPI document: a snapshot, its own consistency, and what the service does against what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from statetap.api.app import ROUTES, render_openapi

SNAPSHOT = Path(__file__).parents[3] / "docs" / "openapi.json"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(render_openapi())


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


def test_the_snapshot_is_current() -> None:
    assert SNAPSHOT.read_bytes() == render_openapi(), "write it anew: python -m statetap.api > docs/openapi.json"


async def test_it_is_served(http: aiohttp.ClientSession, document: dict[str, Any]) -> None:
    answer = await http.get("/openapi.json")
    assert (answer.content_type, await answer.json()) == ("application/json", document)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    named = set(references(document))
    assert named <= known
    assert known - named == set(), "schemas that nothing refers to"


def test_every_route_is_described(document: dict[str, Any]) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len(operations) == len(ROUTES)
    assert len({operation["operationId"] for operation in operations}) == len(ROUTES)
    for operation in operations:
        assert operation["summary"].endswith(".")
        assert {"400", "500"} <= set(operation["responses"])
        assert all(response["description"] for response in operation["responses"].values())


def test_every_path_parameter_is_declared(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        named = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
        for operation in operations.values():
            assert [p["name"] for p in operation.get("parameters", []) if p["in"] == "path"] == named


def test_streams_and_problems_have_their_media_types(document: dict[str, Any]) -> None:
    create = document["paths"]["/v1/datasets"]["post"]
    assert set(create["requestBody"]["content"]) == {"application/x-ndjson", "application/json"}
    assert set(create["responses"]["415"]["content"]) == {"application/problem+json"}
    assert "Location" in create["responses"]["201"]["headers"]
    events = document["paths"]["/v1/jobs/{job}/events"]["get"]
    assert set(events["responses"]["200"]["content"]) == {"text/event-stream"}
    assert "content" not in document["paths"]["/v1/datasets/{dataset}"]["delete"]["responses"]["204"]


def test_what_a_caller_must_bring_is_told(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            scope = "read-only" if method == "get" else "admin"
            is_open = path in ("/healthz", "/readyz", "/openapi.json")
            assert operation["security"] == ([] if is_open else [{"key": [scope]}]), path
            assert ("401" in operation["responses"]) is not is_open
