"""Engines that run the pipeline, locally or on Ray: resources, sessions, signals, monitoring."""
