"""The entry point of the group `sglang.srt.plugins`. SGLang calls `register` in each of its processes.

Off, and then nothing else is imported, unless `STATETAP_PLUGIN_DIR` is set.
"""

from __future__ import annotations

import os
import uuid


def register() -> None:
    """Register the hooks. The first process of a boot also makes the boot's id, which the others inherit."""
    if not os.environ.get("STATETAP_PLUGIN_DIR"):
        return
    from statetap_sglang.settings import BOOT_ID

    os.environ.setdefault(BOOT_ID, uuid.uuid4().hex)

    from statetap_sglang.sglang_plugin import register_hooks

    register_hooks(os.environ)
