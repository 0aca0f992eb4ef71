"""Submission of runs to Ray clusters over HTTP, from machines that have neither Ray nor torch."""
