"""A worker's life: load the model, listen, warm up, serve until SIGTERM.

The model is loaded before the port is bound, as SGLang does it: whoever gets an answer talks to a loaded model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import structlog
from aiohttp import web

from statetap.embedded.http import WorkerApi
from statetap.embedded.model import TappedModel, load
from statetap.embedded.options import WorkerOptions
from statetap.embedded.outlets import embedded_version, open_outlet
from statetap.embedded.prefix_cache import PrefixCache
from statetap.embedded.scheduler import Scheduler

STOP_SECONDS = 1.0
DIED_OF_SIGQUIT = 128 + signal.SIGQUIT

log = structlog.get_logger()


def run(options: WorkerOptions) -> None:
    """Serve in the foreground until SIGTERM or SIGINT.

    Raises:
        UnsupportedModel: the model cannot be loaded or tapped.
        TapError: the dump directory cannot be used.
        OSError: the port cannot be bound.
    """
    configure_logging()
    log.info("worker.starting", model_path=options.model_path, pid=os.getpid(), version=embedded_version())
    asyncio.run(serve(load(options), options))


async def serve(model: TappedModel, options: WorkerOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    outlet = open_outlet(model, options)
    scheduler = Scheduler(
        model,
        outlet,
        chunk_size=options.chunked_prefill_size,
        on_fatal=die,
        prefix_cache=None if options.prefix_cache_tokens is None else PrefixCache(options.prefix_cache_tokens),
        publish_decode=options.publish_decode,
        gap_seconds=options.gap_seconds,
    )
    api = WorkerApi(model, scheduler, options)
    # A handler whose client has gone is cancelled: that is how a disconnect aborts its request.
    runner = web.AppRunner(api.application(), handler_cancellation=True, access_log=None, shutdown_timeout=STOP_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, options.host, options.port).start()
        port = runner.addresses[0][1]
        scheduler.start()
        await api.warm_up()
        log.info(
            "worker.ready",
            host=options.host,
            port=port,
            dumps=str(outlet.directory),
            model_fingerprint=model.fingerprint,
            aux_layer_ids=list(model.aux_layer_ids),
            final=model.final,
            dtype=model.dtype,
            context_length=model.context_length,
        )
        await stop.wait()
    finally:
        # First the scheduler, so that the handlers still waiting for it have an answer to give.
        finished = await asyncio.to_thread(scheduler.stop, STOP_SECONDS)
        await runner.cleanup()
    log.info("worker.stopped", cut_off_a_pass=not finished)
    if not finished:
        # Python would wait for torch in the scheduler's thread, and the dumps' lock goes with the process.
        sys.stdout.flush()
        os._exit(0)
    outlet.close()


def die(error: Exception) -> None:
    """End the process at once, as SGLang's scheduler does with SIGQUIT, so that nobody waits for answers that cannot come."""
    log.critical("worker.died", error=f"{type(error).__name__}: {error}", exc_info=error)
    sys.stdout.flush()
    os._exit(DIED_OF_SIGQUIT)


def configure_logging() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        # A line must be out when it is written: whoever started the worker waits for `worker.ready`.
        logger_factory=structlog.WriteLoggerFactory(file=sys.stdout),
    )
