"""Objects without digests of their own: what is in them, the digests of their samples say."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_column("shard_objects", "digest")
