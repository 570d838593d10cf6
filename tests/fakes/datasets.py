"""`MemoryDatasets`: datasets without files, for tests of what works with them; and tokenizers small enough to make at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from statetap.core.records import DatasetRecord
from statetap.ports import DatasetRefused, NotFound

# ChatML as SmolLM2 has it: a default system turn, a header that `add_generation_prompt` writes, a newline after each end of turn.
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = ("system\nBe kind", "user\n\n", "assistant\n\n", "hello there, how are you?", "the cat sat on the mat", " \n \n\n")


def make_tokenizer(folder: Path, *, chat_template: str | None = CHATML, vocab_size: int | None = None) -> Path:
    """A byte-level BPE of a few hundred tokens, saved as a model's folder; `vocab_size` is what its config.json says, if any."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    if vocab_size is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
    return folder


class MemoryDataset:
    """Implements `OpenDataset` over lists of (id, input_ids, loss_mask)."""

    def __init__(self, samples: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> None:
        self._ids = [name for name, _, _ in samples]
        self._tokens = [np.array(ids, np.int32) for _, ids, _ in samples]
        self._masks = [np.array(mask, np.uint8) for _, _, mask in samples]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(tokens) for tokens in self._tokens], np.int64)

    def id(self, index: int) -> str:
        return self._ids[index]

    def ids(self, first: int, stop: int) -> list[str]:
        return self._ids[first:stop]

    def input_ids(self, index: int) -> NDArray[np.int32]:
        return self._tokens[index]

    def loss_mask(self, index: int) -> NDArray[np.uint8]:
        return self._masks[index]

    def tokens(self, first: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        return np.concatenate(self._tokens[first:stop]), np.concatenate(self._masks[first:stop])


class MemoryDatasets:
    """Implements `Datasets` for the tokens form, unchecked but for being JSON; `put` takes samples as they are."""

    def __init__(self) -> None:
        self._datasets: dict[str, MemoryDataset] = {}

    def put(
        self, samples: Sequence[tuple[str, Sequence[int], Sequence[int]]], *, name: str = "data", model: str = "tiny"
    ) -> DatasetRecord:
        dataset = MemoryDataset(samples)
        number = f"ds_{len(self._datasets) + 1:032x}"
        self._datasets[number] = dataset
        return DatasetRecord(
            id=number,
            name=name,
            model=model,
            samples=len(samples),
            tokens=int(dataset.lengths.sum()),
            max_tokens=int(dataset.lengths.max()),
            sha256=f"{len(self._datasets):064x}",
            tokenizer=model,
            chat_template_sha256="",
            created_at=0.0,
        )

    async def ingest(
        self, body: AsyncIterator[bytes], *, name: str, model: str | None, gzipped: bool, allow_empty_mask: bool
    ) -> DatasetRecord:
        text = b"".join([chunk async for chunk in body])
        samples = []
        for line, row in enumerate(text.splitlines(), 1):
            try:
                record = json.loads(row)
            except ValueError as error:
                raise DatasetRefused("not JSON", line=line) from error
            ids = record["input_ids"]
            samples.append((record.get("id", str(line)), ids, record.get("loss_mask", [1] * len(ids))))
        return self.put(samples, name=name, model=model or "tiny")

    async def ingest_path(self, path: str, *, name: str, model: str | None, allow_empty_mask: bool) -> DatasetRecord:
        raise DatasetRefused("no dataset root is configured, so no path can be read; send the body, or configure a root")

    async def open(self, dataset: str) -> MemoryDataset:
        if dataset not in self._datasets:
            raise NotFound(f"no dataset {dataset!r}")
        return self._datasets[dataset]

    async def delete(self, dataset: str) -> None:
        self._datasets.pop(dataset, None)
