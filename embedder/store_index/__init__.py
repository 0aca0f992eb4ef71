"""Index of a store: building or updating one for each publication, and the versions that are kept."""
