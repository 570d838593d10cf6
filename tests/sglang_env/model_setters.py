"""The layer setters of the installed SGLang's models, cut out of their source and put on stubs: no model is imported."""

from __future__ import annotations
import __future__

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

SETTERS = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture", "set_dspark_layers_to_capture")
LAYERS = 12


def sglang_root() -> Path:
    """The installed package's folder, without importing it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass(frozen=True)
class SetterClass:
    """A class of a model file that has setters: their source, by name."""

    file: str
    name: str
    setters: dict[str, ast.FunctionDef]

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"

    @property
    def text(self) -> str:
        return "\n".join(ast.unparse(setter) for setter in self.setters.values())

    @property
    def is_decoder(self) -> bool:
        """Whether it is the stack of layers itself, which the causal model's setter calls."""
        return "self.layers" in self.text and "self.model" not in self.text


def setter_classes() -> list[SetterClass]:
    found = []
    for file in sorted((sglang_root() / "srt/models").glob("*.py")):
        text = file.read_text()
        if "layers_to_capture" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                setters = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef) and item.name in SETTERS}
                if setters:
                    found.append(SetterClass(file.name, node.name, setters))
    return found


def _bound(setter: ast.FunctionDef) -> Any:
    function = ast.FunctionDef(**(vars(setter) | {"decorator_list": []}))
    module = ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[]))
    parallel = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True, world_size=1))
    namespace: dict[str, Any] = {"get_parallel": lambda: parallel}
    # Annotations stay text: what they name is not imported.
    exec(compile(module, setter.name, "exec", __future__.annotations.compiler_flag, dont_inherit=True), namespace)
    return namespace[setter.name]


def _with_setters(base: type[nn.Module], setters: dict[str, ast.FunctionDef]) -> nn.Module:
    return type("Stub", (base,), {name: _bound(setter) for name, setter in setters.items()})()


class _Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_id = index
        self._is_layer_to_capture = False
        self.mlp_ar_fusable = True


class _PlainLayer(nn.Module):
    pass


class Stub(nn.Module):
    """What setters look at, besides the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.pp_group = SimpleNamespace(is_last_rank=True, world_size=1)
        sizes = SimpleNamespace(num_hidden_layers=LAYERS)
        self.config = SimpleNamespace(num_hidden_layers=LAYERS, text_config=sizes, hidden_size=8)
        self.capture_aux_hidden_states = False


class MarkedDecoder(Stub):
    """Layers that are marked one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(i) for i in range(LAYERS)])
        self.layers_to_capture: Any = []
        self.carries_bank_slices = False


class PlainDecoder(MarkedDecoder):
    """Layers without marks: the list alone says what is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_PlainLayer() for _ in range(LAYERS)])


def stub_of(chosen: SetterClass, classes: list[SetterClass]) -> nn.Module:
    """A model with the class's own setters, around a decoder such as theirs reach for."""
    text = chosen.text
    # A decoder inherits from Qwen2MoeModel the setters that its own file lacks, or has but one for all kinds of draft.
    decoders = [other for other in classes if other.is_decoder and other.file in (chosen.file, "qwen2_moe.py")]
    calls_decoder = any(f"self.model.{name}" in text for name in SETTERS)
    marks = calls_decoder or "_is_layer_to_capture" in text

    def decoder() -> nn.Module:
        base = MarkedDecoder if marks else PlainDecoder
        setters: dict[str, ast.FunctionDef] = {}
        for other in decoders if calls_decoder else ():
            setters = {name: next(iter(other.setters.values())) for name in SETTERS} | other.setters | setters
        return _with_setters(base, setters)

    model = _with_setters(Stub, chosen.setters)
    if "self.language_model.layers_to_capture" in text:
        model.language_model = decoder()
    elif "self.language_model" in text or "self.llm" in text:
        wrapped = [other for other in classes if other.file == chosen.file and other.name != chosen.name]
        # Where that is another file's class, DeepSeek's: no other setter makes as much of the ids.
        wrapped += [other for other in classes if other.file == "deepseek_v2.py"]
        model.language_model = model.llm = stub_of(wrapped[0], classes)
    elif "self.model.language_model" in text:
        model.model = nn.Module()
        model.model.language_model = decoder()
    elif "self.model" in text:
        model.model = decoder()
    else:
        model.layers = nn.ModuleList([_Layer(i) for i in range(LAYERS)])
    return model
