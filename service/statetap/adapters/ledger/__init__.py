"""The ledger on a SQL database."""

from statetap.adapters.ledger.ledger import SqlLedger

__all__ = ["SqlLedger"]
