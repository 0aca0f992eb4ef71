"""A store's index: what it is made of, how each publication comes to one, and the versions that are kept."""
