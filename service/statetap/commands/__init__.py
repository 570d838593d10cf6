"""The service's own subcommands of `statetap`, found through the entry-point group `statetap.commands`."""
