"""Search of a store: queries, conditions, hybrid ranking, grouping of videos, near-duplicates, hits."""
