"""The store: Zarr metadata and small arrays through `ZarrStore`, shard objects by hand through `ShardWriters`."""
