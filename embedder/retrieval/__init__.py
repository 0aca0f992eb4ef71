"""From the store to an answer: build the index, encode queries, search, show pictures."""
