"""Training through the embedding pipeline: the same sources, sandboxed decoder and tokeniser feed `trainer`."""
