from __future__ import annotations

import hashlib
import json

import pytest
from statetap.adapters.datasets.tokenizer import TokenizerSource, bind, describe
from statetap.ports import DatasetRefused

from tests.fakes.datasets import CHATML, make_tokenizer


def test_the_vocabulary_is_the_models_not_the_tokenizers(plain_model):
    facts = describe(TokenizerSource("tiny", str(plain_model)))
    assert facts.vocab_size == 400
    assert facts.chat_template_sha256 == hashlib.sha256(CHATML.encode()).hexdigest()


def test_without_a_config_the_vocabulary_is_the_tokenizers(tmp_path):
    source = TokenizerSource("tiny", str(make_tokenizer(tmp_path, chat_template=None)))
    assert describe(source).vocab_size == len(bind(source).tokenizer)
    assert describe(source).chat_template_sha256 == ""


def test_a_multimodal_config_has_its_vocabulary_further_in(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {"vocab_size": 512}}))
    assert describe(TokenizerSource("tiny", str(tmp_path))).vocab_size == 512


def test_a_model_without_a_tokenizer_takes_token_ids_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1024}))
    binding = bind(TokenizerSource("tiny", str(tmp_path)))
    assert binding.facts.vocab_size == 1024
    with pytest.raises(DatasetRefused, match="send input_ids") as caught:
        binding.require_tokenizer(3, "text")
    assert (caught.value.line, caught.value.field) == (3, "text")


def test_a_folder_without_either_is_refused_with_its_name(tmp_path):
    with pytest.raises(DatasetRefused, match="cannot be loaded from") as caught:
        bind(TokenizerSource("tiny", str(tmp_path)))
    assert str(tmp_path) in caught.value.reason


def test_a_folder_with_several_gguf_files_asks_for_one(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(DatasetRefused, match="2 GGUF files"):
        bind(TokenizerSource("tiny", str(tmp_path)))
