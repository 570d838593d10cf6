"""The OpenAPI 3.1 document, from the routes' declarations and the models' own JSON schemas.

It is kept in the repository as `docs/openapi.json`; `python -m statetap.api` writes it anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from statetap_client.schemas import Problem

from statetap.api.bodies import JSON, NDJSON
from statetap.api.event_stream import EVENT_STREAM
from statetap.api.gate import Scope
from statetap.api.problems import PROBLEM_JSON
from statetap.api.routing import Route

API_VERSION = "1"
EVERY_ROUTE = (400, 500)
BEHIND_THE_GATE = (401, 403, 421)
WHILE_STOPPING = (503,)
KEY_SCHEME = "key"
KEY_DESCRIPTION = (
    "A key whose hash is configured. A read-only key is enough where an operation names `read-only`; one of scope `admin` may "
    "call everything. A service without configured keys listens on loopback only and wants none; then it refuses what a browser "
    "sends for another host (421) or, where something changes, for another site (403)."
)
NDJSON_DESCRIPTION = (
    "One sample a line: `input_ids` (with an optional `loss_mask`), `text`, `messages` or `conversations`; `id` is optional."
)

ModelKey = tuple[type[BaseModel], JsonSchemaMode]
Models = Mapping[Any, dict[str, Any]]
"""References to the models' schemas, by ModelKey."""


def openapi_document(routes: Sequence[Route[Any, Any]]) -> dict[str, Any]:
    keys: list[ModelKey] = list(dict.fromkeys([*_models(routes), (Problem, "serialization")]))
    models, schemas = models_json_schema(keys, ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, models)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Statetap",
            "version": API_VERSION,
            "description": "Datasets in, jobs out: hidden states of SGLang workers, streamed into one Zarr store. "
            "Every error is an RFC 9457 problem.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas["$defs"].items())),
            "securitySchemes": {KEY_SCHEME: {"type": "http", "scheme": "bearer", "description": KEY_DESCRIPTION}},
        },
    }


def _models(routes: Iterable[Route[Any, Any]]) -> Iterator[ModelKey]:
    for route in routes:
        for model in route.body.models.values():
            if model is not None:
                yield model, "validation"
        for model in (route.answer, *route.also.values()):
            if model is not None:
                yield model, "serialization"


def _operation(route: Route[Any, Any], models: Models) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "operationId": _operation_id(route), "tags": [route.tag]}
    operation["security"] = [] if route.scope is None else [{KEY_SCHEME: [route.scope.value]}]
    parameters = [*_path_parameters(route), *_query_parameters(route), *_header_parameters(route)]
    if parameters:
        operation["parameters"] = parameters
    if route.body.models:
        operation["requestBody"] = {
            "required": True,
            "content": {media: _body_content(model, models) for media, model in route.body.models.items()},
        }
    operation["responses"] = _responses(route, models)
    return operation


def _operation_id(route: Route[Any, Any]) -> str:
    words = [word for word in re.split(r"[^a-z0-9]+", route.path.lower()) if word not in ("", "v1")]
    return "_".join([route.method.lower(), *words])


def _path_parameters(route: Route[Any, Any]) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", route.path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(route: Route[Any, Any]) -> list[dict[str, Any]]:
    parameters = []
    for name, schema in route.query.model_json_schema().get("properties", {}).items():
        description = schema.pop("description", None)
        parameter = {"name": name, "in": "query", "required": False, "schema": schema}
        parameters.append(parameter if description is None else parameter | {"description": description})
    return parameters


def _header_parameters(route: Route[Any, Any]) -> list[dict[str, Any]]:
    return [
        {"name": h.name, "in": "header", "required": False, "description": h.description, "schema": dict(h.schema)}
        for h in route.headers
    ]


def _body_content(model: type[BaseModel] | None, models: Models) -> dict[str, Any]:
    if model is None:
        return {"schema": {"type": "string", "description": NDJSON_DESCRIPTION, "contentMediaType": NDJSON}}
    return {"schema": models[model, "validation"]}


def _responses(route: Route[Any, Any], models: Models) -> dict[str, Any]:
    responses = {str(route.status): _answer(route, models)}
    for status, model in route.also.items():
        content = {JSON: {"schema": models[model, "serialization"]}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    problem = {PROBLEM_JSON: {"schema": models[Problem, "serialization"]}}
    statuses = {*route.problems, *EVERY_ROUTE}
    if route.scope is not None:
        statuses.update(BEHIND_THE_GATE)
    if route.scope is Scope.ADMIN:
        statuses.update(WHILE_STOPPING)
    for status in sorted(statuses):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": problem}
    return responses


def _sent_event(data: Mapping[str, Any]) -> dict[str, Any]:
    """One message of a stream of server-sent events, whose `data` is JSON."""
    properties = {
        "id": {"type": "string"},
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": JSON, "contentSchema": data},
    }
    return {"type": "object", "required": list(properties), "properties": properties}


def _answer(route: Route[Any, Any], models: Models) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": HTTPStatus(route.status).phrase}
    if route.located:
        answer["headers"] = {"Location": {"description": "Where it is from now on.", "schema": {"type": "string"}}}
    if route.answer is not None:
        schema = models[route.answer, "serialization"]
        answer["content"] = {route.media_type: {"schema": _sent_event(schema) if route.media_type == EVENT_STREAM else schema}}
    elif route.status != HTTPStatus.NO_CONTENT:
        schema = {"type": "object"} if route.media_type == JSON else {"type": "string"}
        answer["content"] = {route.media_type: {"schema": schema}}
    return answer
