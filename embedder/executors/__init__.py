"""Executors of the pipeline, local and on Ray: sessions, signals, progress, monitoring."""
