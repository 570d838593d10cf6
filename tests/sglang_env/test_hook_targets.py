"""All that the plugin relies on in SGLang, read from the installed source: a new release fails here first."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs an SGLang environment", allow_module_level=True)

from tests.sglang_env.model_setters import sglang_root

SRT = sglang_root() / "srt"

# (file, class or none, function): its first parameters, in this order.
FUNCTIONS = {
    ("model_executor/model_runner.py", "ModelRunner", "init_attention_backends"): ["self"],
    ("model_executor/model_runner.py", "ModelRunner", "forward"): ["self", "forward_batch"],
    ("managers/tp_worker.py", "TpModelWorker", "forward_batch_generation"): ["self", "batch", "forward_batch"],
    ("layers/logits_processor.py", "LogitsProcessor", "forward"): [
        "self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states",
    ],
    ("plugins/hook_registry.py", "HookRegistry", "register"): ["cls", "target", "hook", "hook_type"],
    ("plugins/__init__.py", None, "load_plugins"): [],
    ("arg_groups/overrides.py", None, "resolution_result"): ["server_args", "field"],
    ("runtime_context.py", None, "get_parallel"): [],
}  # fmt: skip

# (file, class): names that its body declares, or that its methods assign on `self`.
ATTRIBUTES = {
    ("model_executor/model_runner.py", "ModelRunner"): {
        "is_draft_worker", "model", "model_config", "server_args", "spec_algorithm", "device", "forward_pass_id",
        "kv_cache_dtype",
    },
    ("model_executor/model_runner.py", "ModelRunnerOutput"): {"logits_output"},
    ("model_executor/forward_batch_info.py", "ForwardMode"): {"EXTEND", "MIXED"},
    ("model_executor/forward_batch_info.py", "ForwardBatch"): {
        "forward_mode", "rids", "input_ids", "extend_prefix_lens_cpu", "extend_seq_lens_cpu", "mm_inputs", "input_embeds",
        "lora_ids", "global_num_tokens_cpu",
    },
    ("managers/schedule_batch.py", "ScheduleBatch"): {"reqs"},
    ("managers/schedule_batch.py", "Req"): {"rid", "origin_input_ids", "retraction_count"},
    ("layers/logits_processor.py", "LogitsProcessorOutput"): {"customized_info"},
    ("configs/model_config.py", "ModelConfig"): {
        "hf_config", "hf_text_config", "hidden_size", "vocab_size", "context_len", "dtype", "quantization",
    },
}  # fmt: skip

SETTINGS = {
    "model_path", "revision", "load_format", "port", "chunked_prefill_size", "max_prefill_tokens", "disable_radix_cache",
    "dp_size", "tp_size", "pp_size", "enable_two_batch_overlap", "enable_pdmux", "lora_paths", "cuda_graph_config",
}  # fmt: skip


def parsed(file: str) -> ast.Module:
    return ast.parse((SRT / file).read_text())


def class_of(file: str, name: str) -> ast.ClassDef:
    return next(node for node in ast.walk(parsed(file)) if isinstance(node, ast.ClassDef) and node.name == name)


@pytest.mark.parametrize("target", FUNCTIONS, ids=lambda target: ".".join(filter(None, target[1:])))
def test_functions_take_what_the_plugin_gives_and_reads(target: tuple[str, str | None, str]) -> None:
    file, owner, name = target
    body = (class_of(file, owner) if owner else parsed(file)).body
    (function,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    assert parameters[: len(FUNCTIONS[target])] == FUNCTIONS[target]
    if not FUNCTIONS[target]:
        assert parameters[len(function.args.defaults) :] == []


@pytest.mark.parametrize("target", ATTRIBUTES, ids=lambda target: target[1])
def test_objects_have_what_the_plugin_reads(target: tuple[str, str]) -> None:
    file, name = target
    nodes = list(ast.walk(class_of(file, name)))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    assert ATTRIBUTES[target] - names == set()


def test_hook_types_are_known() -> None:
    names = {node.targets[0].id for node in class_of("plugins/hook_registry.py", "HookType").body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    assert names >= {"BEFORE", "AFTER", "AROUND"}


def test_settings_are_known() -> None:
    files = [SRT / "server_args.py", *(SRT / "arg_groups/fields").glob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert SETTINGS - names == set()


def test_the_entry_point_group_is_the_plugins() -> None:
    assert '"sglang.srt.plugins"' in (SRT / "plugins/__init__.py").read_text()


def test_layers_are_chosen_before_graphs_are_captured() -> None:
    """`init_attention_backends` says so itself, and is where SGLang calls the setter for its flag."""
    (method,) = [
        node
        for node in class_of("model_executor/model_runner.py", "ModelRunner").body
        if isinstance(node, ast.FunctionDef) and node.name == "init_attention_backends"
    ]
    assert "configure_aux_hidden_state_capture(" in ast.unparse(method)


def test_ranks_are_where_they_are_read() -> None:
    """On the runner in 0.5.20, for the process later."""
    runner = (SRT / "model_executor/model_runner.py").read_text()
    holder = SRT / ("distributed/parallel_state_wrapper.py" if "self.ps = ps" in runner else "runtime_context.py")
    text = Path(holder).read_text()
    assert [name for name in ("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "dp_rank", "pp_rank") if name not in text] == []
