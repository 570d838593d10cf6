"""Where the SGLang environment is that `make test-sglang` builds, and what a process of a test server needs to run on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIMS = ROOT / "tests" / "e2e" / "shims"
ENVIRONMENT = Path(os.environ.get("E2E_SGLANG_ENVIRONMENT", ROOT / ".venv-sglang"))
PYTHON = ENVIRONMENT / "bin" / "python"
MODELS = Path(os.environ.get("E2E_MODELS", ROOT / "var" / "models"))
TINY, SMOL = MODELS / "tiny-llama", MODELS / "smollm2-135m-instruct"

CURRENT, PREVIOUS = "0.5.23", "0.5.20"
# The only model file that SGLang need import: the other hundred would cost each process of a server ten seconds.
MODEL_FILES = {"__init__", "registry", "llama"}


class EnvironmentMissing(RuntimeError):
    """The SGLang environment or a model is not there; the message says how to make it."""


def check_environment() -> None:
    for needed in (PYTHON, packages(CURRENT), packages(PREVIOUS), TINY / "config.json", SMOL / "config.json"):
        if not needed.exists():
            raise EnvironmentMissing(f"{needed} is missing: run these tests with `make test-sglang`, which makes it")


def packages(version: str) -> Path:
    """The folder that holds the `sglang` package: the environment's own, or, of the earlier version, one beside it."""
    if version == CURRENT:
        return next(ENVIRONMENT.glob("lib/python3.*/site-packages"), ENVIRONMENT / "lib")
    return ENVIRONMENT / f"sglang-{version}"


def server_variables(version: str, cores: str) -> dict[str, str]:
    """The environment of a server's processes. `cores` are those of each tensor-parallel rank, as `0-1` or `0|1`."""
    path = [SHIMS] if version == CURRENT else [SHIMS, packages(version)]
    files = {file.stem for file in (packages(version) / "sglang" / "srt" / "models").glob("*.py")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STATETAP_", "SGLANG_"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": cores,
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(files - MODEL_FILES)),
        "OMP_NUM_THREADS": "1",
        # Threads that wait for each other sleep: others need the cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        # SGLang takes NCCL for usable wherever its library loads: beside a torch that is made for CUDA it does, and finds no GPU.
        "SGLANG_NCCL_SO_PATH": os.devnull,
    }
