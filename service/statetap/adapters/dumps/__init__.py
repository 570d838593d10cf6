"""Dump sources: a worker's dump directory as a stream of events, for plugin dumps and for plain ones."""

from statetap.adapters.dumps.plain import PlainDumpSource
from statetap.adapters.dumps.plugin import PluginDumpSource

__all__ = ["PlainDumpSource", "PluginDumpSource"]
