"""Small random causal LMs, real ones: seeded, quick to make and to run, no tokenizer.

Initial weights are spread wide (0.2), so that answers differ from token to token and states from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 1024
CONTEXT_LENGTH = 512


def small_llama(seed: int = 0, *, layers: int = 4) -> Any:
    """Hidden 64, grouped-query attention (4 heads, 2 of keys and values), RMS norms."""
    return _seeded(
        seed,
        lambda: LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=CONTEXT_LENGTH,
                bos_token_id=1,
                eos_token_id=2,
                tie_word_embeddings=False,
                initializer_range=0.2,
            )
        ),
    )


def small_gpt2(seed: int = 0, *, layers: int = 4) -> Any:
    """Hidden 48, layer norms with biases, learned positions, tied embeddings."""
    return _seeded(
        seed,
        lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB_SIZE,
                n_embd=48,
                n_head=4,
                n_layer=layers,
                n_positions=CONTEXT_LENGTH,
                bos_token_id=1,
                eos_token_id=2,
                initializer_range=0.2,
            )
        ),
    )


def small_gpt_neox(seed: int = 0, *, layers: int = 3) -> Any:
    """Hidden 48, attention and MLP side by side on one residual stream."""
    return _seeded(
        seed,
        lambda: GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=48,
                intermediate_size=96,
                num_hidden_layers=layers,
                num_attention_heads=4,
                max_position_embeddings=CONTEXT_LENGTH,
                bos_token_id=1,
                eos_token_id=2,
                initializer_range=0.2,
            )
        ),
    )


def save_model(model: Any, directory: Path) -> Path:
    """Write a model as a Hugging Face directory and return that."""
    model.save_pretrained(directory)
    return directory


def _seeded(seed: int, build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().eval()
