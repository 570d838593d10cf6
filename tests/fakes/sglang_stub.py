"""A stub of SGLang for tests without it: the modules that the plugin imports, and a server that runs its hooks as SGLang would.

Its model works token by token, so that any prompt's states can be computed alone. As SGLang's may, it returns its states in
buffers that it uses again: once a pass has returned, `StubServer` overwrites them all.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

MAX_ROWS = 256


class HookType(Enum):
    BEFORE = auto()
    AFTER = auto()
    AROUND = auto()


class HookRegistry:
    """What was registered, by target."""

    hooks: dict[str, tuple[Callable[..., Any], HookType]] = {}

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        cls.hooks[target] = (hook, hook_type)

    @classmethod
    def call(cls, target: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `original` through its hook, by SGLang's rules (`plugins/hook_registry.py`, `_wrap_fn`)."""
        if target not in cls.hooks:
            return original(*args, **kwargs)
        hook, kind = cls.hooks[target]
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.BEFORE:
            changed = hook(*args, **kwargs)
            args, kwargs = changed if changed is not None else (args, kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed


PARALLEL = SimpleNamespace(attn_tp_rank=0, attn_cp_rank=0, attn_dp_rank=0, dp_rank=None, pp_rank=0)


@contextmanager
def stubbed_sglang(version: str = "0.5.23") -> Iterator[Any]:
    """`statetap_sglang.sglang_plugin`, imported anew over the stub."""
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.version": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.overrides": {"resolution_result": lambda args, name, default=None: getattr(args, name, default)},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.runtime_context": {"get_parallel": lambda: PARALLEL},
    }
    plugin = "statetap_sglang.sglang_plugin"
    before = {name: sys.modules.pop(name, None) for name in (*contents, plugin)}
    HookRegistry.hooks = {}
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        sys.modules[name] = module
    try:
        yield importlib.import_module(plugin)
    finally:
        for name, old in before.items():
            sys.modules.pop(name, None)
            if old is not None:
                sys.modules[name] = old


class StubNorm(nn.Module):
    """RMS norm; with a residual it adds first and returns (normed, sum), the sum in a buffer of its own, as SGLang's does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.sums = torch.zeros(MAX_ROWS, width)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        total = self.sums[: x.shape[0]]
        total.copy_(x + residual)
        return self.forward(total), total


class StubDecoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.norm = StubNorm(width)
        self.layers_to_capture: list[int] = []
        self.captured = torch.zeros(layers, MAX_ROWS, width)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        stream = self.embed(input_ids) + 0.01 * positions[:, None]
        update = torch.zeros_like(stream)
        captured = []
        for i, layer in enumerate(self.layers):
            stream = stream + update
            if i in self.layers_to_capture:
                self.captured[i, : stream.shape[0]].copy_(stream)
                captured.append(self.captured[i, : stream.shape[0]])
            update = torch.tanh(layer(stream))
        normed, _ = self.norm(update, stream)
        return normed, captured


class StubModel(nn.Module):
    """A causal model with SGLang's capture interface. `shift` is what its setter makes of layer ids: 1 is right."""

    def __init__(self, layers: int = 6, width: int = 8, vocabulary: int = 50, shift: int = 1) -> None:
        super().__init__()
        self.model = StubDecoder(layers, width, vocabulary)
        self.capture_aux_hidden_states = False
        self._shift = shift

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [layer + self._shift for layer in layer_ids]

    def reference(self, token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """`L0` … and `pre_norm`, `post_norm` of a prompt run alone."""
        decoder = self.model
        with torch.no_grad():
            stream = decoder.embed(torch.tensor(token_ids)) + 0.01 * torch.arange(len(token_ids))[:, None]
            states = {}
            for i, layer in enumerate(decoder.layers):
                stream = stream + torch.tanh(layer(stream))
                states[f"L{i}"] = stream.clone()
            return states | {"pre_norm": stream.clone(), "post_norm": decoder.norm.forward(stream)}


@dataclass
class StubRequest:
    """A request as the scheduler knows it."""

    rid: str
    origin_input_ids: list[int]
    output_ids: tuple[int, ...] = ()
    retraction_count: int = 0


class StubServer:
    """One scheduler process with a target model; `arguments` are server arguments."""

    def __init__(self, plugin: Any, model: StubModel | None = None, **arguments: Any) -> None:
        self.targets = plugin
        self.model = StubModel() if model is None else model
        decoder = self.model.model
        server_args = SimpleNamespace(
            **(
                {"model_path": "org/stub", "port": 30000, "chunked_prefill_size": 64, "max_prefill_tokens": 256}
                | {"disable_radix_cache": False, "tp_size": 1, "dp_size": 1, "pp_size": 1, "load_format": "auto"}
                | arguments
            )
        )
        config = SimpleNamespace(num_hidden_layers=len(decoder.layers))
        self.runner = SimpleNamespace(
            model=self.model,
            server_args=server_args,
            is_draft_worker=False,
            device="cpu",
            forward_pass_id=0,
            kv_cache_dtype=torch.float32,
            spec_algorithm=SimpleNamespace(is_none=lambda: not arguments.get("speculative_algorithm")),
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=lambda: {"layers": len(decoder.layers)}),
                hf_text_config=config,
                hidden_size=decoder.embed.embedding_dim,
                vocab_size=decoder.embed.num_embeddings,
                context_len=512,
                dtype=torch.float32,
                quantization=None,
            ),
        )
        self.fails = False
        HookRegistry.call(plugin.LOADED, lambda runner: None, self.runner)

    def run(
        self, rows: Sequence[tuple[StubRequest, int, int]], mode: str = "EXTEND", *, padding: int = 0, **changes: Any
    ) -> SimpleNamespace:
        """One pass of (request, prefix_len, extend_len); what it returns, `customized_info` included."""
        requests = [request for request, _, _ in rows]
        texts = [[*request.origin_input_ids, *request.output_ids] for request in requests]
        ids = [token for text, (_, prefix, extend) in zip(texts, rows, strict=True) for token in text[prefix : prefix + extend]]
        positions = [position for _, prefix, extend in rows for position in range(prefix, prefix + extend)]
        forward_batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode),
            rids=[request.rid for request in requests],
            input_ids=torch.tensor(ids + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            extend_prefix_lens_cpu=[prefix for _, prefix, _ in rows],
            extend_seq_lens_cpu=[extend for _, _, extend in rows],
            mm_inputs=None,
            input_embeds=None,
            lora_ids=[None for _ in requests],
            global_num_tokens_cpu=[len(ids) + padding] if padding else None,
        )
        vars(forward_batch).update(changes)
        batch = SimpleNamespace(reqs=requests)
        return HookRegistry.call(self.targets.BATCH, self._forward_batch_generation, self, batch, forward_batch)

    def _forward_batch_generation(self, _worker: object, _batch: object, forward_batch: SimpleNamespace) -> SimpleNamespace:
        result = HookRegistry.call(self.targets.FORWARD, self._forward, self.runner, forward_batch)
        # The next pass uses the same buffers.
        self.model.model.captured.fill_(-1.0)
        self.model.model.norm.sums.fill_(-1.0)
        return result.logits_output

    @torch.no_grad()
    def _forward(self, runner: SimpleNamespace, forward_batch: SimpleNamespace) -> SimpleNamespace:
        runner.forward_pass_id += 1
        if self.fails:
            raise RuntimeError("out of memory")
        normed, aux = self.model.model(forward_batch.input_ids, forward_batch.positions)
        aux = aux if self.model.capture_aux_hidden_states else None
        logits = HookRegistry.call(self.targets.LOGITS, self._logits, self, forward_batch.input_ids, normed, None, None, aux)
        normed.fill_(-1.0)
        return SimpleNamespace(logits_output=logits)

    def _logits(self, *_args: object) -> SimpleNamespace:
        return SimpleNamespace(customized_info=None)
