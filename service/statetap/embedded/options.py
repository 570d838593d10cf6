"""What a worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Final = Literal["post_norm", "pre_norm", "both", "none"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
PlainKind = Literal["safetensors", "pt"]
PublishedBy = Literal["rename", "DONE", "meta.json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One worker's settings; the command line says what each is for (`cli`).

    `aux_layer_ids` None means EAGLE-3's three layers. `chunked_prefill_size` None means that prompts are never chunked, and
    `prefix_cache_tokens` None that there is no prefix cache. `plain` None publishes in the plugin's form.

    Raises:
        ValueError: settings that cannot work, with the reason.
    """

    model_path: str
    dump_dir: Path
    name: str = "worker"
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: Dtype = "auto"
    device: str = "auto"
    threads: int = 1
    aux_layer_ids: tuple[int, ...] | None = None
    final: Final = "post_norm"
    chunked_prefill_size: int | None = 512
    context_length: int | None = None
    prefix_cache_tokens: int | None = None
    skip_tokenizer_init: bool = False
    publish_decode: bool = False
    plain: PlainKind | None = None
    plain_published_by: PublishedBy = "rename"
    budget_bytes: int = 4 << 30
    gap_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ValueError(
                f"the worker's name {self.name!r} must be a single path component: it names a folder of the dump root"
            )
        if self.aux_layer_ids == () and self.final == "none":
            raise ValueError("nothing to capture: name a layer or a final state")
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < 1:
            raise ValueError(f"a chunk needs at least 1 token, not {self.chunked_prefill_size}; -1 never chunks")
        if self.threads < 1:
            raise ValueError(f"the model needs at least 1 thread, not {self.threads}")
        if self.gap_seconds < 0:
            raise ValueError(f"the gap between passes cannot be negative, but is {self.gap_seconds} s")
