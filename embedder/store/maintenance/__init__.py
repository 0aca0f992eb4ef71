"""Upkeep of a published store: compaction, vacuum, migration, purge."""
