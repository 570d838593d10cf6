"""`python -m tests.bench.watched_service --config FILE --lags FILE`: the service as `statetap serve` runs it, its loop watched.

A timer on the service's own event loop, every few milliseconds: how late it is, is how long the loop was held. All of it is
written to `--lags` at the end: pairs of when (nanoseconds, monotonic) and how late (seconds).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from statetap import main as service
from statetap.settings import Settings, load_settings

EVERY_SECONDS = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--lags", type=Path, required=True)
    options = parser.parse_args()
    settings = load_settings(options.config)
    service.configure_logs(settings)
    lags: list[tuple[int, float]] = []
    try:
        asyncio.run(_serve(settings, lags))
    finally:
        options.lags.write_text(json.dumps(lags))


async def _serve(settings: Settings, lags: list[tuple[int, float]]) -> None:
    loop = asyncio.get_running_loop()

    def look(due: float) -> None:
        now = loop.time()
        lags.append((time.monotonic_ns(), now - due))
        loop.call_at(now + EVERY_SECONDS, look, now + EVERY_SECONDS)

    look(loop.time())
    await service.serve(settings)


if __name__ == "__main__":
    main()
