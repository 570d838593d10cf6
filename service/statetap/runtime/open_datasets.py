"""The datasets that running jobs read, each opened once."""

from __future__ import annotations

from collections.abc import Collection

from statetap.ports import Datasets, OpenDataset


class OpenDatasets:
    """A dataset stays open while a job needs it."""

    def __init__(self, datasets: Datasets) -> None:
        self._datasets = datasets
        self._open: dict[str, OpenDataset] = {}

    async def get(self, dataset: str) -> OpenDataset:
        if dataset not in self._open:
            self._open[dataset] = await self._datasets.open(dataset)
        return self._open[dataset]

    def keep_only(self, needed: Collection[str]) -> None:
        """Let go of the others."""
        self._open = {dataset: opened for dataset, opened in self._open.items() if dataset in needed}
