"""Datasets: in over the wire or from a file that the service can read, listed, deleted."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from pydantic import Field
from statetap_client.schemas import Dataset, DatasetFromPath, Page

from statetap.api import translate
from statetap.api.bodies import NdjsonOrJson, NdjsonStream, NoBody
from statetap.api.gate import Scope
from statetap.api.routing import Call, Header, NoQuery, PageQuery, Reply, Route
from statetap.core.records import DatasetRecord
from statetap.ports import DatasetRefused
from statetap.telemetry import events

DEFAULT_NAME = "dataset"


class DatasetQuery(NoQuery):
    """What to call a dataset, and how to read it."""

    name: str | None = Field(default=None, min_length=1, max_length=200, description="What to call it; default: its file's name.")
    model: str | None = Field(
        default=None, description="The model whose tokenizer the dataset is bound to; default: the configured one."
    )
    allow_empty_mask: bool = Field(default=False, description="Take samples whose loss mask is all zero.")


async def create(call: Call[DatasetQuery, NdjsonStream | DatasetFromPath]) -> Reply:
    services = call.services
    try:
        record = await _ingest(call)
    except DatasetRefused as error:
        services.log.warning(
            events.DATASET_REFUSED, name=call.query.name, line=error.line, field=error.field, reason=error.reason
        )
        raise
    await services.ledger.add_dataset(record)
    services.log.info(events.DATASET_SUBMITTED, dataset=record.id, name=record.name, samples=record.samples, tokens=record.tokens)
    return Reply(translate.dataset(record), headers={"Location": f"/v1/datasets/{record.id}"})


async def _ingest(call: Call[DatasetQuery, NdjsonStream | DatasetFromPath]) -> DatasetRecord:
    query, body, datasets = call.query, call.body, call.services.datasets
    if isinstance(body, NdjsonStream):
        return await datasets.ingest(
            body.chunks,
            name=query.name or DEFAULT_NAME,
            model=query.model,
            gzipped=body.gzipped,
            allow_empty_mask=query.allow_empty_mask,
        )
    name = query.name or PurePath(body.path).name.partition(".")[0] or DEFAULT_NAME
    return await datasets.ingest_path(body.path, name=name, model=query.model, allow_empty_mask=query.allow_empty_mask)


async def index(call: Call[PageQuery, None]) -> Reply:
    page = await call.services.ledger.datasets(limit=call.query.limit, cursor=call.query.cursor)
    return Reply(Page[Dataset](items=[translate.dataset(record) for record in page.items], cursor=page.cursor))


async def show(call: Call[NoQuery, None]) -> Reply:
    return Reply(translate.dataset(await call.services.ledger.dataset(call.path["dataset"])))


async def delete(call: Call[NoQuery, None]) -> Reply:
    """The ledger goes first: it knows whether a job still needs the dataset."""
    dataset = call.path["dataset"]
    await call.services.ledger.delete_dataset(dataset)
    await call.services.datasets.delete(dataset)
    call.services.log.info(events.DATASET_DELETED, dataset=dataset)
    return Reply()


ROUTES: tuple[Route[Any, Any], ...] = (
    Route(
        method="POST",
        path="/v1/datasets",
        summary="Submit a dataset: NDJSON, one sample a line, or the path of a file below one of the service's dataset roots.",
        handler=create,
        query=DatasetQuery,
        body=NdjsonOrJson(DatasetFromPath),
        headers=(Header("Content-Encoding", "`gzip` where the NDJSON is compressed.", {"enum": ["identity", "gzip"]}),),
        tag="datasets",
        scope=Scope.ADMIN,
        status=201,
        answer=Dataset,
        located=True,
        problems=(409, 413, 415),
    ),
    Route(
        method="GET",
        path="/v1/datasets",
        summary="List the datasets.",
        handler=index,
        query=PageQuery,
        body=NoBody(),
        tag="datasets",
        scope=Scope.READ_ONLY,
        answer=Page[Dataset],
    ),
    Route(
        method="GET",
        path="/v1/datasets/{dataset}",
        summary="Show a dataset.",
        handler=show,
        query=NoQuery,
        body=NoBody(),
        tag="datasets",
        scope=Scope.READ_ONLY,
        answer=Dataset,
        problems=(404,),
    ),
    Route(
        method="DELETE",
        path="/v1/datasets/{dataset}",
        summary="Delete a dataset that no unfinished job needs.",
        handler=delete,
        query=NoQuery,
        body=NoBody(),
        tag="datasets",
        scope=Scope.ADMIN,
        status=204,
        problems=(404, 409),
    ),
)
