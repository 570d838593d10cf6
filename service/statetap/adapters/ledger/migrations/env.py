"""Alembic's entry: runs the migrations on the connection that the ledger gives, inside the transaction that it has begun."""

from __future__ import annotations

from alembic import context

from statetap.adapters.ledger.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
