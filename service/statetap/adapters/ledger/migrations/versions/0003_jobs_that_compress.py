"""Jobs that compress. No table changes: a job says so in its spec, which an older version would read past.

That version would write uncompressed objects into a compressed store; this revision keeps it from such a ledger.
"""

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing but the number."""
