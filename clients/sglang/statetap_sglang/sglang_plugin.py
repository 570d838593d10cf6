"""The one module that imports SGLang: registers the hooks, and turns SGLang's objects into the plugin's own.

Every hook is guarded: whatever goes wrong in it is logged and loses captures, and the server never notices. The facts about
SGLang were read in 0.5.20 to 0.5.23; `tests/sglang_env` lists all that is relied on.

One mechanism serves all versions, with or without `--enable-return-aux-hidden-states`: the model's own setter says which layers
it captures, and they are read where the model hands them to the logits processor, which runs outside of CUDA graphs in prefill.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic_ns
from typing import Any

from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.version import __version__ as sglang_version

from statetap_sglang.configuration import ConfigurationRefused, ServerFacts
from statetap_sglang.extend_pass import ExtendPass, RequestRows
from statetap_sglang.layers import LayersRefused
from statetap_sglang.model_fingerprint import model_fingerprint
from statetap_sglang.opening import OpenTap, open_tap, prepare_model, write_refusal
from statetap_sglang.settings import BOOT_ID, DIRECTORY, WORKER, PluginSettings, SettingsError
from statetap_sglang.state_tap import StateTap
from statetap_sglang.tap import TapError

log = logging.getLogger("statetap")

LOADED = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"
BATCH = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"

# `meta_info` of a response carries the names of the request's dumps under this key.
DUMPS_KEY = "statetap_dumps"

# The only modes whose rows are prompts: `is_extend()` also holds for target-verify, split prefill and diffusion models.
_EXTEND_MODES = ("EXTEND", "MIXED")


def register_hooks(environment: Mapping[str, str]) -> None:
    """Register the hooks of this process. SGLang applies them after all plugins are registered."""
    plugin = SGLangPlugin(environment)
    HookRegistry.register(LOADED, plugin.after_loading, HookType.AFTER)
    HookRegistry.register(BATCH, plugin.before_batch, HookType.BEFORE)
    HookRegistry.register(FORWARD, plugin.around_forward, HookType.AROUND)
    HookRegistry.register(LOGITS, plugin.before_logits, HookType.BEFORE)


def _guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that never raises into SGLang; the pass under way, if there is one, loses its captures."""

    @functools.wraps(hook)
    def guarded(plugin: SGLangPlugin, /, *args: Any, **kwargs: Any) -> None:
        try:
            hook(plugin, *args, **kwargs)
        except Exception as error:
            log.exception("%s failed", hook.__name__)
            if plugin.open is not None:
                plugin.open.tap.fail(f"{hook.__name__} failed: {type(error).__name__}: {error}")

    return guarded


class SGLangPlugin:
    """The plugin in one process. It opens a tap when the target model is loaded; until then, and elsewhere, it does nothing."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.open: OpenTap | None = None
        self._environment = environment
        self._runner: Any = None
        self._prefill_graph = False
        self._batch: Any = None
        self._refusal_lock: int | None = None

    @_guarded
    def after_loading(self, _result: object, runner: Any, *_args: object, **_kwargs: object) -> None:
        """The model is loaded and no CUDA graph is captured yet: the last moment to choose its layers."""
        if runner.is_draft_worker or self.open is not None:
            return
        try:
            settings = PluginSettings.from_environment(self._environment)
            if settings is None:
                return
            facts = server_facts(runner)
            plan = prepare_model(settings, facts, runner.model)
            if facts.publishes:
                opened = open_tap(settings, facts, plan, runner.model, functools.partial(_fingerprint, runner))
                if opened.final_norm is not None:
                    opened.final_norm.register_forward_hook(functools.partial(_after_norm, opened.tap))
                self._runner, self._prefill_graph, self.open = runner, facts.prefill_graph, opened
                log.info(
                    "statetap publishes layers %s and %s to %s", plan.aux_layer_ids, settings.final, opened.publisher.directory
                )
        except (ConfigurationRefused, LayersRefused, SettingsError, TapError) as error:
            self._refuse(runner, str(error))
        except Exception as error:
            log.exception("statetap could not start")
            self._refuse(runner, f"the plugin could not start: {type(error).__name__}: {error}")

    @_guarded
    def before_batch(self, *args: Any, **kwargs: Any) -> None:
        """Keep the scheduler's batch: it knows what the forward batch does not, how long the prompts are."""
        self._batch = _argument(args, kwargs, 1, "batch")

    def around_forward(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        """One forward pass. Draft models' runners pass through here too, and mean nothing."""
        if self.open is None or runner is not self._runner:
            return original(runner, *args, **kwargs)
        forward_batch = self._begin((runner, *args), kwargs)
        try:
            output = original(runner, *args, **kwargs)
        except BaseException:
            self._abandon("the server's forward pass failed")
            raise
        self._finish(forward_batch, output)
        self._abandon("the pass was not published")
        return output

    @_guarded
    def before_logits(self, *args: Any, **kwargs: Any) -> None:
        """(processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None, …)."""
        if self.open is not None:
            aux, post_norm = _argument(args, kwargs, 5, "aux_hidden_states"), _argument(args, kwargs, 2, "hidden_states")
            self.open.tap.take_states(aux, post_norm)

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Read the forward batch as it is before the pass, which may pad it; the batch."""
        opened, forward_batch = self.open, None
        if opened is None:
            return None
        try:
            forward_batch = _argument(args, kwargs, 1, "forward_batch")
            extend = extend_pass(forward_batch, self._batch, self._runner.forward_pass_id + 1, padded=self._prefill_graph)
            if extend is not None:
                opened.tap.begin(extend)
        except Exception as error:
            log.exception("a pass could not begin")
            for rid in getattr(forward_batch, "rids", None) or ("unknown",):
                opened.background.lose(str(rid), f"the pass could not begin: {type(error).__name__}: {error}")
        return forward_batch

    @_guarded
    def _finish(self, forward_batch: Any, output: Any) -> None:
        if self.open is None:
            return
        self._batch = None
        names = self.open.tap.finish(forward_batch.input_ids)
        logits = output.logits_output
        if names and hasattr(logits, "customized_info"):
            others = logits.customized_info or {}
            logits.customized_info = {**others, DUMPS_KEY: [names.get(rid) for rid in forward_batch.rids]}

    @_guarded
    def _abandon(self, reason: str) -> None:
        if self.open is not None:
            self.open.tap.abandon(reason)

    def _refuse(self, runner: Any, reason: str) -> None:
        """Say why nothing is published: in the log on every rank, and in the tap's directory on the publishing one."""
        log.error("statetap publishes nothing: %s", reason)
        ranks = _ranks(runner)
        if not _publishes(ranks):
            return
        environment = self._environment
        settings = PluginSettings(
            directory=Path(environment[DIRECTORY]), worker=environment.get(WORKER) or None, boot_id=environment.get(BOOT_ID)
        )
        try:
            port, rank = runner.server_args.port, _dp_rank(ranks)
            self._refusal_lock = write_refusal(settings, port, rank, sglang_version, reason)
        except Exception:
            log.exception("statetap could not write its refusal either")


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """An argument of a hooked function, however it was given; None where it was left out."""
    return args[position] if len(args) > position else kwargs.get(name)


def _after_norm(tap: StateTap, _norm: object, inputs: tuple[Any, ...], output: Any) -> None:
    """The final norm ran. With a residual it returns (normed, sum), and the sum is the state before it; else its input is."""
    try:
        tap.take_pre_norm(output[1] if isinstance(output, tuple) else inputs[0])
    except Exception as error:
        log.exception("_after_norm failed")
        tap.fail(f"_after_norm failed: {type(error).__name__}: {error}")


def extend_pass(forward_batch: Any, batch: Any, forward_pass: int, *, padded: bool) -> ExtendPass | None:
    """A forward batch as it is before the pass; None if none of its rows can be a prompt's.

    Idle ranks and captures of CUDA graphs run dummy batches without request ids.
    """
    rids = forward_batch.rids
    if forward_batch.forward_mode.name not in _EXTEND_MODES or not rids:
        return None
    requests = {request.rid: request for request in batch.reqs}
    lengths = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
    rows = tuple(
        RequestRows(
            rid=rid,
            prefix_len=int(prefix_len),
            extend_len=int(extend_len),
            prompt_len=len(requests[rid].origin_input_ids),
            retraction_count=requests[rid].retraction_count,
            obstacle=_obstacle(forward_batch, position),
        )
        for position, (rid, (prefix_len, extend_len)) in enumerate(zip(rids, lengths, strict=True))
    )
    # Data-parallel attention pads each rank's rows to what all ranks together need.
    padded = padded or forward_batch.global_num_tokens_cpu is not None
    return ExtendPass(forward_pass=forward_pass, requests=rows, start_ns=monotonic_ns(), padded=padded)


def _obstacle(forward_batch: Any, position: int) -> str | None:
    """Why a request's states are not the model's for its token ids alone."""
    if forward_batch.mm_inputs is not None and forward_batch.mm_inputs[position] is not None:
        return "the request has multimodal inputs, whose states do not follow from token ids; send text only"
    if forward_batch.input_embeds is not None or getattr(forward_batch, "replace_embeds", None) is not None:
        return "the request gives embeddings, not token ids"
    if forward_batch.lora_ids is not None and forward_batch.lora_ids[position] is not None:
        return "the request runs through a LoRA adapter, and the states would not be the model's own"
    return None


def server_facts(runner: Any) -> ServerFacts:
    """What there is to know of a server whose target model is loaded.

    Raises:
        ConfigurationRefused: a model that runs its layers more than once.
    """
    model, ranks = runner.model_config, _ranks(runner)
    setting = functools.partial(resolution_result, runner.server_args)
    loops = getattr(model.hf_text_config, "num_loops", 1) or 1
    if loops != 1:
        raise ConfigurationRefused(
            f"the model runs its layers {loops} times over: a layer has no single state; use another model"
        )
    chunk = setting("chunked_prefill_size")
    chunk = chunk if chunk is not None and chunk > 0 else None
    capture_layer_ids = setting("return_aux_hidden_state_layer_ids")
    return ServerFacts(
        sglang_version=sglang_version,
        model_path=str(setting("model_path")),
        num_layers=int(model.hf_text_config.num_hidden_layers),
        hidden_size=int(model.hidden_size),
        vocab_size=int(model.vocab_size),
        dtype=str(model.dtype).removeprefix("torch."),
        context_length=int(model.context_len),
        chunked_prefill_size=chunk,
        max_pass_tokens=chunk or max(int(setting("max_prefill_tokens") or 0), int(model.context_len)),
        radix_cache=not setting("disable_radix_cache"),
        port=int(setting("port")),
        dp_rank=_dp_rank(ranks),
        dp_size=int(setting("dp_size") or 1),
        tp_size=int(setting("tp_size") or 1),
        pp_size=int(setting("pp_size") or 1),
        publishes=_publishes(ranks),
        speculative=not runner.spec_algorithm.is_none(),
        two_batch_overlap=bool(setting("enable_two_batch_overlap")),
        layernorm_sp=bool(setting("enable_layernorm_sp")),
        bounded_replay=bool(setting("enable_decoder_swa_bounded_replay") or setting("enable_encoder_swa_bounded_replay")),
        pd_multiplexing=bool(setting("enable_pdmux")),
        prefill_graph=_prefill_graph(runner, setting),
        capture_layer_ids=None if capture_layer_ids is None else tuple(capture_layer_ids),
    )


def _prefill_graph(runner: Any, setting: Callable[[str], Any]) -> bool:
    if str(runner.device).startswith("cpu"):
        return False
    config = setting("cuda_graph_config")
    prefill = getattr(config, "prefill", None)
    return prefill is None or str(getattr(prefill.backend, "value", prefill.backend)) != "disabled"


def _ranks(runner: Any) -> Any:
    """0.5.20 keeps them on the runner, later versions for the process."""
    return getattr(runner, "ps", None) or get_parallel()


def _publishes(ranks: Any) -> bool:
    """One publisher for each sample's rows: all attention-TP and context-parallel ranks see the same."""
    return bool(ranks.attn_tp_rank == 0 and ranks.attn_cp_rank == 0 and ranks.pp_rank == 0)


def _dp_rank(ranks: Any) -> int:
    """Replicas are numbered by the launcher, the ranks of data-parallel attention within one replica."""
    return int(ranks.attn_dp_rank if ranks.dp_rank is None else ranks.dp_rank)


def _fingerprint(runner: Any) -> str:
    model, setting = runner.model_config, functools.partial(resolution_result, runner.server_args)
    served = {
        "state_dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": str(runner.kv_cache_dtype),
        "lora_paths": setting("lora_paths"),
        "revision": setting("revision"),
        "load_format": str(setting("load_format")),
    }
    return model_fingerprint(model.hf_config.to_dict(), served, _checkpoint(str(setting("model_path")), setting("revision")))


def _checkpoint(model_path: str, revision: str | None) -> Path | None:
    """Where the weights are on this machine: a path, or a repository's snapshot that was downloaded before."""
    if Path(model_path).exists():
        return Path(model_path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None
