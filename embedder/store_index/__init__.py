"""The index of a store: how each publication comes to one, and the versions that are kept."""
