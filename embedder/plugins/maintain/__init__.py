"""Upkeep of a store: what is damaged or left over is found, items are purged, files that nothing needs deleted."""
