"""The refusal `refused.json`: why a plugin that was switched on publishes nothing. It stands where the beacon would."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from statetap_sglang.filesystem import read_small
from statetap_sglang.format import FORMAT_VERSION, REFUSAL_NAME, DumpFormatError
from statetap_sglang.strict_json import load_object
from statetap_sglang.tap import UNPUBLISHED_REFUSAL

MAX_REFUSAL_BYTES = 1 << 16
MAX_REASON = 4000


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tap that will not publish: `reason` names the setting and the way out."""

    reason: str
    plugin_version: str
    sglang_version: str

    def write(self, directory: Path) -> None:
        """Write `refused.json` under a dot-name and rename it over an older one."""
        text = {
            "format_version": FORMAT_VERSION,
            "reason": self.reason[:MAX_REASON].encode(errors="replace").decode(),
            "plugin_version": self.plugin_version,
            "sglang_version": self.sglang_version,
        }
        unpublished = directory / UNPUBLISHED_REFUSAL
        unpublished.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
        unpublished.replace(directory / REFUSAL_NAME)

    @classmethod
    def read(cls, directory: Path) -> Refusal:
        """Read and validate a tap directory's refusal. Unknown keys are ignored.

        Raises:
            FileNotFoundError: there is none: the tap publishes, or is not ready yet.
            DumpFormatError: it is not a refusal, or of another format version.
        """
        path = directory / REFUSAL_NAME
        found = load_object(path, read_small(path, MAX_REFUSAL_BYTES))
        if found.get("format_version") != FORMAT_VERSION:
            raise DumpFormatError(path, f"format_version is {found.get('format_version')!r}, this is version {FORMAT_VERSION}")
        texts = [found.get(name) for name in ("reason", "plugin_version", "sglang_version")]
        if not all(isinstance(text, str) for text in texts):
            raise DumpFormatError(path, "reason, plugin_version and sglang_version must be strings")
        return cls(*map(str, texts))
