"""What the people and machines who run the embedder see: log, one line a run, metrics, and a call when it fails."""
