"""The parts of `scripts/bench_retrieval.py`."""
