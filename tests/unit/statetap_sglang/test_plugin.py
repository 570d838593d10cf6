from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import statetap_sglang
from statetap_sglang.plugin import register

from tests.fakes.sglang_stub import HookRegistry, stubbed_sglang

PACKAGE = Path(statetap_sglang.__file__).parent


def test_off_costs_nothing() -> None:
    """Neither a hook, nor an import, nor a variable."""
    script = """
import os, sys
before = set(sys.modules)
from statetap_sglang.plugin import register
register()
ours = {name for name in set(sys.modules) - before if name.startswith(("statetap", "torch", "numpy", "sglang"))}
assert ours == {"statetap_sglang", "statetap_sglang.plugin"}, ours
assert not any(name.startswith("STATETAP") for name in os.environ)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STATETAP")}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment | {"PYTHONPATH": str(PACKAGE.parent)}, timeout=60)


def test_a_boots_processes_share_its_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STATETAP_PLUGIN_DIR", str(tmp_path))
    monkeypatch.delenv("STATETAP_PLUGIN_BOOT_ID", raising=False)
    with stubbed_sglang() as module:
        register()
        boot_id = os.environ["STATETAP_PLUGIN_BOOT_ID"]
        register()  # in a child, which inherited it
        assert os.environ["STATETAP_PLUGIN_BOOT_ID"] == boot_id
        assert HookRegistry.hooks.keys() == {module.LOADED, module.BATCH, module.FORWARD, module.LOGITS}
    monkeypatch.delenv("STATETAP_PLUGIN_BOOT_ID")
    with stubbed_sglang():
        register()
        assert os.environ["STATETAP_PLUGIN_BOOT_ID"] != boot_id


def test_sglang_finds_the_entry_point() -> None:
    (found,) = entry_points(group="sglang.srt.plugins", name="statetap")
    assert found.value == "statetap_sglang.plugin:register"
    declared = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert declared["entry-points"]["sglang.srt.plugins"] == {"statetap": found.value}
    assert {name.split(">")[0] for name in declared["dependencies"]} == {"numpy", "safetensors"}


def imported(file: Path) -> set[str]:
    """The packages that a module imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_one_file_alone_imports_sglang() -> None:
    assert [file.name for file in PACKAGE.rglob("*.py") if "sglang" in imported(file)] == ["sglang_plugin.py"]


def test_nothing_is_imported_that_an_sglang_environment_lacks() -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy", "safetensors", "torch", "sglang", "huggingface_hub", "statetap_sglang"}
    assert {name for file in PACKAGE.rglob("*.py") for name in imported(file)} <= allowed
