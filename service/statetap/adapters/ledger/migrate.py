"""Brings a database to the newest revision that this version knows, in the transaction that it is given."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from statetap.ports import LedgerError

_SCRIPTS = Path(__file__).with_name("migrations")


def migrate(connection: Connection, location: str) -> None:
    """Upgrade, or do nothing if there is nothing to do.

    Raises:
        LedgerError: the database is newer than this version, or holds other things than a ledger.
    """
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    current = MigrationContext.configure(connection).get_current_revision()
    if current is None:
        if inspect(connection).get_table_names():
            raise LedgerError(
                f"the database {location} holds tables that are not a ledger's; give the ledger a database of its own"
            )
    elif current not in known:
        raise LedgerError(
            f"the ledger {location} has revision {current}, which is newer than this version knows (up to "
            f"{scripts.get_current_head()}); run the version of Statetap that wrote it, or a newer one"
        )
    if current != scripts.get_current_head():
        command.upgrade(config, "head")
