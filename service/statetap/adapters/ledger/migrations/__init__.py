"""The schema's history, which alembic runs when the ledger is opened. `versions/` is append-only."""
