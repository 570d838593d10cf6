"""The plugin's settings: variables with the prefix `STATETAP_PLUGIN_`, read once at the start.

Imports nothing but the standard library: this much is loaded in every SGLang process, whether the plugin is on or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

PREFIX = "STATETAP_PLUGIN_"
DIRECTORY, WORKER, BOOT_ID = PREFIX + "DIR", PREFIX + "WORKER", PREFIX + "BOOT_ID"
LAYERS, FINAL = PREFIX + "LAYERS", PREFIX + "FINAL"
BUDGET_BYTES, RING_BYTES, FORCE = PREFIX + "BUDGET_BYTES", PREFIX + "RING_BYTES", PREFIX + "FORCE"
PINNED_DUMP_BYTES = PREFIX + "PINNED_DUMP_BYTES"
# BOOT_ID is for the plugin itself: the process that starts a server hands it down to the server's other processes.
_KNOWN = (DIRECTORY, WORKER, LAYERS, FINAL, BUDGET_BYTES, RING_BYTES, PINNED_DUMP_BYTES, FORCE, BOOT_ID)

LAYER_PRESETS = ("eagle3", "all", "none")
FINALS = ("post_norm", "pre_norm", "both", "none")

_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES = re.compile(r"(?P<number>[0-9]{1,15})\s*(?P<suffix>[KMGT]?)(iB|B)?", re.ASCII)
_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


class SettingsError(ValueError):
    """A variable that cannot be meant: the message names it, what was found and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """What the user asked for.

    `layers` is a preset's name or ascending layer ids in Statetap's convention. None: `worker` is made from host name and
    port, `budget_bytes` is a share of the tmpfs, `ring_bytes` follows from the chunk size, no dump file is registered with CUDA
    (`pinned_dump_bytes`), `boot_id` is not made yet.
    """

    directory: Path
    worker: str | None = None
    layers: str | tuple[int, ...] = "eagle3"
    final: str = "post_norm"
    budget_bytes: int | None = None
    ring_bytes: int | None = None
    pinned_dump_bytes: int | None = None
    force: bool = False
    boot_id: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> PluginSettings | None:
        """Read the variables; None where `STATETAP_PLUGIN_DIR` is not set: the plugin is off.

        Raises:
            SettingsError: an unknown variable, or a value that makes no sense.
        """
        directory = environment.get(DIRECTORY, "")
        if not directory:
            return None
        for name in sorted(environment):
            if name.startswith(PREFIX) and name not in _KNOWN:
                nearest = get_close_matches(name, _KNOWN[:-1], n=1, cutoff=0.0)[0]
                raise SettingsError(f"{name} is no setting of the plugin; the nearest one is {nearest}")
        if not Path(directory).is_absolute():
            raise SettingsError(f"{DIRECTORY} is {directory!r}; give an absolute path on a tmpfs, as /dev/shm/statetap")
        return cls(
            directory=Path(directory),
            worker=environment.get(WORKER) or None,
            layers=_layers(environment.get(LAYERS, "eagle3")),
            final=_choice(FINAL, environment.get(FINAL, "post_norm"), FINALS),
            budget_bytes=_bytes(BUDGET_BYTES, environment.get(BUDGET_BYTES)),
            ring_bytes=_bytes(RING_BYTES, environment.get(RING_BYTES)),
            pinned_dump_bytes=_bytes(PINNED_DUMP_BYTES, environment.get(PINNED_DUMP_BYTES)),
            force=_truth(FORCE, environment.get(FORCE, "")),
            boot_id=environment.get(BOOT_ID) or None,
        )


def _layers(text: str) -> str | tuple[int, ...]:
    if text.strip() in LAYER_PRESETS:
        return text.strip()
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", part, re.ASCII) for part in parts):
        raise SettingsError(f"{LAYERS} is {text!r}; give layer ids as 1,14,26 or one of {', '.join(LAYER_PRESETS)}")
    ids = tuple(int(part) for part in parts)
    if list(ids) != sorted(set(ids)):
        raise SettingsError(f"{LAYERS} is {text!r}; give each layer once, in ascending order")
    return ids


def _choice(name: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise SettingsError(f"{name} is {text!r}; it must be one of {', '.join(allowed)}")
    return text


def _bytes(name: str, text: str | None) -> int | None:
    if not text:
        return None
    found = _BYTES.fullmatch(text.strip())
    if not found or not int(found["number"]):
        raise SettingsError(f"{name} is {text!r}; give a number of bytes, as 8G, 512MiB or 1073741824")
    return int(found["number"]) * _SUFFIXES[found["suffix"]]


def _truth(name: str, text: str) -> bool:
    if text.lower() not in _TRUTHS:
        raise SettingsError(f"{name} is {text!r}; it must be 1 or 0")
    return _TRUTHS[text.lower()]
