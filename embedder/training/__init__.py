"""Training through the embedding pipeline: the same sources, decode door and tokeniser feed `shards.training`."""
